"""`actordbg dump import` and `dump create`: dumps that no run recorded into this store; `dump export`: dumps taken out of it.

`import` brings in the pickles of the old recorder, without ever executing them; `create` makes random inputs; `export` writes
plain safetensors or .pt files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import Conflict, StoreProblem, UsageError
from actordbg.base.units import resolve
from actordbg.cli.options import (
    Limit,
    Where,
    complete_dumps,
    option,
    require_good,
    require_some,
    store_of,
)
from actordbg.cli.output import emit, human_bytes, note, note_some, plural, progress, say

if TYPE_CHECKING:
    from actordbg.catalog.tables import Damaged
    from actordbg.dumps.importer import ImportSummary
    from actordbg.store.layout import Store


_SHOWN = 50


def import_(
    ctx: typer.Context,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Pickles, or folders that are searched for *.pkl.")],
    run: str | None = option(None, "Name of the run (default: the name of the folder)."),
) -> None:
    """Import pickles of the old recorder; execute nothing in them.

    Keeps timestamps (taken as UTC) and ranks. Skips files that are in the store already; names a bad file and skips it.
    Exit code 1 if a file was refused.

    Example: actordbg dump import input_dumps/ --run ppo-llama
    """
    from actordbg.dumps.importer import find_pickles, import_paths

    store = _writable(ctx)
    began = time.perf_counter()
    with progress("importing", len(find_pickles(paths))) as advance:
        summary = import_paths(store, paths, run=run, on_progress=lambda done, total, path: advance(1))
    seconds = round(time.perf_counter() - began, 3)
    answer = vars(summary) | {"store": str(store.root), "seconds": seconds}
    emit(answer, lambda _: _say_imported(summary, seconds))
    require_good(not summary.refused)


def _writable(ctx: typer.Context) -> Store:
    """The store, which can be written or does not exist yet."""
    store = store_of(ctx)
    return store.require_writable() if store.exists() else store


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
) -> None:
    """Make random inputs of chosen shapes.

    The dumps have the format of recorded ones, so every command takes them.

    Example: actordbg dump create --count 4 --batch-size 2 --seq-len 1024 --padding both --ranks 2
    """
    from actordbg.dumps.create import create_dumps
    from actordbg.formats.dump_record import SUFFIX

    store = _writable(ctx)
    with progress("creating", count * ranks) as advance:
        paths = create_dumps(
            store, count, batch_size, seq_len, action_len, padding, ranks, vocab_size, seed, run,
            on_progress=lambda done, total: advance(1),
        )  # fmt: skip
    ids = [path.name.removesuffix(SUFFIX) for path in paths]
    size = sum(path.stat().st_size for path in paths)

    def render(answer: dict[str, Any]) -> None:
        say(f"made {plural(len(ids), 'dump')} in run {run} ({human_bytes(size)})")
        say(f"see them with: actordbg dump ls --where \"run='{run}'\"")

    answer = {"store": str(store.root), "run": run, "created": len(ids), "bytes_stored": size, "dump_ids": ids}
    emit(answer, render)


def _say_imported(summary: ImportSummary, seconds: float) -> None:
    note_some([f"refused[{refusal.code}]: {refusal.path}: {refusal.reason}" for refusal in summary.refused], _SHOWN)
    say(
        f"{plural(summary.added, 'dump')} added, {summary.present:,} already there, "
        f"{len(summary.refused):,} refused, in {seconds:.1f} s"
    )
    if summary.added:
        read, stored = human_bytes(summary.bytes_read), human_bytes(summary.bytes_stored)
        ratio = summary.bytes_read / summary.bytes_stored
        say(f"run {', '.join(summary.runs)}: {read} of pickles became {stored} ({ratio:.1f} times smaller)")


def export(
    ctx: typer.Context,
    dump_ids: list[str] | None = typer.Argument(
        None, metavar="[DUMP_ID]...", help="Dumps, by id or the beginning of one.", autocompletion=complete_dumps
    ),
    where: Where = None,
    out: Path = option(Path(), "Folder to write into.", "--out", "-o", metavar="DIR"),
    format: str = option("safetensors", "safetensors, or pt (opens with weights_only=True).", metavar="FORMAT"),
    limit: Limit = 0,
    force: bool = option(False, "Overwrite files that exist.", "--force"),
) -> None:
    """Write dumps as .safetensors or .pt files.

    Any safetensors reader, or `torch.load(weights_only=True)`, opens them. Tensors have the dtype and shape that the actor
    received. Exit code 1 if a dump was damaged, 5 if none was selected.

    Example: actordbg dump export --where "seq_len>1800 and rank=0" --out exported --format pt
    """
    from actordbg.catalog.tables import Damaged
    from actordbg.dumps import export as exporting
    from actordbg.store.places import dump_id_of

    store = store_of(ctx).require()
    paths = _selected(store, dump_ids or [], where, limit)
    targets = [exporting.export_path(dump_id_of(path), out, format) for path in paths]
    taken = [target for target in targets if target.exists()]
    if taken and not force:
        raise Conflict(f"{taken[0]} exists", hint="choose another folder with --out, or overwrite with --force")
    exported: list[dict[str, Any]] = []
    damaged: list[Damaged] = []
    with progress("exporting", len(paths)) as advance:
        for path in paths:
            try:
                written = exporting.export_dump(path, out, format, overwrite=True)
                exported.append({"dump_id": dump_id_of(path), "path": str(written), "bytes": written.stat().st_size})
            except StoreProblem as error:
                damaged.append(Damaged(str(path), error.code, error.message))
            advance(1)

    def render(answer: dict[str, Any]) -> None:
        for dump in damaged:
            note(f"damaged[{dump.code}]: {dump.path}: {dump.reason}")
        size = human_bytes(sum(dump["bytes"] for dump in exported))
        say(f"{plural(len(exported), 'dump')} exported to {out} ({size})")

    emit({"folder": str(out), "exported": exported, "damaged": damaged}, render)
    require_good(not damaged)
    require_some(len(paths))


def _selected(store: Store, dump_ids: Sequence[str], where: str | None, limit: int) -> list[Path]:
    """Paths of the dumps that were named or selected; UsageError when neither was said."""
    from actordbg.catalog.query import select_dumps
    from actordbg.store.places import dump_id_of, places_of

    if bool(dump_ids) == (where is not None):
        raise UsageError("say which dumps: ids, or --where", hint='e.g. --where "rank=0"; `actordbg dump ls` lists the ids')
    if where is not None:
        return [store.root / row.path for row in select_dumps(store, where=where, limit=limit or None)]
    places = {dump_id_of(path): path for path in places_of(store)}
    return list(dict.fromkeys(places[resolve(name, sorted(places), "dump", made_by="dump enable")] for name in dump_ids))
