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

**What a green verdict excludes** (`excluded`): the smallest faults that would have made it red, on the same inputs and under the
same limits. Four follow from the limits and from how far A is off already, without another forward. Each holds in the worst case:
whichever token, dump or parameter it is, and whichever way it goes.

| fault | size | would have been above |
|---|---|---|
| token | nats, of any one log-prob | max_abs |
| tokens | nats, all log-probs shifted by as much | mean_abs, or the bias over all dumps |
| gradients | relative, all of them times 1 + e | gradient_distance or grad_norm_rel |
| parameter | relative, the gradient of any one parameter | parameter_distance |

Others depend on the model, so they are planted in it (`actordbg.actor.truth_model`), each row alone in A's dtype, and judged as
A is (`noticed`). The size is the smallest one that was tried from which on all are red. Gradients are not computed for these,
so a smaller one may be seen by its gradient. `None` as a size: no size of this fault is known to be seen.

Example:
    rounding = Rounding("r-02", {dump_id: measure(dump_id, None, lone_rows_in_bf16, truth)})
    rounding.limited(applied, measure(dump_id, None, a, truth)).limits
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from statistics import median

import numpy as np

from actordbg.judge.dump_figures import measure
from actordbg.judge.sides import ReplaySide, Side
from actordbg.judge.thresholds import DEFAULTS, Applied, Floors, judge, measures
from actordbg.records.comparison_record import GOOD, MISMATCH, DumpComparison

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

Sizes = dict[str, float | None]


@dataclass(frozen=True)
class Rounding:
    """What the dtype's rounding does to each dump: `found`, by dump id, the figures of its rows alone, in the dtype against the
    truth. `replay_id`: of the lone rows in that dtype. experts: the model has some.
    """

    replay_id: str
    found: dict[str, DumpComparison]
    experts: bool = False

    def limited(self, applied: Applied, dump: DumpComparison) -> DumpComparison:
        """The dump with limits of its own, and the parameter that is worst by them. A threshold that somebody set stays."""
        limits, here, least = dict(applied.limits), self.found[dump.dump_id], DEFAULTS["fp32"]
        free = limits.keys() - applied.own
        flat = (FEW / (FEW + self._tokens)) ** 2
        rounded = self._rounded(here)
        for name in free & rounded.keys():
            measured = FACTORS[name] * rounded[name]
            limits[name] = max(measured, (1 - flat) * measured + flat * limits[name], least[name])
        for name, other in FOLLOWS.items():
            if name in free and other in limits and other in rounded:
                limits[name] = max(limits[other], least[name])
        if "clip_share" in free:
            limits["clip_share"] = max(limits["clip_share"], CLIPPED * measures(here).get("clip_share", 0.0))
        for name in free if self.experts else ():
            limits[name] = 2 * max(limits[name], applied.limits[name] if name in BY_TOKEN else 0.0)
        each = {} if "parameter_distance" in applied.own else self._of_parameters(dump, here, applied.limits)
        if each:
            worst = max(each, key=lambda name: dump.distances[name] / each[name])
            limits["parameter_distance"] = each[worst]
            seen = max(each[name] + dump.distances[name] for name in each)
            dump = replace(dump, worst_parameter=worst, parameter_distance=dump.distances[worst], parameter_seen=seen)
        return replace(dump, limits=limits)

    def bias(self, dumps: Iterable[DumpComparison]) -> Bias | None:
        """How far A is off in one direction over these dumps; None for too few tokens to tell."""
        ours = _pooled(dump for dump in dumps if dump.dump_id in self.found)
        theirs = _pooled(self.found.values())
        return None if ours is None or theirs is None else Bias(ours[0], theirs[0], math.sqrt(ours[1] + theirs[1]))

    def _of_parameters(self, ours: DumpComparison, here: DumpComparison, flat: Mapping[str, float]) -> dict[str, float]:
        """The limit of each parameter that is judged on its own."""
        if not here.distances:
            return {}
        usual, alone = median(here.distances.values()), list(ours.distances)
        factor, least = PARAMETER, DEFAULTS["fp32"]["parameter_distance"]
        if self.experts:
            factor, least = 2 * PARAMETER, min(LOST, 2 * flat.get("parameter_distance", LOST))
            some = _tokens(ours) >= SOME
            alone = [name for name in alone if ".experts." not in name or (some and not _ONE_EXPERT.search(name))]
        return {name: max(factor * max(here.distances.get(name, 0.0), usual), least) for name in alone}

    def _rounded(self, here: DumpComparison) -> dict[str, float]:
        """By measure what rounding does to this dump, mixed with what it does to all: see the module."""
        count, own, usual = _tokens(here), measures(here), self._together
        share = count / (count + FEW)
        found = {name: max(own[name], (1 - share) * usual[name]) for name in FACTORS if name in own}
        if "mean_abs" in own:
            mixed = share * own["mean_abs"] + (1 - share) * usual["mean_abs"]
            found["mean_abs"] = mixed * (1 + 1 / math.sqrt(count) + 8 / count)
        if "gradient_distance" in own:
            found["gradient_distance"] = max(own["gradient_distance"], usual["gradient_distance"])
        return found

    @cached_property
    def _tokens(self) -> int:
        return sum(map(_tokens, self.found.values()))

    @cached_property
    def _together(self) -> dict[str, float]:
        """By measure over all dumps: the mean over all tokens, the largest of the largest, the median of the others."""
        each = [(measures(dump), _tokens(dump)) for dump in self.found.values()]
        by_name = {name: [values[name] for values, _ in each if name in values] for name in FACTORS}
        found = {name: median(values) for name, values in by_name.items() if values}
        found["mean_abs"] = sum(values.get("mean_abs", 0.0) * count for values, count in each) / self._tokens
        found["max_abs"] = max(by_name["max_abs"], default=0.0)
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


