"""`actordbg dump export`: take dumps out of the store as plain safetensors or .pt files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import Conflict, StoreProblem, UsageError
from actordbg.base.ids import resolve
from actordbg.cli import output
from actordbg.cli.completion import complete_dumps
from actordbg.cli.options import AllowEmpty, Json, Limit, Quiet, Where, option, require_some, store_of

if TYPE_CHECKING:
    from actordbg.catalog.tables import Damaged
    from actordbg.store.layout import Store


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
    as_json: Json = False,
    allow_empty: AllowEmpty = False,
    quiet: Quiet = False,
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
    with output.progress("exporting", len(paths), quiet=quiet or as_json) as advance:
        for path in paths:
            try:
                written = exporting.export_dump(path, out, format, overwrite=True)
                exported.append({"dump_id": dump_id_of(path), "path": str(written), "bytes": written.stat().st_size})
            except StoreProblem as error:
                damaged.append(Damaged(str(path), error.code, error.message))
            advance(1)
    size = sum(dump["bytes"] for dump in exported)
    answer = {"folder": str(out), "exported": exported, "damaged": damaged}
    output.emit(answer, lambda _: _render(out, len(exported), size, damaged), as_json)
    if damaged:
        raise typer.Exit(1)
    require_some(len(paths), allow_empty)


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


def _render(folder: Path, count: int, size: int, damaged: list[Damaged]) -> None:
    for dump in damaged:
        output.note(f"damaged[{dump.code}]: {dump.path}: {dump.reason}")
    output.say(f"{output.plural(count, 'dump')} exported to {folder} ({output.human_bytes(size)})")
