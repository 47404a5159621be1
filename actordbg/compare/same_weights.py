"""Does a replayed model have the weights that its inputs met in training? Without that, neither RIGHT nor WRONG means anything.

Two answers, in this order: the recorded sample or hash of the weights (`replay.recorded_weights`), and the log-probs. The same
weights in the same dtype repeat the run's log-probs far below what rounding costs, whatever the batch and the threads: measured
in bf16 0 to 2.7e-4 nats where rounding is 1e-2, and weights of the neighboring step are as far away as rounding. In fp32, where
rounding is 1e-6, another order of sums is as far as rounding, and another step's weights are further.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from actordbg.actor.rules import LEAKED
from actordbg.base.units import some
from actordbg.document.blocks import number
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, ComparisonRecord, DumpComparison
from actordbg.records.finding import Rule
from actordbg.records.run_files import MET_WEIGHTS, met_weights

OF_ROUNDING = {True: 4.0, False: 0.1}
"""Most distance from recorded log-probs that identifies weights, in units of measured rounding, by whether the run is in fp32."""
WEIGHTS = Rule("weights", "the model has the weights that its inputs met in training")
LEAST = 2e-6
"""Nats below which log-probs are the same: float32 has no more."""


@dataclass(frozen=True)
class WeightsMet:
    """Whether the weights are those of the inputs' steps, None if that is not known; words: how they were identified, what
    differs, or what is not known. recorded: weights were recorded, so that log-probs need not be asked.
    """

    same: bool | None
    words: str
    recorded: bool = False


def weights_met(
    resolved: Mapping[str, Any] | None, *, fp32: bool, as_recorded: bool, apart: float, rounding: float
) -> WeightsMet:
    """Judge the weights of a replay. resolved: its facts. fp32: whether the run was in fp32. as_recorded: whether the replay ran
    in the run's dtype; another moves log-probs as far as other weights do. apart: the mean distance of its log-probs from the
    recorded ones, NaN if there are none; rounding: from the truth. In nats.
    """
    met = met_weights(dict(resolved or {}))
    if met.get("other"):
        return WeightsMet(False, f"the model's weights are not those recorded at {_steps(met['other'].values())}", recorded=True)
    if met.get("same") and not met.get("unknown"):
        return WeightsMet(True, f"its weights are those recorded at {_steps(met['same'])}", recorded=True)
    most = max(LEAST, OF_ROUNDING[fp32] * rounding) if as_recorded else LEAST
    if apart <= most:
        return WeightsMet(
            True, f"its weights are the run's, by its log-probs: {number(apart, 3)} nats (rounding {number(rounding, 3)})"
        )
    why = ""
    if not as_recorded:
        why = " (it ran in another dtype than the run)"
    elif not math.isnan(apart):
        why = f": its log-probs are {number(apart, 3)} nats from the recorded ones, the same weights' at most {number(most, 3)}"
    return WeightsMet(None, f"whether the model has the weights of that step{why}")


def weights_of_outputs(own: ComparisonRecord, resolved: Mapping[str, Any], rounding: Mapping[str, float]) -> WeightsMet | None:
    """Judge the weights of a replay by the recorded outputs that it was compared with; None if there are none.

    resolved: its facts. rounding: by dump id, the mean distance in nats that rounding explains.
    """
    outputs = {each.dump_id: each.log_probs for each in own.dumps if each.verdict != NOT_COMPARED}
    if not outputs:
        return None
    known = {name: each.mean_abs for name, each in outputs.items() if each and name in rounding}
    measured = [(math.nan if mean is None else mean, rounding[name]) for name, mean in known.items()]
    apart, cost = (fmean(of) for of in zip(*measured or [(math.nan, 0.0)], strict=True))
    met = met_weights(dict(resolved))
    others = {} if met.get("same") else met.get("other", {})  # whose outputs are left out
    as_recorded = own.a.dtype == own.b.dtype
    facts = {MET_WEIGHTS: met | {"other": others}} if met else {}
    return weights_met(facts, fp32=own.b.dtype == "fp32", as_recorded=as_recorded, apart=apart, rounding=cost)


def without_unknown_weights(own: ComparisonRecord, weights: WeightsMet | None) -> ComparisonRecord:
    """Leave out of a comparison with recorded outputs what other weights explain as well, if it is unknown whose these are.

    What no weights explain stays: a fitted cause, a known fault, values that are not finite, figures that do not exist.
    """
    if weights is None or weights.same is not None or (own.explained is not None and own.explained.causes):
        return own
    why = {"dump": weights.words}
    dumps = tuple(
        each if _whatever_the_weights(each) else replace(each, verdict=NOT_COMPARED, not_compared=why) for each in own.dumps
    )
    kept = MISMATCH if any(each.verdict == MISMATCH for each in dumps) else NOT_COMPARED
    return replace(own, dumps=dumps, verdict=kept)


def _whatever_the_weights(dump: DumpComparison) -> bool:
    """Check whether a verdict holds for any weights."""
    odd = any(figures.nonfinite for figures in (dump.log_probs, dump.entropy) if figures is not None)
    broken = dump.verdict == MISMATCH and (dump.log_probs is None or odd or LEAKED in dump.reasons)
    return broken or dump.verdict == NOT_COMPARED


def _steps(steps: Any) -> str:
    known = sorted({step for step in steps if step is not None})
    if not known:
        return "these calls"
    word = "steps" if len(known) > 1 else "step"
    return f"{word} {some(known, 4)}"
