"""How far two arrays are apart, as `comparison_record.Figures`: pure, in float64 whatever their own dtype is.

Equal values differ by 0, also where both are infinite or both NaN. A value that is finite on one side only is counted in
`nonfinite`; then no mean is taken, because a mean without the worst values would mislead.

Percentiles interpolate linearly between the two closest ranks (type 7, numpy's default).

**Units in the last place** (`ulp_distances`) count the representable values between two numbers. Kept log-probs are float32
whatever computed them, so both values are first rounded to the dtype that computed; 0 then means that this dtype cannot tell
them apart. fp64 results were kept as float32 and are counted in float32. The count is right across signs (-0 and +0 are one
value), among denormals and up to infinity. Near zero it grows without bound: -1e-8 and -2e-8 are 8 million float32 values
apart, and nobody cares. So no default threshold is set on it.

numpy alone: importing torch takes longer than a comparison, and a plain installation has none. `tests/support/torch_figures.py`
computes the same with torch, and a test holds both together.

Example::

    found = figures(a[mask], b[mask], log_probs=True, dtype="bf16")
    found.max_abs, found.clip_share
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from actordbg.formats.encoding import Array
from actordbg.records.comparison_record import Figures, WorstToken

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""PPO's usual clip band of the ratio exp(a - b)."""


@np.errstate(all="ignore")
def figures(a: Array, b: Array, *, log_probs: bool = False, dtype: str | None = None) -> Figures:
    """The figures of values `a` against `b`, both 1-D and of one length, of any float dtype.

    `log_probs`: KL and clip_share too. `dtype`: what both were computed in (bf16, fp16, fp32, fp64), for max_ulp; None: not.
    """
    ours, theirs = a.astype(np.float64), b.astype(np.float64)
    same = _same(ours, theirs)
    if not ours.size:
        return Figures(0)
    odd = ~same & ~(np.isfinite(ours) & np.isfinite(theirs))
    nonfinite = int(odd.sum())
    difference = np.where(same, 0.0, ours - theirs)
    band = (difference < math.log(CLIP_LOW)) | (difference > math.log(CLIP_HIGH)) | odd  # finite on one side only is outside
    outside = float(band.mean()) if log_probs else None
    if nonfinite:
        return Figures(ours.size, clip_share=outside, nonfinite=nonfinite)
    distances = np.abs(difference)
    both = np.isfinite(ours)
    relative = (distances / np.abs(theirs))[(theirs != 0) & both]
    return Figures(
        count=ours.size,
        **spread_of("abs", distances),
        **spread_of("rel", relative),
        cosine=cosine(ours[both], theirs[both]),
        kl_k1=float(np.where(same, 0.0, theirs - ours).mean()) if log_probs else None,
        kl_k3=_finite(float((np.expm1(difference) - difference).mean())) if log_probs else None,
        clip_share=outside,
        max_ulp=int(ulp_distances(ours[~same], theirs[~same], dtype).max(initial=0)) if dtype in COUNTED else None,
        distance=relative_distance(_norm(difference), _norm(theirs[both])),
        rms_abs=_finite(_norm(difference) / math.sqrt(ours.size)) if log_probs else None,
    )


def finite_on_one_side(a: Array, b: Array) -> int:
    """How many values are finite on one side only, or differ without being finite: `Figures.nonfinite`."""
    finite = np.isfinite(a) & np.isfinite(b)
    return 0 if finite.all() else int((~finite & ~_same(a, b)).sum())


def spread_of(kind: str, values: Array) -> dict[str, Any]:
    """The four figures of Figures that end in `kind` ("abs" or "rel"): of differences, 1-D. None of nothing."""
    if not values.size:
        return {}
    p95, p99 = upper_percentiles(values)
    largest, mean = _finite(float(values.max())), _finite(float(values.mean(dtype=np.float64)))
    return {f"max_{kind}": largest, f"mean_{kind}": mean, f"p95_{kind}": p95, f"p99_{kind}": p99}


