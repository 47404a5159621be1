"""One's own dumps through one configuration, judged by everything that is there: the replay, the laws, the truth, a noise floor.

    found = run_check(store, plan.spec)
    found.comparison.verdict             # "match"

The replay is an ordinary one, so `report`, `compare` and `replay --resume` know it. One plain process computes the replay and
then the truth, which saves a start; under other backends the truth gets a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actordbg.base.errors import ActordbgError, MachineFault
from actordbg.judge.comparing import compare, save
from actordbg.judge.find_truth import ensure_rounding, ensure_truth
from actordbg.judge.noise_floor import newest_for
from actordbg.judge.sides import GOLDEN
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.replay_record import PASSED, ReplaySpec
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.replay_data import ReplayData, data_of
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

REPLAYING, TRUTH, ROUNDING = "replaying", "computing the truth", "measuring what the dtype costs"


@dataclass(frozen=True)
class CheckFound:
    """What a check came to. comparison: with the truth; None where there is none, and `no_truth` says why.

    golden: with what the training run itself got, where that was asked for.
    """

    data: ReplayData
    comparison: ComparisonRecord | None = None
    no_truth: str = ""
    golden: ComparisonRecord | None = None


def run_check(
    store: Store,
    spec: ReplaySpec,
    *,
    golden: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
    **heard: Any,
) -> CheckFound:
    """Replay what the specification says, and compare it with the truth; with `golden` also with what the training run got.

    on_stage: is told what begins. `heard`: on_event and on_tick, as `run_replay` takes them. An error of the replay is raised, as
    by `run_replay`. A truth that cannot be computed is said in the answer.
    """
    with WarmGroups(reopen=True) as warm:
        heard["warm"] = warm
        warm.share(spec.replay_id)
        on_stage(REPLAYING)
        run_replay(store, spec, **heard)
        data = data_of(store, spec)
        if not any(result.status == PASSED for result in data.results):
            return CheckFound(data, no_truth="no input passed")
        warm.share(None)
        own = compare(store, spec.replay_id, GOLDEN) if golden else None
        if own is not None:
            save(store, own)
        try:
            on_stage(TRUTH)
            truth = ensure_truth(store, spec.replay_id, **heard)
            on_stage(ROUNDING)
            rounding = ensure_rounding(store, spec.replay_id, **heard)
            record = compare(store, spec.replay_id, truth, rounding=rounding, noise=newest_for(store, spec.replay_id))
            save(store, record)
        except MachineFault as fault:
            fault.hint = f"fix that, then `actordbg compare {spec.replay_id} truth` goes on"
            raise
        except ActordbgError as problem:
            return CheckFound(data, no_truth=problem.message, golden=own)
        return CheckFound(data, record, golden=own)
