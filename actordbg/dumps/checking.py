"""All checks of a store, in one table. A check is a name and a function from the store to findings; it writes nothing.

findings = check(store)                    # every byte
findings = check(store, deep=False)        # names, headers and records only
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from actordbg.base.errors import StoreProblem
from actordbg.dumps import folder_checks, record_checks, verify
from actordbg.dumps.finding import Finding
from actordbg.store.layout import Store

Started = Callable[[str], None]


@dataclass(frozen=True)
class StoreCheck:
    """A check: its name, what it looks at, and how. `look` gets the store, and whether to read files whole."""

    name: str
    about: str
    look: Callable[[Store, bool], Iterable[Finding]]


def _plainly(look: Callable[[Store], Iterable[Finding]]) -> Callable[[Store, bool], Iterable[Finding]]:
    return lambda store, deep: look(store)


FORMAT_CHECK = StoreCheck("format", "FORMAT", _plainly(folder_checks.format_file))
CHECKS = (
    FORMAT_CHECK,
    StoreCheck("layout", "names, types, permissions, owners, leftovers", _plainly(folder_checks.layout)),
    StoreCheck("dumps", "each dump file: header, name, payload, checksums, tensors", verify.loose_dumps),
    StoreCheck("packs", "each pack: index, and each dump in it", verify.packs),
    StoreCheck("doubles", "dumps that lie in a pack and in a file", verify.doubles),
    StoreCheck("replays", "specifications, journals, results, kept tensors", record_checks.replays),
    StoreCheck("records", "comparisons, noise floors, matrices, memory", _plainly(record_checks.records)),
    StoreCheck("switches", "dump switches", _plainly(record_checks.switches)),
    StoreCheck("counters", "counters of recording processes", _plainly(record_checks.counters)),
    StoreCheck("weights", "hashes of the weights that recorded calls met", _plainly(record_checks.weights)),
    StoreCheck("rings", "rings of this machine", _plainly(record_checks.rings)),
    StoreCheck("events", "events of patches", _plainly(record_checks.events)),
    StoreCheck("backups", "originals of patched files", _plainly(record_checks.backups)),
    StoreCheck("models", "models that actordbg built", _plainly(record_checks.models)),
    StoreCheck("catalog", "the database, its revision, its rows", folder_checks.catalog),
)
"""Every check, in its order."""


def check(
    store: Store, *, deep: bool = True, without: Collection[str] = (), on_start: Started = lambda name: None
) -> list[Finding]:
    """What all checks find, each thing once. `without`: names of checks to leave out. `on_start` gets each check's name.

    Raises StoreProblem where there is no store.
    """
    _require_some_store(store)
    found: dict[tuple[str, str], Finding] = {}
    for one in _wanted(store, without):
        on_start(one.name)
        for finding in one.look(store, deep):
            found.setdefault((os.fspath(finding.place), finding.kind), finding)
    return [found[key] for key in sorted(found)]


def _wanted(store: Store, without: Collection[str]) -> Iterator[StoreCheck]:
    newer = any(one.kind == "newer-store" for one in FORMAT_CHECK.look(store, False))
    return (one for one in CHECKS if one.name not in without and (not newer or one is FORMAT_CHECK))


def _require_some_store(store: Store) -> None:
    known = ("dumps", "packs", "replays")
    if not os.path.lexists(store.format_path) and not any(os.path.isdir(store.root / name) for name in known):
        raise StoreProblem(f"there is no store in {store.root}", hint="--store DIR names one")
