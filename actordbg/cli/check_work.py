"""The work of `actordbg check`: run it with a progress bar, and write the result as text, page and annotations."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import typer

from actordbg.cli import output
from actordbg.cli.output import emit, say, say_lines, say_wrapped
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.replaying import counting, replaying, require_runnable
from actordbg.document.page import as_html, write_named
from actordbg.document.renderings import as_markdown
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.judge.check import ROUNDING, TRUTH, CheckAnswer, CheckFound, check_blocks, check_document, run_check
from actordbg.judge.exports import workflow_commands
from actordbg.judge.load_replays import load, pictures
from actordbg.records.journal import read_standing
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.supervise import COMPLETE, Progress
from actordbg.store.layout import Store

SAMPLE = 8
"""Number of dumps to check by default."""


def sampled(inputs: ChosenInputs) -> ChosenInputs:
    """Return the inputs, as a diverse sample unless an option names specific ones."""
    if inputs.longest or inputs.slowest or inputs.diverse or inputs.input_file:
        return inputs
    return replace(inputs, diverse=inputs.max_inputs or SAMPLE)


def run_with_bar(store: Store, spec: ReplaySpec, golden: bool) -> CheckFound:
    """Run the check with a progress bar over all its stages. On Ctrl-C, keep the results and print how to continue."""
    require_runnable(store, spec)
    count = len(spec.inputs)
    done: dict[str, int] = {}
    try:
        with replaying(store, "checking", 2 * count) as (catalog, advance):

            def on_stage(stage: str) -> None:
                """Begin a stage of `count` steps, and skip the steps that are already computed or not needed."""
                done[stage] = 0
                advance(count - done[TRUTH] if stage == ROUNDING else 0, note=stage)

            def on_event(event: Progress) -> None:
                if event.kind == "attempt" and ROUNDING in done:
                    advance(0, total=3 * count)
                done[list(done)[-1]] += event.kind == "result"
                counted(event)

            counted = counting(catalog, lambda n=1, note="": advance(n, note=note and f"{list(done)[-1]}: {note}"))
            return run_check(store, spec, golden=golden, on_stage=on_stage, on_event=on_event, on_tick=catalog.tick)
    except KeyboardInterrupt:
        left = read_standing(store.replays / spec.replay_id)[1] != COMPLETE
        first = f"`actordbg replay --resume {spec.replay_id}`, then " if left else ""
        output.note(f"interrupted; results so far are kept, {first}`actordbg compare {spec.replay_id} truth` continues")
        raise typer.Exit(130) from None


def write_check_page(store: Store, checked: CheckFound, answer: CheckAnswer, named: Path | None) -> Path:
    """Write the page to `named`, else into the store's reports/, and return its path."""
    (data,) = load(store, [answer.replay_id]).replays  # with its comparisons
    page = as_html(check_blocks(checked, answer, pictures(store, data))).encode()
    if named is not None:
        write_named(named, page)
        return named
    make_folder(store.reports)
    path = store.reports / f"check-{answer.replay_id}.html"
    atomic_write(path, page)
    return path


def print_check(answer: CheckAnswer) -> None:
    if output.wanted.format == "md":
        return say_lines(as_markdown(check_document(answer)))

    def render(answer: CheckAnswer) -> None:
        say_wrapped(answer.sentence, rest="  ")
        for name, text in (*answer.figures, ("configuration", answer.configuration)):
            say_wrapped(f"  {name:<14}  {text}", rest=" " * 18)
        say(f"next: {answer.next}")
        say(f"page: {answer.page}")

    return emit(answer, render)


def annotate(checked: CheckFound, answer: CheckAnswer) -> None:
    """Print GitHub annotations, and append the result to the workflow's summary page if there is one."""
    for line in workflow_commands(checked, answer):
        (output.note if output.wanted.json else say)(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(as_markdown(check_document(answer)))
