"""`actordbg dump unpack`: packed dumps become files of their own again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.index import damage_line
from actordbg.cli.options import Json, Quiet, Where, store_of

if TYPE_CHECKING:
    from actordbg.catalog.damage import Damaged


@dataclass
class UnpackAnswer:
    """Dumps that are files again and their bytes; packs that are gone or were written again; what stays packed, and why."""

    dumps: int
    bytes: int
    packs: list[str]
    kept: list[Damaged]


def unpack(
    ctx: typer.Context,
    where: Where = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Of this training run only.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every packed dump.")] = False,
    level: Annotated[int, typer.Option("--level", min=1, max=22, help="zstd level of the files.")] = 12,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take dumps out of their packs, byte for byte.

    Each dump becomes a file of its own again, with the same record and payload. The file is read again and verified before its
    pack is written without it. Exit code 1 if a dump could not be taken out.

    Example: actordbg dump unpack --where "seq_len>1800 and rank=0"
    """
    from actordbg.dumps.packing import unpack_dumps

    if where is None and run is None and not all_:
        raise UsageError("say which dumps: --where, --run or --all", hint="see --help")
    with output.progress("unpacking", None, quiet=quiet or as_json) as advance:
        summary = unpack_dumps(
            store_of(ctx), where, run, level, on_progress=lambda done, total: advance(1, total=total)
        )
    output.emit(UnpackAnswer(summary.dumps, summary.bytes, summary.packs, summary.kept), _render, as_json)
    if summary.kept:
        raise typer.Exit(1)


def _render(answer: UnpackAnswer) -> None:
    for item in answer.kept:
        output.note(f"stays packed: {damage_line(item)}")
    if not answer.dumps:
        output.say("nothing to unpack")
        return
    output.say(
        f"{output.plural(answer.dumps, 'dump')} out of {output.plural(len(answer.packs), 'pack')}, "
        f"files of their own again ({output.human_bytes(answer.bytes)})"
    )
