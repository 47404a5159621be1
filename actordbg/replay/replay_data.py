"""A replay as stored: its specification, its results, and its comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actordbg.base.owners import whose
from actordbg.records.journal import SPEC, read_results, read_standing, read_why
from actordbg.records.replay_record import ReplaySpec, ResultRecord
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.catalog.lab_columns import ComparisonRun


@dataclass(frozen=True)
class ReplayData:
    """A stored replay: the input of a report.

    `resolved`: the configuration that the workers reported (empty if none became ready). `status`: "complete", "interrupted",
    "failed" or "unfinished". `results`: at most one per dump. `comparisons`: the newest with each other side. `why`: what stopped
    it early, and the end of its log. `whose`: who else wrote it.
    """

    spec: ReplaySpec
    resolved: dict[str, Any]
    status: str
    results: tuple[ResultRecord, ...]
    comparisons: tuple[ComparisonRun, ...] = ()
    why: str = ""
    whose: str = ""


def data_of(store: Store, spec: ReplaySpec) -> ReplayData:
    """Read the replay from its files, without its comparisons."""
    folder = store.replays / spec.replay_id
    results = read_results(folder)
    ordered = tuple(results[i.dump_id] for i in spec.inputs if i.dump_id in results)
    return ReplayData(spec, *read_standing(folder), ordered, why=read_why(folder), whose=whose(folder / SPEC))