def upper_percentiles(values: Array) -> tuple[float | None, float | None]:
    """The 95th and 99th percentile of a 1-D float array; None if empty. Sorts only the upper twentieth of the values."""
    count = values.size
    if not count:
        return None, None
    positions = [(count - 1) * percent / 100 for percent in (95, 99)]
    first = math.floor(positions[0])
    top = np.sort(np.partition(values, first)[first:])
    found = []
    for position in positions:
        low = math.floor(position)
        lower, upper = float(top[low - first]), float(top[min(low + 1 - first, top.size - 1)])
        found.append(_finite(lower + (upper - lower) * (position - low)))
    return found[0], found[1]


def cosine(a: Array, b: Array) -> float | None:
    """The cosine of two vectors (float64); 1 for equal ones, None where only one is zero, or a norm overflows."""
    if np.array_equal(a, b):
        return 1.0
    product = _norm(a) * _norm(b)
    return max(-1.0, min(1.0, float(a @ b) / product)) if product and math.isfinite(product) else None


def relative_distance(difference: float, norm: float) -> float | None:
    """|a - b| / |b|; 0 where they are equal, None where b is zero and a is not."""
    if difference == 0:
        return 0.0
    return _finite(difference / norm) if norm else None


def sequence_sums(values: Array, mask: Array) -> Array:
    """The sum of each row's masked values, float64 [rows that have any]: a sequence's log-prob. Both [B, A]."""
    sums: Array = np.where(mask, values.astype(np.float64), 0.0).sum(axis=1)[mask.any(axis=1)]
    return sums


@np.errstate(all="ignore")
def worst_tokens(a: Array, b: Array, mask: Array, count: int) -> tuple[WorstToken, ...]:
    """The `count` masked tokens of [B, A] that differ most, the worst first. Equal tokens are left out.

    A value that is finite on one side only is worst.
    """
    ours, theirs = a.astype(np.float64), b.astype(np.float64)
    distance = np.nan_to_num(np.abs(ours - theirs), nan=math.inf, posinf=math.inf)
    distance = np.where(_same(ours, theirs) | ~mask, -1.0, distance).ravel()
    if not distance.size:
        return ()
    least = np.partition(distance, -min(count, distance.size))[-min(count, distance.size)]
    some = np.flatnonzero((distance >= least) & (distance > 0))
    some = some[np.argsort(-distance[some], kind="stable")][:count]  # of equally bad ones the first
    worst = []
    for place in some:
        row, position = divmod(int(place), mask.shape[1])
        here, there = float(ours[row, position]), float(theirs[row, position])
        worst.append(WorstToken(row, position, _finite(here), _finite(there), _finite(here - there)))
    return tuple(worst)


def _same(a: Array, b: Array) -> Array:
    """Where two values are equal, or both NaN."""
    same: Array = (a == b) | (np.isnan(a) & np.isnan(b))
    return same


def _norm(values: Array) -> float:
    return math.sqrt(float(values @ values))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


COUNTED = ("bf16", "fp16", "fp32", "fp64")
"""The dtypes, by their short names, whose units in the last place are counted."""


@np.errstate(over="ignore")
def ulp_distances(a: Array, b: Array, dtype: str) -> Array:
    """int64 distances, element by element, of two arrays without NaNs. `dtype`: bf16, fp16, fp32 or fp64."""
    apart: Array = np.abs(_place(a, dtype) - _place(b, dtype))
    return apart


def _place(values: Array, dtype: str) -> Array:
    """Each value's place among the representable ones, 0 at zero: sign and magnitude bits as one ordered integer."""
    if dtype == "fp16":
        bits, sign = values.astype(np.float32).astype(np.float16).view(np.uint16).astype(np.int64), 2**15
    elif dtype == "bf16":
        wide = values.astype(np.float32).view(np.uint32).astype(np.int64)
        bits, sign = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16, 2**15  # to the nearest, ties to the even one
    else:
        bits, sign = values.astype(np.float32).view(np.uint32).astype(np.int64), 2**31
    magnitude = bits & (sign - 1)
    return np.where(bits & sign != 0, -magnitude, magnitude)
