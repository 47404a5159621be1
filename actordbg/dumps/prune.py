"""Select and remove dumps. Nothing outside `store/dumps` and `store/packs` is touched, and nothing that was not selected; but the
texts of a run's turns (`run --turns`) go with the run's last dump, and the weights of a step with the last dump that met them.

A plan says what would be removed and why; `apply` removes just that. Removing is by file name below the store's `dumps` folder,
without following links: a path that leads elsewhere is refused. Packed dumps are removed by rewriting their pack without them;
if an interrupted `dump pack` also left a file of such a dump, both are removed. Pinned (protected) dumps are spared unless
requested.

The age of a dump is that of its place: the time when it came into this store. A dump that was recorded long ago and imported a
minute ago is a minute old. So packing and unpacking keep the time of a file.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from actordbg.base.errors import CorruptDump, Refused, StoreProblem, reason_of
from actordbg.base.units import grouped
from actordbg.catalog.query import Catalog, answers, damaged_files, dump_bytes, dump_files
from actordbg.catalog.tables import CALLER
from actordbg.catalog.where import all_of, quoted
from actordbg.dumps import packing
from actordbg.dumps.verify import verify_place
from actordbg.formats.dump_record import format_timestamp
from actordbg.formats.store_files import remove, require_own_way
from actordbg.formats.turn_record import TURNS
from actordbg.formats.weight_hashes import WEIGHTS
from actordbg.records.run_files import read_counters, weight_files
from actordbg.store.layout import Store
from actordbg.store.pack_build import exclusive
from actordbg.store.places import dump_id_of, split_place


@dataclass(frozen=True)
class Doomed:
    """A dump or file to remove: its place below the store, its size (or share of its pack) in bytes, and why."""

    path: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class PrunePlan:
    """What to remove, and how much that is; `failed` names what could not be removed. `spared`: pinned dumps that the conditions
    select and that stay. `recent`: dumps recorded before the given age, which came into the store since."""

    files: list[Doomed]
    bytes: int
    done: bool = False
    failed: list[tuple[str, str]] = field(default_factory=list)
    spared: int = 0
    recent: int = 0

    def followed_by(self, later: PrunePlan) -> PrunePlan:
        """Merge this plan with a plan that was carried out after it."""
        files, failed = [*self.files, *later.files], [*self.failed, *later.failed]
        return PrunePlan(files, self.bytes + later.bytes, self.done and later.done, failed, later.spared, later.recent)


def plan_prune(
    catalog: Catalog,
    *,
    where: str | None = None,
    older_than_s: float | None = None,
    keep_bytes: int | None = None,
    damaged: bool = False,
    pinned: bool = False,
) -> PrunePlan:
    """Plan to remove the dumps that all given conditions select (`where`, `older_than_s`), pinned dumps only with `pinned`;
    of these, with `keep_bytes`, the oldest until the store's dumps take no more than that. With `damaged` broken files
    instead (not those that only a newer actordbg can read, nor unreadable files).
    """
    spared, short, recent = 0, False, 0
    if damaged:
        doomed = _damaged(catalog)
    else:
        conditions = [where] if where is not None else []
        moment = max(0.0, time.time() - (older_than_s or 0.0))
        if older_than_s is not None:
            before = format_timestamp(datetime.fromtimestamp(moment, timezone.utc))
            conditions.append(f"timestamp < {quoted(before)}")
        chosen = dump_files(catalog, all_of(conditions if pinned else [*conditions, "not pinned"]) or None)
        if older_than_s is not None:
            selected, arrived = len(chosen), _arrivals(catalog.store, chosen)
            chosen = [(path, size) for path, size in chosen if arrived[path] < moment]
            recent = selected - len(chosen)
        if keep_bytes is not None:
            excess = dump_bytes(catalog) - keep_bytes
            short = sum(size for _, size in chosen) < excess
            freed = itertools.accumulate((size for _, size in chosen), initial=0)  # the oldest that together free the excess
            chosen = [item for item, before_it in zip(chosen, freed, strict=False) if before_it < excess]
        if not pinned and (keep_bytes is None or short):
            spared = len(dump_files(catalog, all_of([*conditions, "pinned"])))
        reason = "selected" if keep_bytes is None else "over the size to keep"
        paths = [path for path, _ in chosen]
        doomed = [Doomed(path, size, reason) for path, size in chosen]
        doomed += _turns_without_dumps(catalog, paths) + _weights_without_dumps(catalog, paths)
    files = sorted(doomed, key=lambda item: item.path)
    return PrunePlan(files, sum(item.bytes for item in files), spared=spared, recent=recent)


def _arrivals(store: Store, chosen: list[tuple[str, int]]) -> dict[str, float]:
    """Return when each of these dumps came into the store, in seconds since 1970; the present for a dump that is gone."""
    arrived: dict[str, float] = {}
    holders = {path: (split_place(path) or (path, ""))[0] for path, _ in chosen}
    for holder in set(holders.values()):
        try:
            arrived[holder] = (store.root / holder).lstat().st_mtime
        except OSError:
            arrived[holder] = time.time()
    return {path: arrived[holder] for path, holder in holders.items()}


def apply(store: Store, plan: PrunePlan) -> PrunePlan:
    """Remove what the plan names, and emptied folders; what is already gone counts as removed.

    Raises Conflict while another process moves dumps into or out of packs.
    """
    with exclusive(store) if store.packs.is_dir() else contextlib.nullcontext():
        removed, failed = _remove_packed(store, [item for item in plan.files if split_place(item.path)])
        for item in plan.files:
            if not split_place(item.path):
                try:
                    remove(_inside(store, item.path))
                    removed.append(item)
                except (OSError, Refused) as error:  # the other files go all the same, and are counted
                    failed.append((item.path, reason_of(error)))
        for folder in {(store.root / item.path).parent for item in removed}:
            with contextlib.suppress(OSError):
                while folder not in _tops(store):
                    folder.rmdir()
                    folder = folder.parent
    return PrunePlan(removed, sum(item.bytes for item in removed), True, failed, plan.spared, plan.recent)


def _remove_packed(store: Store, items: list[Doomed]) -> tuple[list[Doomed], list[tuple[str, str]]]:
    """Rewrite each pack without its doomed dumps; their files are removed first, so that none comes back as a file."""
    removed: list[Doomed] = []
    failed: list[tuple[str, str]] = []
    for pack, doomed in grouped((item.path.rpartition("#")[0], item) for item in items).items():
        try:
            require_own_way(_inside(store, pack))
            for _, path in packing.twins(store, [item.path for item in doomed]):
                remove(path)
            packing.drop_from_pack(store, pack, [dump_id_of(item.path) for item in doomed])
        except (OSError, Refused, StoreProblem) as error:
            failed += [(item.path, f"its pack cannot be rewritten: {reason_of(error)}") for item in doomed]
        else:
            removed += doomed
    return removed, failed


def _turns_without_dumps(catalog: Catalog, chosen: list[str]) -> list[Doomed]:
    """List the recorded turns of the runs that lose all of their dumps."""
    root, lost = catalog.store.root, set(chosen)
    runs = {path.split("/")[1] for path in lost if (root / TURNS / path.split("/")[1]).is_dir()}
    if runs:
        runs -= {path.split("/")[1] for path, _ in dump_files(catalog) if path not in lost}
    files = (file for run in runs for file in sorted((root / TURNS / run).glob("*.json")))
    return [Doomed(str(file.relative_to(root)), file.lstat().st_size, "turns of a run without dumps") for file in files]


def _weights_without_dumps(catalog: Catalog, chosen: list[str]) -> list[Doomed]:
    """List the recorded weights that only these dumps met. Those that a running process may still meet stay.

    A file holds from its call until the next file of the same instance.
    """
    store, lost, goes = catalog.store, set(map(dump_id_of, chosen)), defaultdict[Path, list[bool]](list)
    calls = answers(catalog, f"SELECT k.run, k.pid, k.instance, d.call_index, d.dump_id FROM dump AS d {CALLER}")
    for (run, *instance), those in grouped((call[:3], call[3:]) for call in calls).items():
        files = weight_files(store.root / WEIGHTS / run, *instance)
        for call, dump_id in those:
            if behind := bisect_left(files, (call + 1,)):
                goes[files[behind - 1][1]].append(dump_id in lost)
        if files and _may_record(store, run, files[-1][1]):
            goes[files[-1][1]].append(False)
    doomed = sorted(path for path, gone in goes.items() if all(gone))
    return [Doomed(store.relative(path), path.lstat().st_size, "weights of a step without dumps") for path in doomed]


def _may_record(store: Store, run: str, weights: Path) -> bool:
    """Check whether the process that met these weights may still record: after `dump recover`, a killed process may not."""
    try:
        counters = read_counters(store.counters / run / f"{weights.stem.rpartition('-')[0]}.json")
    except CorruptDump:  # a store that was copied has none
        return False
    return counters["state"] in ("on", "off")


def _damaged(catalog: Catalog) -> list[Doomed]:
    """List the files that are still broken: not those that are newer, unreadable, or in the wrong place.

    Reads them again: a file that was fixed in place leaves no trace in its folder.
    """
    doomed = []
    for item in damaged_files(catalog):
        if item.code == CorruptDump.code and not split_place(item.path):
            _, _, wrong = verify_place(catalog.store, item.path, deep=False)
            if wrong is not None and wrong.code == CorruptDump.code:
                doomed.append(Doomed(item.path, (catalog.store.root / item.path).lstat().st_size, item.reason))
    return doomed


def _tops(store: Store) -> tuple[Path, ...]:
    """Return the folders from which files are removed."""
    return store.dumps, store.packs, store.root / TURNS, store.root / WEIGHTS


def _inside(store: Store, path: str) -> Path:
    """Return the full path if its folder really is below one of these of the store; refuse a link that leads out."""
    full = store.root / path
    folder = full.parent.resolve()
    if not any(folder.is_relative_to(top.resolve()) for top in _tops(store)):
        raise Refused(f"{path} leads out of the store's dumps", hint="remove it by hand")
    return full
