"""`actordbg dump pack` and `dump unpack`: many dumps in one file, which stores each row once; and files of their own again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.options import AllowEmpty, Json, OfRun, Quiet, Where, require_selected, store_of

if TYPE_CHECKING:
    from actordbg.catalog.tables import Damaged
    from actordbg.dumps.packing import PackSummary, UnpackSummary


SHOWN = 20


@dataclass
class PackAnswer:
    """What was packed. Bytes: `files_bytes` of the dump files before; `content_bytes` of their records and payloads; of these
    `distinct_bytes` were left when what repeats is stored once, and `packed_bytes` is what the packs take. So
    `dedup_ratio` times `compression_ratio` is how much smaller than their content the dumps are now.

    `finished`: dump files removed that an interrupted run had packed already. `kept`: what stays a file, with the reason.
    """

    dumps: int
    packs: list[str]
    rows: int
    distinct_rows: int
    files_bytes: int
    content_bytes: int
    distinct_bytes: int
    packed_bytes: int
    dedup_ratio: float | None
    compression_ratio: float | None
    finished: int
    kept: list[Damaged]


def pack(
    ctx: typer.Context,
    where: Where = None,
    run: OfRun = None,
    level: Annotated[
        int, typer.Option("--level", min=1, max=22, help="zstd level; lower is faster and a few percent larger.")
    ] = 19,
    allow_empty: AllowEmpty = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Move dumps into packs, which store each row once.

    Packs compress rows of many dumps together. Without --where, takes all dumps that are files of their own. Nothing is lost:
    each pack is read again and the SHA-256 of every dump verified before a file is removed. The next run finishes one that
    was killed. Every command reads packed dumps like others. Exit code 1 if a damaged dump stays a file, 5 if
    --where selects none.

    Example: actordbg dump pack --where "timestamp < now() - '1d'"
    """
    from actordbg.dumps.packing import pack_dumps

    store = store_of(ctx).require_writable()
    store = store_of(ctx)
    with output.progress("packing", None, quiet=quiet or as_json) as advance:
        summary = pack_dumps(store, where, run, level, on_progress=lambda done, total: advance(1, total=total))
    answer = _packed(summary)
    output.emit(answer, _say_packed, as_json)
    if answer.kept:
        raise typer.Exit(1)
    require_selected(store, where, answer.dumps + answer.finished, allow_empty)


def unpack(
    ctx: typer.Context,
    where: Where = None,
    run: OfRun = None,
    all_: Annotated[bool, typer.Option("--all", help="Every packed dump.")] = False,
    level: Annotated[int, typer.Option("--level", min=1, max=22, help="zstd level of the files.")] = 12,
    allow_empty: AllowEmpty = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take dumps out of their packs, byte for byte.

    Each dump becomes a file of its own again, with the same record and payload. The file is read again and verified before its
    pack is written without it. Exit code 1 if a dump could not be taken out, 5 if --where selects none.

    Example: actordbg dump unpack --where "seq_len>1800 and rank=0"
    """
    from actordbg.dumps.packing import unpack_dumps

    if where is None and run is None and not all_:
        raise UsageError("say which dumps: --where, --run or --all", hint="see --help")
    store = store_of(ctx).require_writable()
    store = store_of(ctx)
    with output.progress("unpacking", None, quiet=quiet or as_json) as advance:
        summary = unpack_dumps(store, where, run, level, on_progress=lambda done, total: advance(1, total=total))
    output.emit(summary, _say_unpacked, as_json)
    if summary.kept:
        raise typer.Exit(1)
    require_selected(store, where, summary.dumps, allow_empty)


def _packed(summary: PackSummary) -> PackAnswer:
    figures = summary.figures
    return PackAnswer(
        figures.dumps,
        summary.packs,
        figures.rows,
        figures.distinct_rows,
        summary.loose_bytes,
        figures.content,
        figures.distinct,
        figures.stored,
        _ratio(figures.content, figures.distinct),
        _ratio(figures.distinct, figures.stored),
        summary.finished,
        summary.kept,
    )


def _ratio(before: int, after: int) -> float | None:
    return round(before / after, 3) if after else None


def _say_packed(answer: PackAnswer) -> None:
    from actordbg.cli.index import damage_line

    for item in answer.kept[:SHOWN]:
        output.note(f"stays a file: {damage_line(item)}")
    if len(answer.kept) > SHOWN:
        output.note(f"... and {len(answer.kept) - SHOWN:,} more; --json lists them all")
    if answer.finished:
        output.say(f"{output.plural(answer.finished, 'file')} removed that an interrupted run had packed")
    if not answer.dumps:
        output.say("nothing to pack")
        return
    size = output.human_bytes
    output.say(
        f"{output.plural(answer.dumps, 'dump')} in {output.plural(len(answer.packs), 'pack')}: "
        f"{size(answer.files_bytes)} of files became {size(answer.packed_bytes)} "
        f"({answer.files_bytes / answer.packed_bytes:.1f} times smaller)"
    )
    output.say(
        f"deduplication: {answer.distinct_rows:,} of {answer.rows:,} rows are distinct; {size(answer.content_bytes)} of "
        f"records and tensors became {size(answer.distinct_bytes)} ({answer.dedup_ratio:.1f} times)"
    )
    output.say(
        f"compression: {size(answer.distinct_bytes)} became {size(answer.packed_bytes)} ({answer.compression_ratio:.1f} times)"
    )


def _say_unpacked(answer: UnpackSummary) -> None:
    from actordbg.cli.index import damage_line

    for item in answer.kept:
        output.note(f"stays packed: {damage_line(item)}")
    if not answer.dumps:
        output.say("nothing to unpack")
        return
    output.say(
        f"{output.plural(answer.dumps, 'dump')} out of {output.plural(len(answer.packs), 'pack')}, "
        f"files of their own again ({output.human_bytes(answer.bytes)})"
    )
