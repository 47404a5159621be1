"""A replay as stored: its specification, its results, and its comparisons.

**While a replay runs**, `LiveCatalog` keeps the catalog up to date; only this process may write it. Results are in the workers'
journals first. The catalog follows at most twice a second, and takes at most a twentieth of the time. A catalog that cannot be
updated (locked, disk full, unreadable store) never stops a replay, because it can be rebuilt from the journals at any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import ActordbgError
from actordbg.records.journal import read_results, read_standing, read_why
from actordbg.records.replay_record import ReplaySpec, ResultRecord
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.catalog.lab_models import ComparisonRun


@dataclass(frozen=True)
class ReplayData:
    """A stored replay: the input of a report.

    `resolved`: the configuration that the workers reported (empty if none became ready). `status`: "complete", "interrupted",
    "failed" or "unfinished". `results`: at most one per dump. `comparisons`: the newest with each other side. `why`: what stopped
    it early, and the end of its log.
    """

    spec: ReplaySpec
    resolved: dict[str, Any]
    status: str
    results: tuple[ResultRecord, ...]
    comparisons: tuple[ComparisonRun, ...] = ()
    why: str = ""


def data_of(store: Store, spec: ReplaySpec) -> ReplayData:
    """Read the replay from its files, without its comparisons."""
    folder = store.replays / spec.replay_id
    results = read_results(folder)
    ordered = tuple(results[i.dump_id] for i in spec.inputs if i.dump_id in results)
    return ReplayData(spec, *read_standing(folder), ordered, why=read_why(folder))


INTERVAL_S = 0.5
SHARE = 0.05
"""The largest share of the time that indexing may take while the replay runs."""


class LiveCatalog:
    """Updates the catalog: call `touch` after news, `tick` often, `flush` at the end. `problem`: the last error, in words."""

    def __init__(self, store: Store) -> None:
        self.problem: str | None = None
        self._store = store
        self._stale = True
        self._next = 0.0

    def touch(self) -> None:
        """Note that the journals have new lines."""
        self._stale = True

    def tick(self) -> None:
        """Index new journal lines, if it is time."""
        if self._stale and time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Index new journal lines now."""
        from actordbg.catalog.indexer import refresh

        began = time.monotonic()
        try:
            refresh(self._store)
            self.problem = None
        except (ActordbgError, OSError) as problem:
            self.problem = str(problem)
        self._stale = False
        now = time.monotonic()
        self._next = now + max(INTERVAL_S, (now - began) / SHARE)
