"""`actordbg index`, `dump verify` and `fsck`: index or verify a store's files, and list damaged ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import CorruptDump
from actordbg.cli.options import Where, require_good, require_selected, require_some, store_of
from actordbg.cli.output import emit, human_bytes, keep_answer, note, plural, progress, say, say_next, say_wrapped

if TYPE_CHECKING:
    from actordbg.catalog.indexer import IndexSummary
    from actordbg.catalog.tables import Damaged
    from actordbg.dumps.finding import StoreFault
    from actordbg.store.layout import Store


def index(ctx: typer.Context, *, rebuild: bool = False) -> None:
    """Index new files in the store.

    Brings the catalog up to date with the files: dumps, replay results, patches. Every command that reads the catalog does this
    first. Run it to see which files are damaged, or to rebuild a lost or damaged catalog.

    Example: actordbg index --rebuild

    Args:
        rebuild: Delete the catalog and rebuild it from the files.
    """
    from actordbg.catalog.indexer import refresh

    with progress("reading headers", None) as advance:
        summary = refresh(store_of(ctx), rebuild=rebuild, on_progress=lambda done, total: advance(0, total=total, completed=done))
    keep_answer(summary)
    say_wrapped(
        f"{plural(summary.dumps, 'dump')} in the catalog: {summary.added:,} added, {summary.removed:,} removed; "
        f"{plural(summary.results, 'new result')} of {plural(summary.replays, 'replay')} "
        f"({summary.seconds:.2f} s)",
        "  ",
    )
    if summary.skipped_lines:
        say(f"skipped {plural(summary.skipped_lines, 'unreadable journal line')}")
    for item in summary.damaged:
        say(damage_line(item))


def verify(ctx: typer.Context, where: Where = None) -> None:
    """Check dump files for damage.

    Reads each dump completely: header, decompression, SHA-256, safetensors, tensor specs. Without --where, checks every file,
    including those that could not be indexed.

    Exit code: 1 if a dump is damaged; 5 if there are no dumps.

    Example: actordbg dump verify --where "run='ppo-1'"
    """

    from actordbg.catalog.query import open_fresh
    from actordbg.dumps.verify import paths_to_verify, verify_files

    catalog = open_fresh(store_of(ctx), where)
    paths = paths_to_verify(catalog, where)
    damaged: list[Damaged] = []
    size = 0
    with progress("verifying", len(paths)) as advance:
        for _, count, problem in verify_files(catalog.store, paths):
            advance(1)
            size += count
            damaged += [problem] if problem else []
    damaged.sort(key=lambda item: item.path)
    keep_answer({"checked": len(paths), "bytes": size, "damaged": damaged})
    for item in damaged:
        say(damage_line(item))
    good, bad = len(paths) - len(damaged), len(damaged)
    say(f"{plural(len(paths), 'dump')} checked ({human_bytes(size)}): {good:,} good, {bad:,} damaged", sums_up=True)
    if damaged:
        say_next("actordbg store fsck --repair")
    require_good(not damaged)
    require_selected(catalog.store, where, len(paths))
    require_some(len(paths))


def warn_damaged(summary: IndexSummary) -> None:
    """Warn on standard error about files that could not be indexed."""
    broken = sum(item.code == CorruptDump.code for item in summary.damaged)
    others = len(summary.damaged) - broken
    parts = [plural(broken, "damaged file")] if broken else []
    parts += [f"{plural(others, 'unusable file')}"] if others else []
    if parts:
        note(f"warning: {' and '.join(parts)}; `actordbg index` lists them")


def damage_line(item: Damaged) -> str:
    """Describe an unusable file in one line; "damaged" only if the file itself is corrupt."""
    what = "damaged" if item.code == CorruptDump.code else "not usable"
    return f"{what}: {item.path}: {item.reason}"


def fsck(ctx: typer.Context, *, repair: bool = False, quick: bool = False) -> None:
    """Verify a store's integrity.

    Checks FORMAT, names and permissions, every dump, pack, replay, comparison, switch, counter and ring, and the
    catalog. Without --repair, writes nothing. With it, moves damaged files to store/quarantine, first saves the good dumps of
    damaged packs, and rebuilds a wrong catalog. A read-only store can be checked, but --repair refuses it.

    Exit code: 1 if damage or leftovers remain; notes do not count.

    Example: actordbg store fsck --repair

    Args:
        repair: Repair what can be repaired, without losing data.
        quick: Read names, headers and records, but not the payloads.
    """
    from actordbg.dumps.finding import NOTE
    from actordbg.dumps.repairing import repair as repair_store

    store = store_of(ctx)
    if repair and store.root.is_dir():
        store.probed(room=False)  # repair must work on a full disk: it removes unfinished files
    findings = _look(store, not quick)
    answer = {"store": str(store.root), "deep": not quick, "findings": findings, "repaired": [], "failed": []}
    if repair and any(finding.repair.value for finding in findings):
        done, failed = repair_store(store, findings)
        answer |= {"repaired": _data(store, done), "failed": _data(store, failed)}
        findings = _look(store, not quick)
    answer["findings"] = _data(store, [(finding, finding.repair.value) for finding in findings])
    emit(answer, _say_found)
    require_good(all(finding.severity == NOTE for finding in findings))


def _look(store: Store, deep: bool) -> list[StoreFault]:
    from actordbg.dumps.checking import CHECKS, check

    with progress("checking", len(CHECKS)) as advance:
        return check(store, deep=deep, on_start=lambda name: advance(1, note=name))


def _data(store: Store, findings: Iterable[tuple[StoreFault, str]]) -> list[dict[str, str]]:
    """Return each finding as plain data: path below the store, meaning of its kind, and its repair ("" for none)."""
    from actordbg.dumps.finding import KINDS
    from actordbg.store.layout import printable

    rows = []
    for finding, repair in findings:
        place = os.fspath(finding.place)
        path = printable(os.path.relpath(place, store.root) if finding.place.is_relative_to(store.root) else place)
        same = {name: getattr(finding, name) for name in ("kind", "severity", "detail")}
        rows.append({"path": path, "meaning": KINDS[finding.kind].meaning, "repair": repair, **same})
    return rows


def _say_found(answer: dict[str, Any]) -> None:
    from actordbg.dumps.finding import DAMAGE, LEFTOVER, NOTE

    findings = answer["findings"]
    for row in answer["repaired"]:
        say(f"repaired: {row['kind']}: {row['path']}: {row['repair']}")
    for row in answer["failed"]:
        say(f"could not repair {row['path']}: {row['repair']}")
    for row in findings:
        detail = row["detail"] or row["meaning"]
        say(f"{row['severity']}: {row['kind']}: {row['path']}: {detail}")
    counts = Counter(row["severity"] for row in findings)
    totals = (plural(counts[kind], kind if kind != DAMAGE else "damaged file") for kind in (DAMAGE, LEFTOVER, NOTE))
    how = "every byte" if answer["deep"] else "headers and records"
    result = ", ".join(totals) if findings else "no problems"
    say(f"{answer['store']}: {how} checked: {result}", sums_up=True)
    if not answer["repaired"] and any(row["repair"] for row in findings):
        say_next("actordbg store fsck --repair")
        note("nothing was changed; pass --repair to repair what can be repaired, without losing data")
