"""Set limits from measured rounding: how far a dtype moves *this* input through *this* model.

A flat limit has to let the worst model pass, so it lets faults pass in every other model. So each dump is computed twice,
with each row alone and the same weights: in the truth's dtype and in the dtype under test. The distance between the two is the
effect of rounding. The configuration may be `FACTORS` times as far from the truth, dump by dump and parameter by parameter, and
never needs to be nearer than the flat limits of the truth's dtype: fp32's for bf16 and fp16, fp64's for fp32.

| measure | limit |
|---|---|
| mean_abs, gradient_distance | 1.5 times the effect of rounding |
| p99_abs | 2 times |
| max_abs, entropy_max_abs | 3 times |
| parameter_distance | 3 times that of the same parameter, or of the median parameter; below SUMMED 6 times; see below |
| grad_norm_rel | the limit of gradient_distance: a norm moves by no more than its vector |
| loss_abs | the limit of mean_abs: a mean moves by no more than its terms |
| clip_share | flat, or 3 times |

**Vanishing gradients.** Where a query sees one key, the gradients of queries and keys are 0 in exact arithmetic, and what is left
is rounding of larger values. So each parameter may be off by what rounding moves so many elements of the whole gradient by.

A figure over few tokens is noisy. So the effect of rounding on a dump is mixed with its effect on all dumps, as if each dump
had `FEW` more average tokens, and a mean over `n` tokens is raised by the factor 1 + 1 / sqrt(n) + 8 / n. If all dumps together
have few tokens, limits are raised toward the flat limits: by the fraction (FEW / (FEW + tokens)) squared of the distance.

**Experts.** Rounding may route a token to another expert in one of the two computations. That moves the token, and parameters of
the expert, by any amount. So for a model with experts each limit is doubled, and the limits of `BY_TOKEN` are at least twice the
flat ones. The limit of a parameter is at least `LOST`, unless twice its flat limit is lower: a lost gradient has distance 1. A
tensor that holds all experts is judged from `SOME` tokens on; parameters of a single expert only as part of the whole gradient.

**Bias.** Rounding goes both ways. A wrong epsilon, temperature or bias goes one way, by too little at each token to be detected.
So the mean of the signed differences over all dumps is also judged, in units of its standard error: `z`, at most `MOST_Z`.
A bias within the mean's flat limit in the truth's dtype is not judged.

**What a green verdict excludes** (`excluded`): the smallest faults that would have made it red, on the same inputs and under the
same limits. Four follow from the limits and A's measured distance, without another forward. Each is a worst case over tokens,
dumps, parameters and signs.

| fault | size | would have exceeded |
|---|---|---|
| token | nats, of any one log-prob | max_abs |
| tokens | nats, all log-probs shifted by the same amount | mean_abs, or the bias over all dumps |
| gradients | relative, all gradients times 1 + e | gradient_distance or grad_norm_rel |
| parameter | relative, the gradient of any one parameter | parameter_distance |

Other faults depend on the model, so they are planted in it (`actordbg.actor.truth_model`), with each row alone in A's dtype, and
judged like A (`noticed`). The reported size is the smallest tried size such that it and all larger ones are red. Gradients are
not computed for these, so a smaller fault might be detected by its gradient. A size of `None`: no tried size is detected.

Example:
    rounding = Rounding("r-02", {dump_id: measure(dump_id, None, lone_rows_in_bf16, truth)}, "bf16", "fp32")
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

from actordbg.compare.dump_figures import measure
from actordbg.compare.sides import PLANTED, ReplaySide, Side
from actordbg.compare.thresholds import DEFAULTS, Applied, Floors, judge, measures
from actordbg.records.comparison_record import GOOD, MISMATCH, DumpComparison

FACTORS = {"mean_abs": 1.5, "p99_abs": 2.0, "max_abs": 3.0, "entropy_max_abs": 3.0, "gradient_distance": 1.5}
PARAMETER = CLIPPED = 3.0
SUMMED = 1e-3
"""A distance that the order of summation alone explains, in recurrences more than in attention."""
BY_TOKEN = ("p99_abs", "max_abs", "entropy_max_abs", "clip_share", "parameter_distance")
FEW, SOME = 64, 16
LOST = 0.9
MOST_Z = 5.0
LEAST_TOKENS = 30
"""With fewer tokens the bias is not judged."""
_ONE_EXPERT = re.compile(r"\.experts\.\d")
FOLLOWS = {"grad_norm_rel": "gradient_distance", "loss_abs": "mean_abs"}
"""Measures that are bounded by another measure and share its limit."""

Sizes = dict[str, float | None]


@dataclass(frozen=True)
class Rounding:
    """The effect of a dtype's rounding on each dump.

    replay_id: the replay with each row alone in that dtype. dumps: its comparisons with the truth, by dump id. dtype, truth:
    the dtypes of the two. experts: the model has experts.
    """

    replay_id: str
    dumps: dict[str, DumpComparison]
    dtype: str
    truth: str
    experts: bool = False

    def limited(self, applied: Applied, dump: DumpComparison) -> DumpComparison:
        """Return the dump with measured limits, and the worst parameter under them. Thresholds that the user set stay."""
        limits, here, least = dict(applied.limits), self.dumps[dump.dump_id], DEFAULTS[self.truth]
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
        """Measure how far A is off in one direction over these dumps; None for too few tokens."""
        ours = _pooled(dump for dump in dumps if dump.dump_id in self.dumps)
        theirs = _pooled(self.dumps.values())
        if ours is None or theirs is None:
            return None
        return Bias(ours[0], theirs[0], math.sqrt(ours[1] + theirs[1]), DEFAULTS[self.truth]["mean_abs"])

    def _of_parameters(self, ours: DumpComparison, here: DumpComparison, flat: Mapping[str, float]) -> dict[str, float]:
        """Return the limit of each parameter that is judged individually."""
        if not here.distances:
            return {}
        usual, alone = median(here.distances.values()), list(ours.distances)
        factor, least = PARAMETER, DEFAULTS[self.truth]["parameter_distance"]
        if self.experts:
            factor, least = 2 * PARAMETER, min(LOST, 2 * flat.get("parameter_distance", LOST))
            some = _tokens(ours) >= SOME
            alone = [name for name in alone if ".experts." not in name or (some and not _ONE_EXPERT.search(name))]
        measured = {name: factor * max(here.distances.get(name, 0.0), usual) for name in alone}
        of_whole = here.gradients.distance or 0.0 if here.gradients else 0.0
        whole = {name: min(LOST, of_whole / ours.scales.get(name, 1.0)) for name in alone}
        return {name: max(limit, min(2 * limit, SUMMED), whole[name], least) for name, limit in measured.items()}

    def _rounded(self, here: DumpComparison) -> dict[str, float]:
        """Return by measure the effect of rounding on this dump, mixed with that on all dumps (see the module's docstring)."""
        count, own, usual = _tokens(here), measures(here), self._together
        share = count / (count + FEW)
        effects = {name: max(own[name], (1 - share) * usual[name]) for name in FACTORS if name in own}
        if "mean_abs" in own:
            mixed = share * own["mean_abs"] + (1 - share) * usual["mean_abs"]
            effects["mean_abs"] = mixed * (1 + 1 / math.sqrt(count) + 8 / count)
        if "gradient_distance" in own:
            effects["gradient_distance"] = max(own["gradient_distance"], usual["gradient_distance"])
        return effects

    @cached_property
    def _tokens(self) -> int:
        return sum(map(_tokens, self.dumps.values()))

    @cached_property
    def _together(self) -> dict[str, float]:
        """By measure over all dumps: the token-weighted mean of mean_abs, the maximum of max_abs, the median of the others."""
        each = [(measures(dump), _tokens(dump)) for dump in self.dumps.values()]
        by_name = {name: [values[name] for values, _ in each if name in values] for name in FACTORS}
        figures = {name: median(values) for name, values in by_name.items() if values}
        figures["mean_abs"] = sum(values.get("mean_abs", 0.0) * count for values, count in each) / self._tokens
        figures["max_abs"] = max(by_name["max_abs"], default=0.0)
        return figures


@dataclass(frozen=True)
class Bias:
    """Mean signed differences from the truth, in nats: A's, rounding's, and the standard error of their difference.

    least: a difference of the means that is never judged.
    """

    ours: float
    rounding: float
    error: float
    least: float

    @property
    def z(self) -> float:
        """The difference of the two means, in standard errors."""
        return (self.ours - self.rounding) / self.error if self.error else 0.0

    @property
    def seen(self) -> float:
        """The smallest shift of every log-prob, in either direction, that would have been a mismatch."""
        return max(MOST_Z * self.error, self.least) + abs(self.ours - self.rounding)

    @property
    def excessive(self) -> bool:
        """True if the bias is more than rounding explains."""
        return abs(self.z) > MOST_Z and abs(self.ours - self.rounding) > self.least


def _tokens(dump: DumpComparison) -> int:
    return dump.log_probs.count if dump.log_probs else 0


def _pooled(dumps: Iterable[DumpComparison]) -> tuple[float, float] | None:
    """Return the mean of the signed differences over all tokens of all dumps, and its squared standard error."""
    parts = [dump.log_probs for dump in dumps if dump.log_probs is not None]
    known = [(part.count, part.kl_k1, part.rms_abs) for part in parts if part.kl_k1 is not None and part.rms_abs is not None]
    tokens = sum(count for count, _, _ in known)
    if tokens < LEAST_TOKENS:
        return None
    counts, k1, rms = np.array(known).T
    mean = -float(counts @ k1) / tokens
    return mean, max(float(counts @ rms**2) / tokens - mean**2, 0.0) / tokens


def excluded(dumps: Sequence[DumpComparison], limits: Mapping[str, float], bias: Bias | None, floors: Floors) -> Sizes:
    """Return the smallest detectable size of each fault over the good dumps. limits: for dumps without measured limits.

    floors: noise that excuses values above a limit, so it hides faults of that size.
    """
    good = [dump for dump in dumps if dump.verdict in GOOD]
    if not good:
        return {}

    def pairs(name: str) -> Iterator[tuple[float, float]]:
        """Yield the limit and the value of a measure, for each dump that has both."""
        for dump in good:
            limit, value = (dump.limits or limits).get(name), measures(dump).get(name)
            if limit is not None and value is not None:
                yield max(limit, floors[dump.dump_id].get(name, 0.0)), value

    tokens = [limit + value for limit, value in pairs("max_abs")]
    shifts = [limit + value for limit, value in pairs("mean_abs")] + ([bias.seen] if bias else [])
    sizes: Sizes = {"token": max(tokens) if len(tokens) == len(good) else None, "tokens": min(shifts, default=None)}
    if any({"grad_norm_rel", "gradient_distance"} & measures(dump).keys() for dump in good):
        scales = [*pairs("grad_norm_rel"), *pairs("gradient_distance")]
        sizes["gradients"] = min(((limit + value) / (1 - value) for limit, value in scales if value < 1), default=None)
        known = [
            max(dump.parameter_seen, floors[dump.dump_id].get("parameter_distance", 0.0) + (dump.parameter_distance or 0.0))
            for dump in good if dump.parameter_seen is not None
        ]  # fmt: skip
        sizes["parameter"] = max(known) if len(known) == len(good) else None
    return sizes


def noticed(
    lone: ReplaySide,
    truth: Side,
    dumps: Sequence[DumpComparison],
    limits: Mapping[str, float],
    rounding: Rounding | None,
    floors: Floors,
) -> Sizes:
    """Return for each fault planted in `lone` the smallest size such that it and all larger sizes are red for these dumps."""
    judged: dict[str, dict[float, list[DumpComparison]]] = defaultdict(lambda: defaultdict(list))
    for dump in (dump for dump in dumps if dump.verdict in GOOD):
        ours, theirs = lone.read(dump.dump_id), truth.read(dump.dump_id)
        if isinstance(ours, str) or isinstance(theirs, str):
            continue
        ours, theirs = (replace(values, entropy=None, loss=None, grad_norm=None, gradients=()) for values in (ours, theirs))
        for name, log_probs in lone.arrays(dump.dump_id, PLANTED).items():
            fault, _, size = name.partition("/")
            planted = measure(dump.dump_id, None, replace(ours, log_probs=log_probs), theirs)
            judged[fault][float(size)].append(judge(planted, dump.limits or limits, floors[dump.dump_id])[0])

    def red(compared: list[DumpComparison]) -> bool:
        bias = rounding.bias(compared) if rounding else None
        return any(dump.verdict == MISMATCH for dump in compared) or (bias is not None and bias.excessive)

    return {
        fault: min(takewhile(lambda size: red(by_size[size]), sorted(by_size, reverse=True)), default=None)  # noqa: B023
        for fault, by_size in judged.items()
    }
