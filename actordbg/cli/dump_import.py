"""`actordbg dump import`: bring the pickles of the old recorder into the store, without ever executing them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, Quiet, store_of

if TYPE_CHECKING:
    from actordbg.legacy.importer import ImportSummary, Refusal

SHOWN = 50


@dataclass
class ImportAnswer:
    """What an import did; `refused` names each file that was skipped, with the error code and the reason."""

    store: str
    added: int
    present: int
    refused: list[Refusal]
    runs: list[str]
    bytes_read: int
    bytes_stored: int
    seconds: float


def import_(
    ctx: typer.Context,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Pickles, or folders that are searched for *.pkl.")
    ],
    run: Annotated[str | None, typer.Option("--run", help="Name of the run (default: the name of the folder).")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Import pickles of the old recorder; execute nothing in them.

    Keeps timestamps (taken as UTC) and ranks. Skips files that are in the store already; names a bad file and skips it.
    Exit code 1 if a file was refused.

    Example: actordbg dump import input_dumps/ --run ppo-llama
    """
    from actordbg.legacy.importer import find_pickles, import_paths

    store = store_of(ctx)
    began = time.perf_counter()
    with output.progress("importing", len(find_pickles(paths)), quiet=quiet or as_json) as advance:
        summary = import_paths(store, paths, run=run, on_progress=lambda done, total, path: advance(1))
    answer = _answer(str(store.root), summary, time.perf_counter() - began)
    output.emit(answer, _render, as_json)
    if answer.refused:
        raise typer.Exit(1)


def _answer(store: str, summary: ImportSummary, seconds: float) -> ImportAnswer:
    return ImportAnswer(
        store,
        summary.added,
        summary.present,
        summary.refused,
        summary.runs,
        summary.bytes_read,
        summary.bytes_stored,
        round(seconds, 3),
    )


def _render(answer: ImportAnswer) -> None:
    for refusal in answer.refused[:SHOWN]:
        output.note(f"refused[{refusal.code}]: {refusal.path}: {refusal.reason}")
    if len(answer.refused) > SHOWN:
        output.note(f"... and {len(answer.refused) - SHOWN} more; --json lists them all")
    output.say(
        f"{output.plural(answer.added, 'dump')} added, {answer.present:,} already there, "
        f"{len(answer.refused):,} refused, in {answer.seconds:.1f} s"
    )
    if answer.added:
        read, stored = output.human_bytes(answer.bytes_read), output.human_bytes(answer.bytes_stored)
        ratio = answer.bytes_read / answer.bytes_stored
        output.say(f"run {', '.join(answer.runs)}: {read} of pickles became {stored} ({ratio:.1f} times smaller)")
