"""A replay as the store has it: what it was asked, what came of it, and what it was compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actordbg.records.journal import read_results, read_standing, read_why
from actordbg.records.replay_record import ReplaySpec, ResultRecord
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
