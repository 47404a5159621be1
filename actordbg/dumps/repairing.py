"""Repair what a check found, as far as nothing is lost. Only unfinished files of dead writers are deleted.

What cannot be fixed is moved into `quarantine/` below the same path, and stays there. A running replay is left alone, and so are
packs while another process moves dumps (Conflict). A dump is written and read again before its pack is moved.

Example::

    done, failed = repair(store, check(store))
"""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from actordbg.base.errors import ActordbgError, UnwritableCatalog, reason_of
from actordbg.base.processes import ALIVE, STOPPED, state_of
from actordbg.catalog.connections import odd_parts
from actordbg.catalog.indexer import refresh
from actordbg.dumps.finding import Repair, StoreFault
from actordbg.dumps.packing import write_out
from actordbg.formats import dumpfile
from actordbg.formats.store_files import FORMAT, atomic_write, make_folder, remove, require_own_way, sync_folder
from actordbg.records.journal import last_supervisor
from actordbg.store.layout import Store, printable
from actordbg.store.pack_build import exclusive
from actordbg.store.places import Pack, packed_place, split_place

QUARANTINE = "quarantine"


def repair(store: Store, findings: Iterable[StoreFault]) -> tuple[list[tuple[StoreFault, str]], list[tuple[StoreFault, str]]]:
    """Repair findings; return (fixed, with what was done; failed, with the reason). Raises Conflict while dumps are moved."""
    done, failed = [], []
    moved: list[Path] = []
    repairable = sorted((item for item in findings if item.repair in _REPAIRS), key=lambda item: [*_REPAIRS].index(item.repair))
    with exclusive(store) if store.packs.is_dir() else contextlib.nullcontext():
        misplaced = [finding.place for finding in repairable if finding.repair is Repair.HOME]
        aside = {}  # of two dumps that have each other's place, both can then go home
        for path in misplaced if len(misplaced) > 1 else ():
            with contextlib.suppress(OSError):
                aside[path] = _set_aside(store, path)
        for finding in repairable:
            if gone := next((path for path in moved if finding.place.is_relative_to(path)), None):
                done.append((finding, f"went with {gone.relative_to(store.root)}"))
                continue
            place = aside.get(finding.place, finding.place)
            try:
                if _is_run(store, place):
                    raise OSError(11, "a process runs this replay")
                require_own_way(place / "_" if finding.repair is Repair.MODE else place, store.root)
                done.append((finding, _REPAIRS[finding.repair](store, place)))
            except (ActordbgError, OSError) as error:
                failed.append((finding, reason_of(error)))
            if not os.path.lexists(finding.place) or finding.repair is Repair.FORMAT:
                moved.append(finding.place)
    return done, failed


def quarantine(store: Store, path: Path) -> str:
    """Move a file or a folder below `quarantine/`, and return what was done, in words."""
    if not os.path.lexists(path):
        return "is already gone"
    if path.is_relative_to(store.root / QUARANTINE):
        return f"stays in {path.parent.relative_to(store.root)}"
    return f"moved to {_set_aside(store, path).relative_to(store.root)}"


def _set_aside(store: Store, path: Path) -> Path:
    """Move a path below `quarantine/` and return its new place; an earlier file of the same name stays beside it."""
    for place in (path, store.root / QUARANTINE / path.name):
        require_own_way(place, store.root)
    relative = printable(os.path.relpath(path, store.root))
    target, count = store.root / QUARANTINE / relative, 0
    make_folder(target.parent)
    while os.path.lexists(target):
        count += 1
        target = store.root / QUARANTINE / f"{relative}.{count}"
    path.rename(target)
    sync_folder(path.parent)
    return target


def _write_format(store: Store, path: Path) -> str:
    if os.path.lexists(path):
        quarantine(store, path)
    atomic_write(path, json.dumps({"format": FORMAT}) + "\n")
    return f"written: format {FORMAT}"


def _salvage(store: Store, place: Path) -> str:
    """Write every whole dump of a pack as a separate file, then move the pack into quarantine."""
    path = Path((split_place(place) or (os.fspath(place),))[0])
    if not path.exists():
        return "its pack was already moved"
    dump_ids, saved = Pack(path).dump_ids, 0
    for dump_id in dump_ids:
        with contextlib.suppress(ActordbgError):
            saved += bool(write_out(store, packed_place(store.relative(path), dump_id)))
    return f"{saved} of its {len(dump_ids)} dumps are files; {quarantine(store, path)}"


def _bring_home(store: Store, path: Path) -> str:
    """Move a sound dump to where its record belongs; into quarantine if something lies there. Raises if it is damaged."""
    record, payload = dumpfile.read_payload(path)
    dumpfile.check(record, payload, os.fspath(path))
    target = store.dump_path(record)
    if os.path.lexists(target):
        return quarantine(store, path)
    make_folder(target.parent)
    path.rename(target)
    sync_folder(target.parent)
    sync_folder(path.parent)
    return f"moved to {store.relative(target)}"


def _remove(store: Store, path: Path) -> str:
    remove(path)
    return "removed"


def _close_mode(store: Store, path: Path) -> str:
    mode = path.stat().st_mode & 0o770 | (0o700 if path.is_dir() else 0o600)
    path.chmod(mode)
    return f"has mode {mode:o}"


def _renew_catalog(store: Store, path: Path) -> str:
    for path in odd_parts(store.catalog_path):
        quarantine(store, path)
    summary = refresh(store, rebuild=True)
    if summary.private_catalog:
        raise UnwritableCatalog("you cannot write to it")
    return f"rebuilt: {summary.dumps} dumps"


_REPAIRS = {
    Repair.FORMAT: _write_format, Repair.SALVAGE: _salvage, Repair.HOME: _bring_home, Repair.QUARANTINE: quarantine,
    Repair.REMOVE: _remove, Repair.MODE: _close_mode, Repair.CATALOG: _renew_catalog,
}  # fmt: skip
"""In this order: dumps are unpacked first, and the catalog is rebuilt last."""


def _is_run(store: Store, path: Path) -> bool:
    """Return whether a path belongs to a replay that a live process supervises."""
    if not path.is_relative_to(store.replays) or path == store.replays:
        return False
    folder = store.replays / path.relative_to(store.replays).parts[0]
    try:
        last = last_supervisor(folder)
        return last is not None and state_of(int(last["pid"]), int(last["ticks"]))[0] in (ALIVE, STOPPED)
    except (OSError, KeyError, TypeError, ValueError):
        return False
