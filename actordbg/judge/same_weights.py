"""Does a replayed model have the weights that its inputs met in training? Without that, neither RIGHT nor WRONG means anything.

Two answers, in this order: the recorded sample or hash of the weights (`replay.recorded_weights`), and the log-probs. The same
weights in the same dtype repeat the run's log-probs far below what rounding costs, whatever the batch and the threads: measured
in bf16 0 to 2.7e-4 nats where rounding is 1e-2, and weights of the neighboring step are as far away as rounding. In fp32, where
rounding is 1e-6, another order of sums is as far as rounding, and another step's weights are further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actordbg.document.blocks import number
from actordbg.formats.weight_hashes import met_weights

OF_ROUNDING = {True: 4.0, False: 0.1}
"""Most distance from recorded log-probs that identifies weights, in units of measured rounding, by whether the run is in fp32."""
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


def weights_met(resolved: Mapping[str, Any] | None, *, fp32: bool, apart: float, rounding: float) -> WeightsMet:
    """Judge the weights of a replay. resolved: its facts. apart: the mean distance of its log-probs from the recorded ones;
    rounding: from the truth. In nats, NaN if unknown, or if it ran in another dtype than the run.
    """
    met = met_weights(dict(resolved or {}))
    if met.get("other"):
        return WeightsMet(False, f"the model's weights are not those recorded at {_steps(met['other'].values())}", recorded=True)
    if met.get("same") and not met.get("unknown"):
        return WeightsMet(True, f"its weights are those recorded at {_steps(met['same'])}", recorded=True)
    most = max(LEAST, OF_ROUNDING[fp32] * rounding)
    if apart <= most:
        return WeightsMet(
            True, f"its weights are the run's, by its log-probs: {number(apart, 3)} nats (rounding {number(rounding, 3)})"
        )
    said = f": its log-probs are {number(apart, 3)} nats from the recorded ones, the same weights' at most {number(most, 3)}"
    return WeightsMet(None, f"whether the model has the weights of that step{said if most == most else ''}")


def _steps(steps: Any) -> str:
    known = sorted({step for step in steps if step is not None})
    if not known:
        return "these calls"
    return f"step{'s' * (len(known) > 1)} {', '.join(map(str, known[:4]))}{', ...' * (len(known) > 4)}"
