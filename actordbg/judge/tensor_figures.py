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
from dataclasses import replace
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
    if not a.size:
        return Figures(0)
    ours, theirs, odd = a.astype(np.float64), b.astype(np.float64), odd_values(a, b)
    both = np.isfinite(ours) & np.isfinite(theirs)
    difference = np.where(both | odd, ours - theirs, 0.0)
    band = (difference < math.log(CLIP_LOW)) | (difference > math.log(CLIP_HIGH)) | odd  # finite on one side only is outside
    outside = float(band.mean()) if log_probs else None
    if odd.any():
        return Figures(a.size, clip_share=outside, nonfinite=int(odd.sum()))
    distances, ours, theirs = np.abs(difference), ours[both], theirs[both]
    known = theirs != 0
    found = Figures(
        count=a.size,
        **spread_of("abs", distances),
        **spread_of("rel", distances[both][known] / np.abs(theirs[known])),
        **angle_of(products(ours, theirs)),
        max_ulp=int(ulp_distances(ours, theirs, dtype).max(initial=0)) if dtype in COUNTED else None,
    )
    if not log_probs:
        return found
    return replace(
        found,
        kl_k1=float(0.0 - difference.mean()),  # never -0.0
        kl_k3=_finite((np.expm1(difference) - difference).mean()),
        clip_share=outside,
        rms_abs=_finite(np.sqrt(np.mean(difference**2))),
    )


def odd_values(a: Array, b: Array) -> Array:
    """Bool, where two values are finite on one side only, or differ without being finite: `Figures.nonfinite` counts them."""
    odd: Array = ~(np.isfinite(a) & np.isfinite(b)) & ~_same(a, b)
    return odd


@np.errstate(all="ignore")
def spread_of(suffix: str, values: Array) -> dict[str, Any]:
    """The four figures of Figures that end in `suffix` ("abs" or "rel"): of differences, 1-D. None of nothing."""
    if not values.size:
        return {}
    p95, p99 = np.percentile(values, (95, 99))
    spread = {"max": values.max(), "mean": values.mean(dtype=np.float64), "p95": p95, "p99": p99}
    return {f"{name}_{suffix}": _finite(value) for name, value in spread.items()}


def products(a: Array, b: Array) -> Array:
    """The products a·a, b·b, a·b and |a - b|² of two vectors (float64), from which `angle_of` makes figures. Sums add up."""
    difference = a - b
    return np.array([a @ a, b @ b, a @ b, difference @ difference])


def angle_of(products: Array) -> dict[str, Any]:
    """The cosine of two vectors, and |a - b| / |b|: 1 and 0 for equal ones; None where a norm that divides is zero,
    or overflows.
    """
    ours, theirs, product, difference = products.tolist()
    if not difference:
        return {"cosine": 1.0, "distance": 0.0}
    norms = math.sqrt(ours) * math.sqrt(theirs)
    return {
        "cosine": max(-1.0, min(1.0, product / norms)) if 0 < norms < math.inf else None,
        "distance": _finite(math.sqrt(difference / theirs)) if theirs else None,
    }


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
    difference = ours - theirs
    distance = np.nan_to_num(np.abs(difference), nan=math.inf, posinf=math.inf)
    distance = np.where(_same(ours, theirs) | ~mask, -1.0, distance).ravel()
    count = min(count, distance.size)
    least = np.partition(distance, -count)[-count] if count else 0.0
    some = np.flatnonzero((distance >= least) & (distance > 0))
    some = some[np.argsort(-distance[some], kind="stable")][:count]  # of equally bad ones the first
    return tuple(
        WorstToken(at[0], at[1], _finite(ours[at]), _finite(theirs[at]), _finite(difference[at]))
        for at in (divmod(place, mask.shape[1]) for place in some.tolist())
    )


def _same(a: Array, b: Array) -> Array:
    """Where two values are equal, or both NaN."""
    same: Array = (a == b) | (np.isnan(a) & np.isnan(b))
    return same


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


COUNTED = ("bf16", "fp16", "fp32", "fp64")
"""The dtypes, by their short names, whose units in the last place are counted."""


@np.errstate(over="ignore")
def ulp_distances(a: Array, b: Array, dtype: str) -> Array:
    """int64 distances, element by element, of two arrays without NaNs. `dtype`: bf16, fp16, fp32 or fp64."""
    apart: Array = np.abs(_ordered(a, dtype) - _ordered(b, dtype))
    return apart


def _ordered(values: Array, dtype: str) -> Array:
    """The rank of each value among the representable ones, 0 at zero: sign and magnitude bits as one ordered integer."""
    single = values.astype(np.float32)
    bits = single.astype(np.float16).view(np.int16) if dtype == "fp16" else single.view(np.int32)
    ranks, least = bits.astype(np.int64), np.iinfo(bits.dtype).min
    if dtype == "bf16":
        ranks, least = (ranks + 0x7FFF + ((ranks >> 16) & 1)) >> 16, -(2**15)  # to the nearest, ties to the even one
    return np.where(ranks < 0, least - ranks, ranks)
