"""The `actordbg dump` commands that create, convert and remove dump files.

`import` reads the files that a run left behind, and the old recorder's pickles, without executing them; `create` makes random
inputs; `export` writes plain safetensors files. `pack` moves many dumps into one file that stores each row once, and `unpack`
restores one file per dump. `prune` removes dumps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import Conflict, StoreProblem, UsageError
from actordbg.base.option import Option
from actordbg.base.units import listed, parse_size, resolve
from actordbg.cli.index import damage_line
from actordbg.cli.options import (
    Limit,
    Where,
    Yes,
    require_good,
    require_selected,
    store_of,
)
from actordbg.cli.output import emit, human_bytes, keep_answer, note, note_some, plural, progress, say, say_next

if TYPE_CHECKING:
    from actordbg.dumps.packing import PackSummary
    from actordbg.dumps.prune import PrunePlan
    from actordbg.store.layout import Store


_SHOWN = 50


def import_(
    ctx: typer.Context,
    paths: list[str],
    *,
    run: str | None = None,
    columns: Annotated[list[str] | None, Option("--column")] = None,
) -> None:
    """Import a run's files, old pickles, bundles; execute nothing.

    Reads rows that slime, miles, prime-rl and NeMo-RL write, tables of rows, and pickles of the old recorder. What a file is, its
    content says. Of pickles, keeps timestamps (read as UTC) and ranks. Skips what the store already has, and names bad files.

    A bundle is what `actordbg bundle` makes. It is imported whole or not at all.

    Exit code: 1 if a file was refused.

    Example: actordbg dump import input_dumps/ --run ppo-llama

    Args:
        paths (PATH): Files, folders to search for such files, or a bundle (.tar.zst).
        run: Run name of the dumps (default: the folder's name).
        columns (PART=NAME): The name of a part of a row in a table, such as ids=input_ids, tokenizer=MODEL; repeatable.
    """
    from actordbg.dumps.bundle import BUNDLE_SUFFIX
    from actordbg.dumps.importer import find_files, import_paths
    from actordbg.dumps.layouts import columns_of

    store = _writable(ctx)
    if any(path.endswith(BUNDLE_SUFFIX) for path in paths):
        return _import_bundle(store, paths)
    began, files, parts = time.perf_counter(), [Path(path) for path in paths], columns_of(columns or [])
    with progress("importing", len(find_files(files))) as advance:
        summary = import_paths(store, files, run=run, columns=parts, on_file=lambda dump_id: advance(1))
    seconds = round(time.perf_counter() - began, 3)
    answer = vars(summary) | {"store": str(store.root), "seconds": seconds}
    keep_answer(answer)
    note_some([*summary.notes, *(f"refused[{each.code}]: {each.path}: {each.told}" for each in summary.refused)], _SHOWN)
    say(
        f"{plural(summary.added, 'dump')} added, {summary.present:,} already there, "
        f"{len(summary.refused):,} refused, in {seconds:.1f} s"
    )
    if summary.added:
        read, stored = human_bytes(summary.bytes_read), human_bytes(summary.bytes_stored)
        say(f"run {listed(summary.runs)}: {read} of files became {stored}")
    if summary.added or summary.present:
        say_next("actordbg check")
    require_good(not summary.refused)


def _import_bundle(store: Store, paths: Sequence[str]) -> None:
    """Import one bundle."""
    from actordbg.dumps.bundle import open_bundle

    if len(paths) > 1:
        raise UsageError("a bundle is imported alone", hint="import one bundle, or pickles, at a time")
    summary = open_bundle(store, Path(paths[0]))
    keep_answer(vars(summary) | {"store": store.root, "path": paths[0]})
    there = f"; {plural(summary.present, 'file')} already there" if summary.present else ""
    say(f"imported {summary.contents}{there}")
    say_next(f"actordbg report {summary.replay}" if summary.replay else "actordbg check")


def _writable(ctx: typer.Context) -> Store:
    """Return the store if it can be written or does not exist yet; raise otherwise."""
    store = store_of(ctx)
    return store.require_writable() if store.exists() else store


def create(
    ctx: typer.Context,
    *,
    count: Annotated[int, Option("-n", min=1)] = 1,
    batch_size: int = 2,
    seq_len: int = 512,
    ranks: Annotated[int, Option(min=1)] = 1,
    vocab_size: int = 128_256,
    seed: int = 0,
    run: str = "created",
) -> None:
    """Create random inputs of given shapes.

    Half of each row is actions, and rows are padded on both sides. The dumps have the format of recorded dumps, so every
    command accepts them.

    Example: actordbg dump create --count 4 --batch-size 2 --seq-len 1024 --ranks 2

    Args:
        count: Calls per rank.
        batch_size: Rows per input, B.
        seq_len: Length of each row, S, padding included.
        ranks: Number of ranks.
        vocab_size: Draw token ids below this.
        seed: RNG seed of the tensors.
        run: Run name of the dumps.
    """
    from actordbg.dumps.create import create_dumps
    from actordbg.formats.dump_record import SUFFIX

    store = _writable(ctx)
    with progress("creating", count * ranks) as advance:
        paths = create_dumps(
            store, count, batch_size, seq_len, ranks=ranks, vocab_size=vocab_size, seed=seed, run=run,
            on_progress=lambda: advance(1),
        )  # fmt: skip
    ids = [path.name.removesuffix(SUFFIX) for path in paths]
    size = sum(path.stat().st_size for path in paths)
    answer = {"store": str(store.root), "run": run, "created": len(ids), "bytes_stored": size, "dump_ids": ids}
    keep_answer(answer)
    say(f"made {plural(len(ids), 'dump')} in run {run} ({human_bytes(size)})")
    say_next(f"actordbg dump ls --where \"run='{run}'\"")


def export(
    ctx: typer.Context,
    dump_ids: list[str] | None = None,
    *,
    where: Where = None,
    out: Annotated[Path, Option("-o")] = Path(),
    limit: Limit = 0,
    force: bool = False,
) -> None:
    """Write dumps as .safetensors files.

    Any safetensors reader opens them. Tensors have the dtype and shape that the actor
    received.

    Exit code: 1 if a dump was damaged; 5 if no dump was selected.

    Example: actordbg dump export --where "seq_len>1800 and rank=0" --out exported

    Args:
        dump_ids (ID): Dump ids, or unique prefixes of ids.
        out (DIR): Output folder.
        force: Overwrite existing files.
    """
    from actordbg.catalog.tables import Damaged
    from actordbg.dumps import export as exporting
    from actordbg.store.places import dump_id_of

    store = store_of(ctx).require()
    paths = _selected(store, dump_ids or [], where, limit)
    targets = [exporting.export_path(dump_id_of(path), out) for path in paths]
    taken = [target for target in targets if target.exists()]
    if taken and not force:
        raise Conflict(f"{taken[0]} already exists", hint="pass another folder with --out, or overwrite with --force")
    exported: list[dict[str, Any]] = []
    damaged: list[Damaged] = []
    with progress("exporting", len(paths)) as advance:
        for path in paths:
            try:
                written = exporting.export_dump(path, out)
                exported.append({"dump_id": dump_id_of(path), "path": str(written), "bytes": written.stat().st_size})
            except StoreProblem as error:
                damaged.append(Damaged(str(path), error.code, error.message))
            advance(1)
    keep_answer({"folder": str(out), "exported": exported, "damaged": damaged})
    for dump in damaged:
        note(f"damaged[{dump.code}]: {dump.path}: {dump.reason}")
    size = human_bytes(sum(dump["bytes"] for dump in exported))
    say(f"{plural(len(exported), 'dump')} exported to {out} ({size})")
    require_good(not damaged)
    require_selected(store, where, len(paths))


def _selected(store: Store, dump_ids: Sequence[str], where: str | None, limit: int) -> list[Path]:
    """Return the paths of the named or selected dumps. Raises UsageError unless either `dump_ids` or `where` is given."""
    from actordbg.catalog.query import select_dumps
    from actordbg.store.places import dump_id_of, places_of

    if bool(dump_ids) == (where is not None):
        raise UsageError("select dumps by id or with --where", hint='for example --where "rank=0"; `actordbg dump ls` lists ids')
    if where is not None:
        return [store.root / row.path for row in select_dumps(store, where, limit=limit or None)]
    places = {dump_id_of(path): path for path in places_of(store)}
    return list(dict.fromkeys(places[resolve(name, sorted(places), "dump", made_by="dump enable")] for name in dump_ids))


def pack(
    ctx: typer.Context,
    where: Where = None,
) -> None:
    """Move dumps into packs, which deduplicate rows.

    Packs compress rows of many dumps together. Without --where, packs every unpacked dump. Lossless: each pack is read back and
    the SHA-256 of every dump verified before its file is removed. If a run was killed, the next run finishes its work. Every
    command reads packed dumps like unpacked ones.

    Exit code: 1 if a damaged dump stays a file; 5 if --where selects no dump.

    Example: actordbg dump pack --where "timestamp < now() - '1d'"
    """
    from actordbg.dumps.packing import pack_dumps

    store = store_of(ctx).require_writable()
    with progress("packing", None) as advance:
        summary = pack_dumps(store, where, on_progress=lambda total: advance(1, total=total))
    emit(_packed(summary), _say_packed)
    require_good(not summary.kept)
    require_selected(store, where, summary.figures.dumps + summary.finished)


def unpack(ctx: typer.Context, *, where: Where = None, all_: bool = False) -> None:
    """Take dumps out of their packs, byte for byte.

    Restores one file per dump, with the same record and payload. Each file is read back and verified before its pack is rewritten
    without it.

    Exit code: 1 if a dump could not be unpacked; 5 if --where selects no dump.

    Example: actordbg dump unpack --where "seq_len>1800 and rank=0"

    Args:
        all_: Unpack every packed dump.
    """
    from actordbg.dumps.packing import unpack_dumps

    if where is None and not all_:
        raise UsageError("unpack needs --where or --all", hint="pass --all to unpack every packed dump")
    store = store_of(ctx).require_writable()
    with progress("unpacking", None) as advance:
        summary = unpack_dumps(store, where, on_progress=lambda total: advance(1, total=total))
    keep_answer(summary)
    note_some([f"stays packed: {damage_line(damaged)}" for damaged in summary.kept], _SHOWN)
    packs, size = plural(len(summary.packs), "pack"), human_bytes(summary.bytes)
    text = f"{plural(summary.dumps, 'dump')} unpacked from {packs} ({size})"
    say(text if summary.dumps else "nothing to unpack")
    require_good(not summary.kept)
    require_selected(store, where, summary.dumps)


def _packed(summary: PackSummary) -> dict[str, Any]:
    """Return the result of packing as plain data.

    files_bytes: size of the dump files before. content_bytes: size of their records and payloads. distinct_bytes: that size
    after deduplication. packed_bytes: size of the packs. So content is `dedup_ratio` times `compression_ratio` larger than packs.

    `finished`: dump files removed that an interrupted run had already packed. `kept`: dumps that stay files, with the reason.
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
        say(f"removed {plural(answer['finished'], 'file')} that an interrupted run had packed")
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


def prune(
    ctx: typer.Context,
    *,
    where: Where = None,
    older_than: str | None = None,
    keep: str | None = None,
    damaged: bool = False,
    pinned: bool = False,
    yes: Yes = False,
) -> None:
    """Remove dumps.

    Without --yes, only prints what it would remove. Removes dumps that meet every given condition, and rewrites the pack of a
    packed dump without it. Protected dumps (kept by a trigger, or recovered) stay unless --pinned is given.
    Replay results stay. The turns of a run (`run --turns`, which hold texts) go with its last dump, and a
    step's recorded weights with the last dump that met them.

    Exit code: 5 if --where selects no dump.

    Example: actordbg dump prune --older-than 7d --keep 10GB --yes

    Args:
        older_than (AGE): Remove dumps that came into the store longer ago than this, e.g. 7d.
        keep (SIZE): Remove the oldest dumps until at most this much is left, e.g. 10GB.
        damaged: Only corrupt files, not newer-format or unreadable ones.
        pinned: Also remove protected dumps (default: keep them).
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.catalog.tables import parse_duration
    from actordbg.dumps import prune as pruning

    if where is None and older_than is None and keep is None and not damaged:
        raise UsageError("prune needs --where, --older-than, --keep or --damaged", hint="for example --older-than 7d")
    if damaged and not (where is None and older_than is None and keep is None):
        hint = "run `dump prune --damaged`, then another prune with the other conditions"
        raise UsageError("--damaged is used alone: corrupt files have no record to query", hint=hint)
    age = parse_duration(older_than).total_seconds() if older_than is not None else None
    size = parse_size("--keep", keep) if keep is not None else None
    store = store_of(ctx)
    if yes:
        store.require_writable(room=False)  # prune must work on a full disk
    catalog = open_fresh(store, where)
    choose = partial(
        pruning.plan_prune,
        where=where,
        older_than_s=age,
        keep_bytes=size,
        damaged=damaged,
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
        note(f"keeping {plural(plan.spared, 'protected dump')}; pass --pinned to remove them as well")
    if plan.recent:
        note(f"keeping {plural(plan.recent, 'dump')} that came into the store since, though recorded before")
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
        note("nothing was removed; pass --yes to remove")
