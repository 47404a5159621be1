"""A replay as the store has it: what it was asked, what came of it, and what it was compared with.

**While a replay runs** `LiveCatalog` keeps the catalog up to date; only this process may write it. Results are in the workers'
journals first. The catalog follows at most twice a second, and takes at most a twentieth of the time. A catalog that cannot be
updated (locked, disk full, unreadable store) never stops a replay, because it can be built again from the journals at any time.

**Before it runs** `estimated` says how long it may take, by what earlier ones under the same settings took. It is an estimate,
and says of what. Seconds for each token come from results of the newest such replays, and so does what a replay takes beside its
inputs: starting, loading, compiling, stopping. Settings that time depends on (`config.as_ran.costs`) must be the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import ActordbgError
from actordbg.catalog.query import Catalog, list_replays, results_for
from actordbg.config.as_ran import as_ran, costs
from actordbg.records.journal import read_results, read_standing, read_why
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.catalog.lab_models import ComparisonRun


@dataclass(frozen=True)
class ReplayData:
    """One replay as the store has it: the input of a report.

    `resolved` is the configuration that the workers reported (empty if none became ready), `status` is
    "complete", "interrupted", "failed" or "unfinished". `results` holds at most one result for each dump, `comparisons` the
    newest one with each other side. `why`: what stopped it early, and the end of its log.
    """

    spec: ReplaySpec
    resolved: dict[str, Any]
    status: str
    results: tuple[ResultRecord, ...]
    comparisons: tuple[ComparisonRun, ...] = ()
    why: str = ""


def data_of(store: Store, spec: ReplaySpec) -> ReplayData:
    """The replay from its own files, without its comparisons."""
    folder = store.replays / spec.replay_id
    results = read_results(folder)
    found = tuple(results[i.dump_id] for i in spec.inputs if i.dump_id in results)
    return ReplayData(spec, *read_standing(folder), found, why=read_why(folder))


INTERVAL_S = 0.5
SHARE = 0.05
"""The largest part of the time that indexing may take while the replay runs."""


class LiveCatalog:
    """Call `touch` after news, `tick` often, `flush` at the end. `problem`: the last error, in words."""

    def __init__(self, store: Store) -> None:
        self.problem: str | None = None
        self._store = store
        self._stale = True
        self._next = 0.0

    def touch(self) -> None:
        """Say that the journals have something new."""
        self._stale = True

    def tick(self) -> None:
        """Index what is new, if it is due."""
        if self._stale and time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Index what is new, now."""
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


_LOOKED_AT = 200
_USED = 3


@dataclass(frozen=True)
class Estimate:
    """Seconds of a plan; `results` of earlier replays that it follows from."""

    seconds: float
    results: int


def estimated(catalog: Catalog, spec: ReplaySpec) -> Estimate | None:
    """The estimate of a plan; None where nothing like it was replayed."""
    wanted, lanes = costs(as_ran(spec.config)), spec.config.lanes  # of the settings, what time depends on
    like = (row for row in list_replays(catalog, limit=_LOOKED_AT) if row.finished_at and costs(as_ran(row.config)) == wanted)
    paces: list[float] = []
    beside: list[float] = []
    for row in islice(like, _USED):
        passed = (result for result in results_for(catalog, row.replay_id) if result.status == PASSED)
        seconds = [(one.forward_s + (one.backward_s or 0.0), one.tokens) for one in passed if one.forward_s and one.tokens]
        paces += [spent / tokens for spent, tokens in seconds]
        took = (_moment(row.finished_at) - _moment(row.created_at)).total_seconds()
        beside += [max(took - sum(spent for spent, _ in seconds) / lanes, 0.0)] if seconds else []
    if not paces:
        return None
    inputs = sum(item.tokens for item in spec.inputs) * median(paces) / lanes
    return Estimate(inputs + median(beside), len(paces))


def _moment(text: str | None) -> datetime:
    return datetime.fromisoformat((text or "").replace("Z", "+00:00"))