def _tokens(dump: DumpComparison) -> int:
    return dump.log_probs.count if dump.log_probs else 0


def _pooled(dumps: Iterable[DumpComparison]) -> tuple[float, float] | None:
    """(mean of the signed differences, squared standard error of that mean) over all tokens of all dumps."""
    parts = [dump.log_probs for dump in dumps if dump.log_probs is not None]
    known = [(part.count, part.kl_k1, part.rms_abs) for part in parts if part.kl_k1 is not None and part.rms_abs is not None]
    tokens = sum(count for count, _, _ in known)
    if tokens < LEAST_TOKENS:
        return None
    counts, k1, rms = np.array(known).T
    mean = -float(counts @ k1) / tokens
    return mean, max(float(counts @ rms**2) / tokens - mean**2, 0.0) / tokens


def excluded(dumps: Sequence[DumpComparison], limits: Mapping[str, float], bias: Bias | None, floors: Floors) -> Sizes:
    """Sizes by fault over the dumps that were judged and are good. `limits`: of dumps that have none of their own.

    floors: the noise that excuses what is above a limit, so it hides a fault of that size.
    """
    good = [dump for dump in dumps if dump.verdict in GOOD]
    if not good:
        return {}

    def pairs(name: str) -> Iterator[tuple[float, float]]:
        """The limit and the value of a measure, of each dump that has both."""
        for dump in good:
            limit, value = (dump.limits or limits).get(name), measures(dump).get(name)
            if limit is not None and value is not None:
                yield max(limit, floors[dump.dump_id].get(name, 0.0)), value

    tokens = [limit + value for limit, value in pairs("max_abs")]
    shifts = [limit + value for limit, value in pairs("mean_abs")] + ([bias.seen] if bias else [])
    found: Sizes = {"token": max(tokens) if len(tokens) == len(good) else None, "tokens": min(shifts, default=None)}
    if any({"grad_norm_rel", "gradient_distance"} & measures(dump).keys() for dump in good):
        scales = [*pairs("grad_norm_rel"), *pairs("gradient_distance")]
        found["gradients"] = min(((limit + value) / (1 - value) for limit, value in scales if value < 1), default=None)
        known = [
            max(dump.parameter_seen, floors[dump.dump_id].get("parameter_distance", 0.0) + (dump.parameter_distance or 0.0))
            for dump in good if dump.parameter_seen is not None
        ]  # fmt: skip
        found["parameter"] = max(known) if len(known) == len(good) else None
    return found


def noticed(
    lone: ReplaySide,
    truth: Side,
    dumps: Sequence[DumpComparison],
    limits: Mapping[str, float],
    rounding: Rounding | None,
    floors: Floors,
) -> Sizes:
    """By fault that was planted in `lone`, the smallest size from which on each was red for these dumps."""
    judged: dict[str, dict[float, list[DumpComparison]]] = defaultdict(lambda: defaultdict(list))
    for dump in (dump for dump in dumps if dump.verdict in GOOD):
        ours, theirs = lone.read(dump.dump_id), truth.read(dump.dump_id)
        if isinstance(ours, str) or isinstance(theirs, str):
            continue
        ours, theirs = (replace(one, entropy=None, loss=None, grad_norm=None, gradients=()) for one in (ours, theirs))
        for name, log_probs in lone.planted(dump.dump_id).items():
            fault, _, size = name.partition("/")
            found = measure(dump.dump_id, None, replace(ours, log_probs=log_probs), theirs)
            judged[fault][float(size)].append(judge(found, dump.limits or limits, floors[dump.dump_id])[0])

    def red(found: list[DumpComparison]) -> bool:
        bias = rounding.bias(found) if rounding else None
        return any(dump.verdict == MISMATCH for dump in found) or (bias is not None and abs(bias.z) > MOST_Z)

    return {
        fault: min(takewhile(lambda size: red(by_size[size]), sorted(by_size, reverse=True)), default=None)  # noqa: B023
        for fault, by_size in judged.items()
    }
