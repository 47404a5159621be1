"""`actordbg check`: the command that one types first. A sample of one's own dumps, judged by all that can judge them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from actordbg.actor.hub_model import find_model
from actordbg.actor.known_failures import check_config, refuse_hits
from actordbg.base.errors import EnvironmentProblem
from actordbg.catalog.query import count_dumps, open_fresh
from actordbg.check.check_document import CheckAnswer, answer_of_check, check_document
from actordbg.check.check_page import check_blocks
from actordbg.check.junit import workflow_commands, write_junit
from actordbg.check.run_check import ROUNDING, TRUTH, CheckFound, CheckListener, run_check
from actordbg.cli import output
from actordbg.cli.input_options import (
    ChosenInputs,
    ask_for_model,
    asked_for,
    chosen_order,
    is_left_to_rank_0,
    nothing_to,
    planned,
    recorded_model,
    replaying,
)
from actordbg.cli.input_options import (
    opened as open_inputs,
)
from actordbg.cli.matrix import kept
from actordbg.cli.options import Format, FormatOption, Json, Quiet, chosen_format, takes
from actordbg.cli.page_file import open_page
from actordbg.cli.setting_options import NONE, Given, takes_settings
from actordbg.formats.replay_record import ReplaySpec
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.pages.page import as_html
from actordbg.replay.selection import defaults_of
from actordbg.replay.supervise import Progress
from actordbg.report.load_replays import load
from actordbg.report.pictures import pictures
from actordbg.report.renderings import as_markdown
from actordbg.store.layout import Store

SAMPLE = 8
"""Dumps that are checked where nothing says how many."""
_FOR = "For other programs"


@takes("inputs", ChosenInputs)
@takes_settings("check")
def check(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    golden: Annotated[
        bool,
        typer.Option(
            "--golden",
            help="Judge what the training run got, too (--with-outputs); --model has the weights of that moment.",
        ),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", rich_help_panel=_FOR, help="Write JUnit's XML there, too.")
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", rich_help_panel=_FOR, help="Annotate the GitHub workflow that runs this.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Where the page goes (default: into the store's reports/).")
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check a sample of your own dumps: do they run, and right?

    Picks dumps that differ most (lengths, padding, roles, triggers; 8 unless told otherwise), replays them, asks the laws, and
    compares with the truth: each row alone, unpadded, eager, in fp32. Ends in one sentence that says what was not judged,
    three figures, the command that comes next, and a page to forward. The replay stays in the store.
    Exit code 1 if something is wrong or nothing could be judged, 5 if no dump was selected.

    Example: actordbg check --where "rank=0" --model /models/llama-3.1-8b --packing
    """
    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return
    how = chosen_format(format, as_json)
    _require_torch()
    _require_folders(junit, html)
    of_all = inputs.where
    store, inputs = open_inputs(ctx, _sampled(inputs))
    asked = asked_for(ctx, flags)
    order = chosen_order(inputs.order, False)
    plan = planned(store, kept(asked, flags), inputs, order)
    if not (quiet or how == "json") and (answers := ask_for_model(store, plan.spec, asked, flags)):
        asked = asked_for(ctx, flags)
        plan = planned(store, kept(asked, flags), inputs, order, answers)
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    if not plan.spec.inputs:
        raise nothing_to("check", store, inputs)
    of = len(plan.spec.inputs) if inputs.input_file else count_dumps(open_fresh(store), of_all)
    found = _run(store, plan.spec, golden, quiet=quiet or how == "json")
    recorded = recorded_model(store, plan.spec) if "model" not in flags.keys() | asked.sources.keys() else None
    answer = answer_of_check(found, of=of, recorded=recorded)
    answer = replace(answer, page=str(_write_page(store, found, answer, html)))
    _print(found, answer, how)
    if junit is not None:
        write_junit(junit, found, answer)
        output.note(f"wrote {junit}")
    if opened:
        open_page(Path(str(answer.page)))
    if github:
        _annotate(found, answer, how)
    if not answer.good:
        raise typer.Exit(1)


