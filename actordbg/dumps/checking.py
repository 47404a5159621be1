"""All checks of a store, in one table. A check is a name and a function from the store to findings; it writes nothing.

findings = check(store)                    # every byte
findings = check(store, deep=False)        # names, headers and records only
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
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


FORMAT_CHECK = StoreCheck("format", "FORMAT", folder_checks.format_file)
CHECKS = (
    FORMAT_CHECK,
    StoreCheck("layout", "names, types, permissions, owners, leftovers", folder_checks.layout),
    StoreCheck("dumps", "each dump file: header, name, payload, checksums, tensors", verify.loose_dumps),
    StoreCheck("packs", "each pack: index, and each dump in it", verify.packs),
    StoreCheck("doubles", "dumps that lie in a pack and in a file", verify.doubles),
    StoreCheck("replays", "specifications, journals, results, kept tensors", record_checks.replays),
    StoreCheck("records", "comparisons, noise floors, matrices, memory", record_checks.records),
    StoreCheck("switches", "dump switches", record_checks.switches),
    StoreCheck("counters", "counters of recording processes", record_checks.counters),
    StoreCheck("weights", "hashes of the weights that recorded calls met", record_checks.weights),
    StoreCheck("rings", "rings of this machine", record_checks.rings),
    StoreCheck("events", "events of patches", record_checks.events),
    StoreCheck("backups", "originals of patched files", record_checks.backups),
    StoreCheck("models", "models that actordbg built", record_checks.models),
    StoreCheck("catalog", "the database, its revision, its rows", folder_checks.catalog),
)
"""Every check, in its order."""


def check(
    store: Store, *, deep: bool = True, without: Collection[str] = (), on_start: Started = lambda name: None
) -> list[Finding]:
    """Return what all checks find, each thing once. `without`: names of checks to leave out. `on_start` gets each check's name.

    Raises StoreProblem where there is no store.
    """
    known = ("dumps", "packs", "replays")
    if not os.path.lexists(store.format_path) and not any(os.path.isdir(store.root / name) for name in known):
        raise StoreProblem(f"there is no store in {store.root}", hint="--store DIR names one")
    newer = any(finding.kind == "newer-store" for finding in FORMAT_CHECK.look(store, False))
    findings: dict[tuple[str, str], Finding] = {}
    for check in [FORMAT_CHECK] if newer else CHECKS:
        if check.name not in without:
            on_start(check.name)
            for finding in check.look(store, deep):
                findings.setdefault((os.fspath(finding.place), finding.kind), finding)
    return [findings[key] for key in sorted(findings)]
