"""How long a planned replay may take, by what earlier ones under the same settings took. It is an estimate, and says of what.

Seconds for each token come from results of the newest such replays, and so does what a replay takes beside its inputs: starting,
loading, compiling, stopping. Settings that time depends on (`config.as_ran.costs`) must be the same, and the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from statistics import median

from actordbg.catalog.query import Catalog, ReplayRow, list_replays, results_for
from actordbg.config.as_ran import as_ran, costs
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.replay_record import PASSED, ReplaySpec

_LOOKED_AT = 200
_USED = 3


@dataclass(frozen=True)
class Estimate:
    """Seconds of a plan; `results` of earlier replays that it follows from."""

    seconds: float
    results: int


def estimated(catalog: Catalog, spec: ReplaySpec) -> Estimate | None:
    """The estimate of a plan; None where nothing like it was replayed."""
    like = [row for row in list_replays(catalog, limit=_LOOKED_AT) if row.finished_at and _alike(spec.config, row)][:_USED]
    paces: list[float] = []
    beside: list[float] = []
    for row in like:
        results = [one for one in results_for(catalog, row.replay_id) if one.status == PASSED and one.forward_s and one.tokens]
        spent = sum((one.forward_s or 0.0) + (one.backward_s or 0.0) for one in results)
        paces += [((one.forward_s or 0.0) + (one.backward_s or 0.0)) / (one.tokens or 1) for one in results]
        beside += [max(_seconds(row) - spent / spec.config.lanes, 0.0)] if results else []
    if not paces:
        return None
    inputs = sum(item.tokens for item in spec.inputs) * median(paces) / spec.config.lanes
    return Estimate(inputs + median(beside), len(paces))


def _alike(config: ReplayConfig, row: ReplayRow) -> bool:
    """Whether it was asked for the same, as far as time depends on it."""
    return costs(as_ran(config)) == costs(as_ran(row.config))


def _seconds(row: ReplayRow) -> float:
    return (datetime.fromisoformat(_plain(row.finished_at)) - datetime.fromisoformat(_plain(row.created_at))).total_seconds()


def _plain(moment: str | None) -> str:
    return (moment or "").replace("Z", "+00:00")
