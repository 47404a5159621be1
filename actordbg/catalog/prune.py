"""Choosing and removing dump files. Nothing outside `store/dumps` is ever touched, and nothing that is not asked for.

A plan says what would go and why; `apply` removes just that. Removing is by file name below the store's `dumps` folder,
without following links: a path that leads elsewhere is refused.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from actordbg.catalog.query import Catalog, DumpRow, damaged_files, select_dumps
from actordbg.errors import Refused, UsageError
from actordbg.record import format_timestamp
from actordbg.store import Store

LEFTOVER_AGE_S = 3600.0
"""A temporary file older than this belongs to a writer that died."""

_TEMPORARY = ".tmp-"
_SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class Doomed:
    """One file to remove: its path below the store, its size in bytes, and why."""

    path: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class PrunePlan:
    """What would go, and how much that is; `failed` names what could not be removed."""

    files: list[Doomed]
    bytes: int
    done: bool = False
    failed: list[tuple[str, str]] = field(default_factory=list)


def plan_prune(
    catalog: Catalog,
    *,
    where: str | None = None,
    older_than_s: float | None = None,
    keep_bytes: int | None = None,
    run: str | None = None,
    damaged: bool = False,
    healthy: bool = True,
    now: datetime | None = None,
) -> PrunePlan:
    """Files that all given conditions select (`where`, `older_than_s`, `run`); of these, with `keep_bytes`, the oldest
    until the store's dumps take no more than that. `damaged` adds files that could not be indexed, and without `healthy`
    only those go. Leftover temporary files are always part of the plan.
    """
    doomed = {item.path: item for item in _leftovers(catalog.store)}
    if damaged:
        doomed |= {item.path: item for item in _damaged(catalog, run)}
    if healthy:
        rows = _selected(catalog, where, older_than_s, run, now or datetime.now(timezone.utc))
        if keep_bytes is not None:
            rows = _beyond(rows, sum(row.bytes for row in select_dumps(catalog)) - keep_bytes)
        reason = "selected" if keep_bytes is None else "over the size to keep"
        doomed |= {row.path: Doomed(row.path, row.bytes, reason) for row in rows}
    files = [doomed[path] for path in sorted(doomed)]
    return PrunePlan(files, sum(item.bytes for item in files))


def apply(store: Store, plan: PrunePlan) -> PrunePlan:
    """Remove what the plan names; what is already gone counts as removed. Emptied folders go too."""
    removed, failed = [], []
    for item in plan.files:
        try:
            _inside(store, item.path).unlink(missing_ok=True)
        except OSError as error:
            failed.append((item.path, error.strerror or str(error)))
        else:
            removed.append(item)
    for folder in {(store.root / item.path).parent for item in removed}:
        _remove_if_empty(folder, store.dumps)
    return PrunePlan(removed, sum(item.bytes for item in removed), True, failed)


def parse_size(text: str) -> int:
    """'10GB' (powers of 1000) or '10GiB' (powers of 1024) in bytes; UsageError otherwise."""
    compact = text.strip().replace(" ", "").upper()
    digits = compact.rstrip("BKMGTI")
    unit = compact[len(digits) :] or "B"
    try:
        size = float(digits)
        if not 0 <= size < 1e15:
            raise ValueError
        return int(size * _SIZES[unit if unit.endswith("B") else f"{unit}B"])
    except (ValueError, KeyError):
        raise UsageError(f"{text!r:.40} is not a size", hint="like 500MB, 10GB, 2GiB") from None


def _selected(
    catalog: Catalog, where: str | None, older_than_s: float | None, run: str | None, now: datetime
) -> list[DumpRow]:
    rows = select_dumps(catalog, where)
    if older_than_s is not None:
        limit = format_timestamp(datetime.fromtimestamp(max(0.0, now.timestamp() - older_than_s), timezone.utc))
        rows = [row for row in rows if row.timestamp < limit]
    return [row for row in rows if run is None or row.run == run]


def _beyond(rows: list[DumpRow], excess: int) -> list[DumpRow]:
    """The oldest rows that together free at least `excess` bytes."""
    taken: list[DumpRow] = []
    for row in rows:
        if excess <= 0:
            break
        taken.append(row)
        excess -= row.bytes
    return taken


def _damaged(catalog: Catalog, run: str | None) -> list[Doomed]:
    found = []
    for path, reason in damaged_files(catalog):
        if run is None or path.split("/")[1] == run:
            full = catalog.store.root / path
            found.append(Doomed(path, full.lstat().st_size if os.path.lexists(full) else 0, reason))
    return found


def _leftovers(store: Store) -> list[Doomed]:
    found = []
    for folder in store.dump_folders():
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(_TEMPORARY) and entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    if time.time() - state.st_mtime > LEFTOVER_AGE_S:
                        found.append(Doomed(store.relative(Path(entry.path)), state.st_size, "unfinished, writer died"))
    return found


def _inside(store: Store, path: str) -> Path:
    """The full path, if its folder really is below the store's dumps; a link that leads out of it is refused."""
    full = store.root / path
    if not full.parent.resolve().is_relative_to(store.dumps.resolve()):
        raise Refused(f"{path} leads out of the store's dumps", hint="remove it by hand")
    return full


def _remove_if_empty(folder: Path, top: Path) -> None:
    while folder != top:
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
