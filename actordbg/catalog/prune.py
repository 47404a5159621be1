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

from actordbg.catalog import headers
from actordbg.catalog.query import Catalog, damaged_files, dump_bytes, dump_files
from actordbg.dumpfile import SUFFIX
from actordbg.errors import CorruptDump, Refused, StoreProblem
from actordbg.record import format_timestamp
from actordbg.store import Store

LEFTOVER_AGE_S = 3600.0
"""A temporary file older than this belongs to a writer that died."""

_TEMPORARY = ".tmp-"


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
    until the store's dumps take no more than that. `damaged` adds files that are broken (not those that only a newer
    actordbg can read, nor unreadable ones), and without `healthy` only those go. Leftover temporary files are always part
    of the plan.
    """
    doomed = {item.path: item for item in _leftovers(catalog.store)}
    if damaged:
        doomed |= {item.path: item for item in _damaged(catalog, run)}
    if healthy:
        chosen = _selected(catalog, where, older_than_s, run, now or datetime.now(timezone.utc))
        if keep_bytes is not None:
            chosen = _beyond(chosen, dump_bytes(catalog) - keep_bytes)
        reason = "selected" if keep_bytes is None else "over the size to keep"
        doomed |= {path: Doomed(path, size, reason) for path, size in chosen}
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


def _selected(
    catalog: Catalog, where: str | None, older_than_s: float | None, run: str | None, now: datetime
) -> list[tuple[str, int]]:
    before = None
    if older_than_s is not None:
        before = format_timestamp(datetime.fromtimestamp(max(0.0, now.timestamp() - older_than_s), timezone.utc))
    return dump_files(catalog, where, before=before, run=run)


def _beyond(files: list[tuple[str, int]], excess: int) -> list[tuple[str, int]]:
    """The oldest files that together free at least `excess` bytes."""
    taken = []
    for path, size in files:
        if excess <= 0:
            break
        taken.append((path, size))
        excess -= size
    return taken


def _damaged(catalog: Catalog, run: str | None) -> list[Doomed]:
    """Files that are broken, and are still so now: not those that are newer, unreadable, or in the wrong place."""
    found = []
    for item in damaged_files(catalog):
        full = catalog.store.root / item.path
        if item.code == CorruptDump.code and (run is None or item.path.split("/")[1] == run) and _is_corrupt(full):
            found.append(Doomed(item.path, full.lstat().st_size, item.reason))
    return found


def _is_corrupt(path: Path) -> bool:
    """Whether a file is broken, read again: one that was mended in place leaves no trace in its folder."""
    try:
        headers.read_row(os.fspath(path), path.name.removesuffix(SUFFIX), path.parent.parent.name, None)
    except CorruptDump:
        return True
    except (StoreProblem, OSError):
        return False
    return False


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
