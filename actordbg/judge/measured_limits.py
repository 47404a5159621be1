"""Limits that rounding sets: how far bf16 or fp16 moves *this* input through *this* model, measured, not assumed.

A flat limit for bf16 has to let the worst model pass, so it lets faults pass in every other one. So each dump is computed twice
with its rows alone: in the truth's dtype, and in the dtype that is judged, with the same weights. How far those two are apart is
what rounding does. The configuration may be `FACTORS` times as far from the truth, dump by dump and parameter by parameter,
and never needs to be nearer than fp32's flat limits.

| measure | limit |
|---|---|
| mean_abs, gradient_distance | 1.5 times what rounding does |
| p99_abs | 2 times |
| max_abs, entropy_max_abs | 3 times |
| parameter_distance | 3 times that of the same parameter, or of the median one |
| grad_norm_rel | the limit of gradient_distance: a norm moves by no more than its vector |
| loss_abs | the limit of mean_abs: a mean moves by no more than its terms |
| clip_share | flat, or 3 times |

A figure over few tokens is a matter of luck. So what rounding does to a dump is mixed with what it does to all dumps together, as
if `FEW` tokens of all belonged to each, and a mean over `n` tokens is given 1 / sqrt(n) + 8 / n more. Where all dumps
have few tokens together, limits are raised towards the flat ones: by (FEW / (FEW + tokens)) squared of the way.

**Experts.** Rounding may send a token to another expert, in one of both computations only. That moves this token, and a
parameter of that expert, by any amount. So for a model with experts each limit is twice as high, and those of `BY_TOKEN` are
never below twice the flat ones. That of a parameter is `LOST` then, if not more: a gradient that is lost is 1 away. Parameters
of all experts in one tensor are judged so over `SOME` tokens or more, those of a single expert together only.

**Bias.** Rounding goes both ways. A wrong epsilon, temperature or bias goes one way, too little at each token to be seen. So the
mean of the signed differences over all dumps is judged too, in units of its standard error: `z`, at most `MOST_Z`.

Example:
    rounding.add(measure(dump_id, None, lone_rows_in_bf16, truth))
    rounding.limited(applied, measure(dump_id, None, a, truth)).limits
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from actordbg.judge.dump_figures import Measured
from actordbg.judge.thresholds import DEFAULTS, Applied, measures
from actordbg.records.comparison_record import DumpComparison

DTYPES = ("bf16", "fp16")
"""The dtypes whose limits are measured."""
FACTORS = {"mean_abs": 1.5, "p99_abs": 2.0, "max_abs": 3.0, "entropy_max_abs": 3.0, "gradient_distance": 1.5}
PARAMETER = CLIPPED = 3.0
BY_TOKEN = ("p99_abs", "max_abs", "entropy_max_abs", "clip_share", "parameter_distance")
FEW, SOME = 64, 16
LOST = 0.9
MOST_Z = 5.0
LEAST_TOKENS = 30
"""Fewer tokens say nothing about a bias."""
_ONE_EXPERT = re.compile(r"\.experts\.\d")
FOLLOWS = {"grad_norm_rel": "gradient_distance", "loss_abs": "mean_abs"}
"""Measures that cannot be larger than another one, whose limit they have."""


@dataclass
class Rounding:
    """What the dtype's rounding does to each dump. `replay_id`: of the lone rows in that dtype. experts: the model has some."""

    replay_id: str
    experts: bool = False
    found: dict[str, Measured] = field(default_factory=dict)

    def add(self, one: Measured) -> None:
        """Take in the lone rows of one dump, in the dtype against the truth."""
        if one.dump.log_probs is not None and one.dump.log_probs.count and not one.broken:
            self.found[one.dump.dump_id] = one

    def knows(self, dump_id: str) -> bool:
        """Whether it was measured for this dump."""
        return dump_id in self.found

    def limited(self, applied: Applied, measured: Measured) -> DumpComparison:
        """The dump with limits of its own, and the parameter that is worst by them. A threshold that somebody set stays."""
        limits, dump = dict(applied.limits), measured.dump
        here = self.found[measured.dump.dump_id]
        flat = (FEW / (FEW + self._tokens)) ** 2
        rounded = self._rounded(here)
        for name in (one for one in rounded if one in limits and one not in applied.own):
            measure = FACTORS[name] * rounded[name]
            limits[name] = max(measure, (1 - flat) * measure + flat * limits[name], DEFAULTS["fp32"][name])
        for name, other in FOLLOWS.items():
            if name in limits and other in limits and other in rounded and name not in applied.own:
                limits[name] = max(limits[other], DEFAULTS["fp32"][name])
        if "clip_share" in limits and "clip_share" not in applied.own:
            limits["clip_share"] = max(limits["clip_share"], CLIPPED * measures(here.dump).get("clip_share", 0.0))
        if self.experts:
            least = {name: 2 * value for name, value in applied.limits.items() if name in BY_TOKEN}
            limits |= {name: max(2 * value, least.get(name, 0.0)) for name, value in limits.items() if name not in applied.own}
        each = {} if "parameter_distance" in applied.own else self._of_parameters(measured, here, applied.limits)
        if each:
            worst = max(each, key=lambda name: measured.distances[name] / each[name])
            limits["parameter_distance"] = each[worst]
            seen = max(each[name] + measured.distances[name] for name in each)
            dump = replace(dump, worst_parameter=worst, parameter_distance=measured.distances[worst], parameter_seen=seen)
        return replace(dump, limits=limits)

    @property
    def _tokens(self) -> int:
        return sum(one.dump.log_probs.count for one in self.found.values() if one.dump.log_probs)

    def bias(self, dumps: Iterable[DumpComparison]) -> Bias | None:
        """How far A is off in one direction over these dumps; None for too few tokens to tell."""
        ours = _pooled(one for one in dumps if self.knows(one.dump_id))
        theirs = _pooled(one.dump for one in self.found.values())
        return None if ours is None or theirs is None else Bias(ours[0], theirs[0], math.sqrt(ours[1] + theirs[1]))

    def _of_parameters(self, ours: Measured, here: Measured, flat: Mapping[str, float]) -> dict[str, float]:
        """The limit of each parameter that is judged by itself."""
        if not here.distances:
            return {}
        from statistics import median  # it imports fractions and decimal, and only measured limits need it

        usual = median(here.distances.values())
        factor, least = PARAMETER, DEFAULTS["fp32"]["parameter_distance"]
        alone = list(ours.distances)
        if self.experts:
            factor, least = 2 * PARAMETER, min(LOST, 2 * flat.get("parameter_distance", LOST))
            some = ours.dump.log_probs is not None and ours.dump.log_probs.count >= SOME
            alone = [name for name in alone if ".experts." not in name or (some and not _ONE_EXPERT.search(name))]
        return {name: max(factor * max(here.distances.get(name, 0.0), usual), least) for name in alone}

    def _rounded(self, here: Measured) -> dict[str, float]:
        """By measure what rounding does to this dump, mixed with what it does to all: see the module."""
        count = here.dump.log_probs.count if here.dump.log_probs else 0
        own, all_of = measures(here.dump), self._together()
        share = count / (count + FEW)
        found: dict[str, float] = {
            name: max(own[name], (1 - share) * all_of[name]) for name in ("p99_abs", "max_abs", "entropy_max_abs") if name in own
        }
        if "mean_abs" in own:
            found["mean_abs"] = (share * own["mean_abs"] + (1 - share) * all_of["mean_abs"]) * (
                1 + 1 / math.sqrt(count) + 8 / count
            )
        if "gradient_distance" in own:
            found["gradient_distance"] = max(own["gradient_distance"], all_of["gradient_distance"])
        return found

    def _together(self) -> dict[str, float]:
        """By measure over all dumps: the mean over all tokens, the largest of the largest, the median of the others."""
        from statistics import median

        each = [(measures(one.dump), one.dump.log_probs.count if one.dump.log_probs else 0) for one in self.found.values()]
        names = {name for values, _ in each for name in values if name in FACTORS}
        found = {name: median(values[name] for values, _ in each if name in values) for name in names}
        found["mean_abs"] = sum(values.get("mean_abs", 0.0) * count for values, count in each) / sum(count for _, count in each)
        found["max_abs"] = max(values.get("max_abs", 0.0) for values, _ in each)
        return found


@dataclass(frozen=True)
class Bias:
    """The mean signed difference from the truth in nats: A's, that of rounding, and the standard error of their difference."""

    ours: float
    rounding: float
    error: float

    @property
    def z(self) -> float:
        """How far the two are apart, in standard errors."""
        return (self.ours - self.rounding) / self.error if self.error else 0.0

    @property
    def seen(self) -> float:
        """A shift of every log-prob by this much, either way, would have been a mismatch."""
        return MOST_Z * self.error + abs(self.ours - self.rounding)


def _pooled(dumps: Iterable[DumpComparison]) -> tuple[float, float] | None:
    """(mean of the signed differences, squared standard error of that mean) over all tokens of all dumps."""
    parts = [one.log_probs for one in dumps if one.log_probs is not None and one.log_probs.rms_abs is not None]
    known = [(one.count, one.kl_k1, one.rms_abs) for one in parts if one.kl_k1 is not None and one.rms_abs is not None]
    count = sum(n for n, _, _ in known)
    if count < LEAST_TOKENS:
        return None
    mean = -sum(n * k1 for n, k1, _ in known) / count
    square = sum(n * rms**2 for n, _, rms in known) / count
    return mean, max(square - mean**2, 0.0) / count
