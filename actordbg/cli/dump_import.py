"""`actordbg dump import` and `dump create`: dumps that no run recorded into this store.

`import` brings in the pickles of the old recorder, without ever executing them; `create` makes random inputs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, Quiet, option, store_of

if TYPE_CHECKING:
    from actordbg.dumps.importer import ImportSummary


_SHOWN = 50


def import_(
    ctx: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Pickles, or folders that are searched for *.pkl.")],
    run: str | None = option(None, "Name of the run (default: the name of the folder)."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Import pickles of the old recorder; execute nothing in them.

    Keeps timestamps (taken as UTC) and ranks. Skips files that are in the store already; names a bad file and skips it.
    Exit code 1 if a file was refused.

    Example: actordbg dump import input_dumps/ --run ppo-llama
    """
    from actordbg.dumps.importer import find_pickles, import_paths

    store = store_of(ctx)
    if store.exists():
        store.require_writable()
    began = time.perf_counter()
    with output.progress("importing", len(find_pickles(paths)), quiet=quiet or as_json) as advance:
        summary = import_paths(store, paths, run=run, on_progress=lambda done, total, path: advance(1))
    seconds = round(time.perf_counter() - began, 3)
    answer = vars(summary) | {"store": str(store.root), "seconds": seconds}
    output.emit(answer, lambda _: _say_imported(summary, seconds), as_json)
    if summary.refused:
        raise typer.Exit(1)


def create(
    ctx: typer.Context,
    count: int = option(1, "Calls to make for each rank.", "--count", "-n", min=1),
    batch_size: int = option(2, "Rows of each input, B."),
    seq_len: int = option(512, "Positions of each row, S, padding included."),
    action_len: int | None = option(None, "Last positions that are actions, A (default S/2; 0: no action mask)."),
    padding: str = option("both", "Pad left (prompts), right (responses), both or none.", metavar="SIDE"),
    ranks: int = option(1, "Ranks to make them for.", min=1),
    vocab_size: int = option(128_256, "Make token ids below this."),
    seed: int = option(0, "The same seed makes the same tensors."),
    run: str = option("created", "Name of the run."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make random inputs of chosen shapes.

    The dumps have the format of recorded ones, so every command takes them.

    Example: actordbg dump create --count 4 --batch-size 2 --seq-len 1024 --padding both --ranks 2
    """
    from actordbg.dumps.create import create_dumps
    from actordbg.formats.dump_record import SUFFIX

    store = store_of(ctx)
    if store.exists():
        store.require_writable()
    with output.progress("creating", count * ranks, quiet=quiet or as_json) as advance:
        paths = create_dumps(
            store, count, batch_size, seq_len, action_len, padding, ranks, vocab_size, seed, run,
            on_progress=lambda done, total: advance(1),
        )  # fmt: skip
    ids = [path.name.removesuffix(SUFFIX) for path in paths]
    size = sum(path.stat().st_size for path in paths)
    answer = {"store": str(store.root), "run": run, "created": len(ids), "bytes_stored": size, "dump_ids": ids}
    output.emit(answer, lambda _: _say_created(run, len(ids), size), as_json)


def _say_imported(summary: ImportSummary, seconds: float) -> None:
    for refusal in summary.refused[:_SHOWN]:
        output.note(f"refused[{refusal.code}]: {refusal.path}: {refusal.reason}")
    if len(summary.refused) > _SHOWN:
        output.note(f"... and {len(summary.refused) - _SHOWN} more; --json lists them all")
    output.say(
        f"{output.plural(summary.added, 'dump')} added, {summary.present:,} already there, "
        f"{len(summary.refused):,} refused, in {seconds:.1f} s"
    )
    if summary.added:
        read, stored = output.human_bytes(summary.bytes_read), output.human_bytes(summary.bytes_stored)
        ratio = summary.bytes_read / summary.bytes_stored
        output.say(f"run {', '.join(summary.runs)}: {read} of pickles became {stored} ({ratio:.1f} times smaller)")


def _say_created(run: str, count: int, size: int) -> None:
    output.say(f"made {output.plural(count, 'dump')} in run {run} ({output.human_bytes(size)})")
    output.say(f"see them with: actordbg dump ls --where \"run='{run}'\"")
