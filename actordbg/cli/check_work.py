"""The work of `actordbg check`: run it with a progress bar, and write the result as text, page and annotations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from actordbg.api.planning import counting
from actordbg.base.errors import CorruptDump, UsageError
from actordbg.base.units import plural
from actordbg.catalog.selections import joined
from actordbg.cli import output
from actordbg.cli.options import store_of
from actordbg.cli.output import note, note_some, progress, say
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.replaying import replaying, require_runnable
from actordbg.document.blocks import Block, verdict_in
from actordbg.document.command_result import CommandResult
from actordbg.document.renderings import as_markdown
from actordbg.dumps.importer import find_pickles, import_paths
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.judge.check import ROUNDING, TRUTH, CheckFound, run_check
from actordbg.judge.exports import workflow_commands
from actordbg.records.journal import read_standing
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.selection import PICKLES
from actordbg.replay.supervise import COMPLETE, Progress
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX

SAMPLE = 8
"""Number of dumps to check by default."""


def sampled(inputs: ChosenInputs) -> ChosenInputs:
    """Return the inputs, as a diverse sample unless an option names specific ones."""
    if inputs.longest or inputs.slowest or inputs.diverse or inputs.input_file:
        return inputs
    return replace(inputs, diverse=inputs.max_inputs or SAMPLE)


def with_paths(ctx: typer.Context, paths: list[Path], inputs: ChosenInputs) -> ChosenInputs:
    """Make each PATH a selection: a store is checked instead of the usual one, old pickles below a folder are imported first and
    checked alone, and other files are what --input-file names.

    Where there is no store, that of the first file is used, else one is made. Raises UsageError for any other path,
    and for a store or a folder beside other paths; CorruptDump if no old pickle could be imported.
    """
    folders = [path for path in paths if path.is_dir()]
    for path in paths:
        if not path.is_dir() and not str(path).partition("#")[0].endswith((*PICKLES, SUFFIX, PACK_SUFFIX)):
            there = "is not a dump, a pack or an old pickle" if path.exists() else "does not exist"
            raise UsageError(f"{path} {there}", hint="name a store, a folder of old pickles, dump files or packs")
    if paths and not folders and not store_of(ctx).exists():
        near = [folder for folder in paths[0].resolve().parents if Store(folder).exists()]
        ctx.find_root().params["store"] = str(near[0] if near else store_of(ctx).create().root)
        note(f"using {'the store' if near else 'a new store,'} {store_of(ctx).root}")
    if not folders:
        return replace(inputs, input_file=[*(inputs.input_file or []), *paths] or None)
    if len(paths) > 1 or inputs.input_file:
        raise UsageError(f"{folders[0]} is a folder: check it alone", hint="name one folder, or files")
    if Store(folders[0]).exists():
        ctx.find_root().params["store"] = str(folders[0])
        return inputs
    store, ids = store_of(ctx), list[str | None]()
    if store.exists():
        store.require_writable()
    with progress("importing", len(find_pickles(folders))) as advance:

        def on_file(dump_id: str | None) -> None:
            ids.append(dump_id)
            advance(1)

        summary = import_paths(store, folders, on_file=on_file)
    note_some([f"refused[{refusal.code}]: {refusal.path}: {refusal.reason}" for refusal in summary.refused], 5)
    note(f"{plural(summary.added, 'dump')} imported into {store.root}, {summary.present:,} already there")
    chosen = ", ".join(f"'{dump_id}'" for dump_id in ids if dump_id)
    if not chosen:
        raise CorruptDump(f"no file below {folders[0]} could be imported", hint="`actordbg dump import` names every bad file")
    return replace(inputs, where=joined(inputs.where, f"dump_id in ({chosen})"))


def run_with_bar(store: Store, spec: ReplaySpec, recorded: bool) -> CheckFound:
    """Run the check with a progress bar over all its stages. On Ctrl-C, keep the results and print how to continue."""
    require_runnable(store, spec)
    count = len(spec.inputs)
    done: dict[str, int] = {}
    try:
        with replaying(store, "checking", 2 * count) as advance:

            def on_stage(stage: str) -> None:
                """Begin a stage of `count` steps, and skip the steps that are already computed or not needed."""
                done[stage] = 0
                advance(count - done[TRUTH] if stage == ROUNDING else 0, note=stage)

            def on_event(event: Progress) -> None:
                if event.kind == "attempt" and ROUNDING in done:
                    advance(0, total=3 * count)
                done[list(done)[-1]] += event.kind == "result"
                counted(event)

            counted = counting(lambda n=1, note="": advance(n, note=note and f"{list(done)[-1]}: {note}"))
            return run_check(store, spec, recorded=recorded, on_stage=on_stage, on_event=on_event)
    except KeyboardInterrupt:
        left = read_standing(store.replays / spec.replay_id)[1] != COMPLETE
        first = f"`actordbg replay --resume {spec.replay_id}`, then " if left else ""
        output.note(f"interrupted; results so far are kept, {first}`actordbg compare {spec.replay_id} truth` continues")
        raise typer.Exit(130) from None


def write_check_page(store: Store, answer: CommandResult) -> Path:
    """Return the page's path; without -o FILE.html it is written here, into the store's reports/."""
    if output.wanted.page is not None:
        return output.wanted.page
    make_folder(store.reports)
    path = store.reports / f"check-{answer['replay_id']}.html"
    atomic_write(path, answer.to_html().encode())
    return path


def annotate(checked: CheckFound, document: Sequence[Block]) -> None:
    """Print GitHub annotations, and append the result to the workflow's summary page if there is one."""
    verdict = verdict_in(document)
    assert verdict is not None
    for line in workflow_commands(checked, verdict):
        (output.note if output.wanted.json else say)(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(as_markdown(document))
