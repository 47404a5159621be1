"""`actordbg dump pack` and `dump unpack`: many dumps in one file, which stores each row once; and files of their own again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.options import AllowEmpty, Json, OfRun, Quiet, Where, option, require_selected, store_of

if TYPE_CHECKING:
    from actordbg.catalog.tables import Damaged
    from actordbg.dumps.packing import PackSummary, UnpackSummary


_SHOWN = 20


def pack(
    ctx: typer.Context,
    where: Where = None,
    run: OfRun = None,
    level: int = option(19, "zstd level; lower is faster and a few percent larger.", min=1, max=22),
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
    with output.progress("packing", None, quiet=quiet or as_json) as advance:
        summary = pack_dumps(store, where, run, level, on_progress=lambda done, total: advance(1, total=total))
    output.emit(_packed(summary), lambda _: _say_packed(summary), as_json)
    if summary.kept:
        raise typer.Exit(1)
    require_selected(store, where, summary.figures.dumps + summary.finished, allow_empty)


def unpack(
    ctx: typer.Context,
    where: Where = None,
    run: OfRun = None,
    all_: bool = option(False, "Every packed dump.", "--all"),
    level: int = option(12, "zstd level of the files.", min=1, max=22),
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
    with output.progress("unpacking", None, quiet=quiet or as_json) as advance:
        summary = unpack_dumps(store, where, run, level, on_progress=lambda done, total: advance(1, total=total))
    output.emit(summary, _say_unpacked, as_json)
    if summary.kept:
        raise typer.Exit(1)
    require_selected(store, where, summary.dumps, allow_empty)


def _packed(summary: PackSummary) -> dict[str, Any]:
    """What was packed. Bytes: `files_bytes` of the dump files before; `content_bytes` of their records and payloads; of these
    `distinct_bytes` were left when what repeats is stored once, and `packed_bytes` is what the packs take. So
    `dedup_ratio` times `compression_ratio` is how much smaller than their content the dumps are now.

    `finished`: dump files removed that an interrupted run had packed already. `kept`: what stays a file, with the reason.
    """
    figures = summary.figures
    return {
        "dumps": figures.dumps,
        "packs": summary.packs,
        "rows": figures.rows,
        "distinct_rows": figures.distinct_rows,
        "files_bytes": summary.loose_bytes,
        "content_bytes": figures.content,
        "distinct_bytes": figures.distinct,
        "packed_bytes": figures.stored,
        "dedup_ratio": round(figures.content / figures.distinct, 3) if figures.distinct else None,
        "compression_ratio": round(figures.distinct / figures.stored, 3) if figures.stored else None,
        "finished": summary.finished,
        "kept": summary.kept,
    }


def _say_packed(summary: PackSummary) -> None:
    _say_kept("stays a file", summary.kept)
    if summary.finished:
        output.say(f"{output.plural(summary.finished, 'file')} removed that an interrupted run had packed")
    figures, size = summary.figures, output.human_bytes
    if not figures.dumps:
        output.say("nothing to pack")
        return
    output.say(
        f"{output.plural(figures.dumps, 'dump')} in {output.plural(len(summary.packs), 'pack')}: "
        f"{size(summary.loose_bytes)} of files became {size(figures.stored)} "
        f"({summary.loose_bytes / figures.stored:.1f} times smaller)"
    )
    output.say(
        f"deduplication: {figures.distinct_rows:,} of {figures.rows:,} rows are distinct; {size(figures.content)} of "
        f"records and tensors became {size(figures.distinct)} ({figures.content / figures.distinct:.1f} times)"
    )
    output.say(
        f"compression: {size(figures.distinct)} became {size(figures.stored)} ({figures.distinct / figures.stored:.1f} times)"
    )


def _say_kept(where: str, kept: list[Damaged]) -> None:
    from actordbg.cli.index import damage_line

    for damaged in kept[:_SHOWN]:
        output.note(f"{where}: {damage_line(damaged)}")
    if len(kept) > _SHOWN:
        output.note(f"... and {len(kept) - _SHOWN:,} more; --json lists them all")


def _say_unpacked(answer: UnpackSummary) -> None:
    _say_kept("stays packed", answer.kept)
    if not answer.dumps:
        output.say("nothing to unpack")
        return
    output.say(
        f"{output.plural(answer.dumps, 'dump')} out of {output.plural(len(answer.packs), 'pack')}, "
        f"files of their own again ({output.human_bytes(answer.bytes)})"
    )