def _sampled(inputs: ChosenInputs) -> ChosenInputs:
    """The inputs, as a diverse sample where no option names some of them."""
    if inputs.longest or inputs.slowest or inputs.diverse or inputs.input_file:
        return inputs
    return replace(inputs, diverse=inputs.max_inputs or SAMPLE)


def _require_folders(*paths: Path | None) -> None:
    """Before minutes of work: whether each file that was named has a folder to lie in."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            hint = "make it first, or name another one"
            raise EnvironmentProblem(f"cannot write {path}: {path.parent} is no folder", hint=hint)


def _require_torch() -> None:
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise EnvironmentProblem(
                f"a check replays, and this environment has no {name}",
                hint="run it in the training environment, or: pip install 'actordbg[replay]'",
            )


def _run(store: Store, spec: ReplaySpec, golden: bool, *, quiet: bool) -> CheckFound:
    """Run it with a bar over all that it computes. An interruption keeps what is done, and says how to go on."""
    findings = check_config(spec.config, defaults=defaults_of(store.root, spec.inputs))
    refuse_hits(findings)
    find_model(spec.config.model)
    for finding in findings if not quiet else ():
        output.note(f"{finding.severity}[{finding.id}]: {finding.message}")
    count = len(spec.inputs)
    try:
        with replaying(store, "checking", 2 * count, quiet=quiet) as (catalog, advance):
            return run_check(store, spec, _listener(catalog.touch, catalog.tick, advance, count), golden=golden)
    except KeyboardInterrupt:
        output.note(f"interrupted; what is done is kept, `actordbg replay --resume {spec.replay_id}` goes on")
        raise typer.Exit(130) from None


def _listener(touch: Callable[[], None], tick: Callable[[], None], advance: Callable[..., None], count: int) -> CheckListener:
    """Moves the bar. Each stage has `count` steps; what was there already, or needs no measuring, is passed over."""
    done: dict[str, int] = {}

    def on_stage(stage: str) -> None:
        done[stage] = 0
        advance(count - done[TRUTH] if stage == ROUNDING else 0, note=stage)

    def on_event(event: Progress) -> None:
        stage = list(done)[-1]
        if event.kind == "attempt" and stage == ROUNDING:
            advance(0, total=3 * count)
        if event.kind == "result":
            touch()
            done[stage] += 1
            advance(1)
        elif event.kind == "attempt":
            advance(0, note=f"{stage}: {f'starting again: {event.text[:100]}' if event.text else 'starting the workers'}")
        elif event.kind == "start":
            advance(0, note=f"{stage}: {event.text}")

    return CheckListener(on_stage, on_event, tick)


def _write_page(store: Store, found: CheckFound, answer: CheckAnswer, named: Path | None) -> Path:
    """The page, where it was asked for, else in the store."""
    path = named or store.reports / f"check-{answer.replay_id}.html"
    if named is None:
        make_folder(store.reports)
    (data,) = load(store, [answer.replay_id]).replays
    page = as_html(check_blocks(found, answer, pictures(store, data)))
    atomic_write(path, page.encode(), mode=0o644 if named else 0o600)
    return path


def _print(found: CheckFound, answer: CheckAnswer, how: Format) -> None:
    if how == "json":
        output.emit(answer, lambda _: None, True)
    elif how == "md":
        output.say_lines(as_markdown(check_document(answer)))
    else:
        output.say_wrapped(answer.sentence, rest="  ")
        for name, text in (*answer.figures, ("configuration", answer.configuration)):
            output.say_wrapped(f"  {name:<14}  {text}", rest=" " * 18)
        output.say(f"next: {answer.next}")
        output.say(f"page: {answer.page}")


def _annotate(found: CheckFound, answer: CheckAnswer, how: Format) -> None:
    """Annotations beside the answer, and the answer on the workflow's summary page where there is one."""
    for line in workflow_commands(found, answer):
        (output.note if how == "json" else output.say)(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(as_markdown(check_document(answer)))
