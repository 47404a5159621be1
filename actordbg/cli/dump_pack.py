"""`actordbg dump pack` and `dump unpack`: many dumps in one file, which stores each row once; and files of their own again.
`dump prune`: remove dumps that are no longer wanted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_size
from actordbg.cli.index import damage_line
from actordbg.cli.options import OfRun, Where, Yes, option, require_good, require_selected, store_of
from actordbg.cli.output import emit, human_bytes, note, note_some, plural, progress, say

if TYPE_CHECKING:
    from actordbg.dumps.packing import PackSummary, UnpackSummary
    from actordbg.dumps.prune import PrunePlan


_SHOWN = 20


def pack(
    ctx: typer.Context,
    where: Where = None,
    run: OfRun = None,
    level: int = option(19, "zstd level; lower is faster and a few percent larger.", min=1, max=22),
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
    with progress("packing", None) as advance:
        summary = pack_dumps(store, where, run, level, on_progress=lambda done, total: advance(1, total=total))
    answer = _packed(summary)
    emit(answer, _say_packed)
    require_good(not summary.kept)
    require_selected(store, where, summary.figures.dumps + summary.finished)


def unpack(
    ctx: typer.Context,
    where: Where = None,
    run: OfRun = None,
    all_: bool = option(False, "Every packed dump.", "--all"),
    level: int = option(12, "zstd level of the files.", min=1, max=22),
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
    with progress("unpacking", None) as advance:
        summary = unpack_dumps(store, where, run, level, on_progress=lambda done, total: advance(1, total=total))
    emit(summary, _say_unpacked)
    require_good(not summary.kept)
    require_selected(store, where, summary.dumps)


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


def _say_packed(answer: dict[str, Any]) -> None:
    note_some([f"stays a file: {damage_line(damaged)}" for damaged in answer["kept"]], _SHOWN)
    if answer["finished"]:
        say(f"{plural(answer['finished'], 'file')} removed that an interrupted run had packed")
    if not answer["dumps"]:
        return say("nothing to pack")
    files, content, distinct, stored = (answer[f"{name}_bytes"] for name in ("files", "content", "distinct", "packed"))
    size, dumps, packs = human_bytes, plural(answer["dumps"], "dump"), plural(len(answer["packs"]), "pack")
    say(f"{dumps} in {packs}: {size(files)} of files became {size(stored)} ({files / stored:.1f} times smaller)")
    say(
        f"deduplication: {answer['distinct_rows']:,} of {answer['rows']:,} rows are distinct; {size(content)} of "
        f"records and tensors became {size(distinct)} ({content / distinct:.1f} times)"
    )
    return say(f"compression: {size(distinct)} became {size(stored)} ({distinct / stored:.1f} times)")


def _say_unpacked(answer: UnpackSummary) -> None:
    note_some([f"stays packed: {damage_line(damaged)}" for damaged in answer.kept], _SHOWN)
    if not answer.dumps:
        return say("nothing to unpack")
    packs, size = plural(len(answer.packs), "pack"), human_bytes(answer.bytes)
    return say(f"{plural(answer.dumps, 'dump')} out of {packs}, files of their own again ({size})")


def prune(
    ctx: typer.Context,
    where: Where = None,
    older_than: str | None = option(None, "Dumps older than this: 7d, 12h.", metavar="AGE"),
    keep: str | None = option(None, "The oldest dumps, until the rest takes at most this: 10GB.", metavar="SIZE"),
    run: OfRun = None,
    damaged: bool = option(False, "Broken files alone; not those of a newer actordbg, nor unreadable ones.", "--damaged"),
    pinned: bool = option(False, "Pinned dumps too; without this they always stay.", "--pinned"),
    yes: Yes = False,
) -> None:
    """Remove dumps.

    Without --yes it only says what it would remove. A dump goes if it meets every condition given. The pack of a packed dump is
    written again without it. Pinned dumps (kept by a trigger, or recovered) stay unless --pinned is given. Unfinished files
    that dead writers left more than an hour ago go too. Results of replays stay. Exit code 5 if --where selects none.

    Example: actordbg dump prune --older-than 7d --keep 10GB --yes
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.catalog.tables import parse_duration
    from actordbg.dumps import prune as pruning

    if where is None and older_than is None and keep is None and run is None and not damaged:
        raise UsageError("say what may go: --where, --older-than, --keep, --run or --damaged", hint="see --help")
    if damaged and not (where is None and older_than is None and keep is None):
        hint = "two commands: `dump prune --damaged`, and one with the other conditions"
        raise UsageError("a broken file has no record that a condition could ask: --damaged goes with --run alone", hint=hint)
    age = parse_duration(older_than).total_seconds() if older_than is not None else None
    size = parse_size("--keep", keep) if keep is not None else None
    store = store_of(ctx)
    if yes:
        store.require_writable(room=False)  # on a full disk this is what makes room
    catalog = open_fresh(store, where)
    choose = partial(
        pruning.plan_prune,
        where=where,
        older_than_s=age,
        keep_bytes=size,
        run=run,
        damaged=damaged,
        healthy=not damaged,
        pinned=pinned,
    )
    plan = choose(catalog)
    if yes:
        plan = pruning.apply(catalog.store, plan)
        catalog = open_fresh(catalog.store)
        while size is not None and not plan.failed and (more := choose(catalog)).files:
            plan = plan.followed_by(pruning.apply(catalog.store, more))
            catalog = open_fresh(catalog.store)
    emit(plan, _say_pruned)
    require_good(not plan.failed)
    require_selected(catalog.store, where, len(plan.files))


def _say_pruned(plan: PrunePlan) -> None:
    if plan.spared:
        note(f"{plural(plan.spared, 'pinned dump')} among them stay; --pinned takes them too")
    if not plan.files and not plan.failed:
        say("nothing to remove")
        return
    verb = "removed" if plan.done else "would remove"
    for item in plan.files[:_SHOWN]:
        say(f"{verb} {item.path} ({human_bytes(item.bytes)}, {item.reason})")
    if len(plan.files) > _SHOWN:
        say(f"... and {len(plan.files) - _SHOWN:,} more")
    for path, reason in plan.failed:
        say(f"could not remove {path}: {reason}")
    say(f"{verb} {plural(len(plan.files), 'file')}, {human_bytes(plan.bytes)}")
    if not plan.done:
        note("nothing was changed; --yes does it")
