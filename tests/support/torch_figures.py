"""The figures of `actordbg.judge.tensor_figures` computed with torch, as they were until the desk could do without it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from actordbg.records.comparison_record import Figures, WorstToken

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""PPO's usual clip band of the ratio exp(a - b)."""


def figures(a: Tensor, b: Tensor, *, log_probs: bool = False, dtype: str | None = None) -> Figures:
    """The figures of values `a` against `b`, both 1-D and of one length, of any float dtype.

    `log_probs`: KL and clip_share too. `dtype`: what both were computed in (bf16, fp16, fp32, fp64), for max_ulp; None: not.
    """
    ours, theirs = a.double(), b.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if not ours.numel():
        return Figures(0)
    odd = ~same & ~(ours.isfinite() & theirs.isfinite())
    nonfinite = int(odd.sum())
    difference = (ours - theirs).masked_fill(same, 0.0)
    outside = _clip_share(difference, odd) if log_probs else None
    if nonfinite:
        return Figures(ours.numel(), clip_share=outside, nonfinite=nonfinite)
    distances = difference.abs()
    both = ours.isfinite()
    relative = (distances / theirs.abs())[(theirs != 0) & both]
    norm = float(theirs[both].norm())
    return Figures(
        count=ours.numel(),
        **spread_of("abs", distances),
        **spread_of("rel", relative),
        cosine=cosine(ours[both], theirs[both]),
        kl_k1=float((theirs - ours).masked_fill(same, 0.0).mean()) if log_probs else None,
        kl_k3=_finite(float((torch.expm1(difference) - difference).mean())) if log_probs else None,
        clip_share=outside,
        max_ulp=_max_ulp(ours, theirs, same, dtype),
        distance=relative_distance(float(difference.norm()), norm),
        rms_abs=_finite(float(difference.norm()) / math.sqrt(ours.numel())) if log_probs else None,
    )


def spread_of(kind: str, values: Tensor) -> dict[str, Any]:
    """The four figures of Figures that end in `kind` ("abs" or "rel"): of differences, 1-D. None of nothing."""
    if not values.numel():
        return {}
    p95, p99 = upper_percentiles(values)
    largest, mean = _finite(float(values.max())), _finite(float(values.double().mean()))
    return {f"max_{kind}": largest, f"mean_{kind}": mean, f"p95_{kind}": p95, f"p99_{kind}": p99}


def upper_percentiles(values: Tensor) -> tuple[float | None, float | None]:
    """The 95th and 99th percentile of a 1-D float tensor of any length (torch.quantile stops at 16 million); None if empty.

    Sorts only the upper twentieth of the values.
    """
    count = values.numel()
    if not count:
        return None, None
    positions = [(count - 1) * percent / 100 for percent in (95, 99)]
    top = values.topk(count - math.floor(positions[0])).values
    found = []
    for position in positions:
        low = math.floor(position)
        lower, upper = float(top[count - 1 - low]), float(top[max(count - 2 - low, 0)])
        found.append(_finite(lower + (upper - lower) * (position - low)))
    return found[0], found[1]


def cosine(a: Tensor, b: Tensor) -> float | None:
    """The cosine of two vectors (float64); 1 for equal ones, None where only one is zero, or a norm overflows."""
    if torch.equal(a, b):
        return 1.0
    product = float(a.norm()) * float(b.norm())
    return max(-1.0, min(1.0, float(a @ b) / product)) if product and math.isfinite(product) else None


def relative_distance(difference: float, norm: float) -> float | None:
    """|a - b| / |b|; 0 where they are equal, None where b is zero and a is not."""
    if difference == 0:
        return 0.0
    return _finite(difference / norm) if norm else None


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of each row's masked values, float64 [rows that have any]: a sequence's log-prob. Both [B, A]."""
    chosen = values.double().masked_fill(~mask, 0.0)
    return chosen.sum(dim=1)[mask.any(dim=1)]


def worst_tokens(a: Tensor, b: Tensor, mask: Tensor, count: int) -> tuple[WorstToken, ...]:
    """The `count` masked tokens of [B, A] that differ most, the worst first. Equal tokens are left out.

    A value that is finite on one side only is worst.
    """
    ours, theirs = a.double(), b.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = (ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    distance = distance.masked_fill(same | ~mask, -1.0).flatten()
    top = distance.topk(min(count, distance.numel()))
    columns = mask.shape[1]
    return tuple(
        _token(ours, theirs, *divmod(place, columns))
        for place, size in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        if size > 0
    )


def _token(a: Tensor, b: Tensor, row: int, position: int) -> WorstToken:
    ours, theirs = float(a[row, position]), float(b[row, position])
    return WorstToken(row, position, _finite(ours), _finite(theirs), _finite(ours - theirs))


def _clip_share(difference: Tensor, odd: Tensor) -> float:
    """The share of tokens whose ratio is outside the band. A value that is finite on one side only counts as outside."""
    outside = (difference < math.log(CLIP_LOW)) | (difference > math.log(CLIP_HIGH)) | odd
    return float(outside.double().mean())


def _max_ulp(a: Tensor, b: Tensor, same: Tensor, dtype: str | None) -> int | None:
    if dtype not in _COUNTED:
        return None
    return int(ulp_distances(a[~same], b[~same], dtype).max()) if not bool(same.all()) else 0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_COUNTED: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
    "fp64": (torch.float32, torch.int32),
}
"""By the short name of a dtype: what values are rounded to, and the integers of the same width."""


def ulp_distances(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """int64 distances, element by element, of two tensors without NaNs. `dtype`: bf16, fp16, fp32 or fp64."""
    return (_place(a, dtype) - _place(b, dtype)).abs()


def _place(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Each value's place among the representable ones, 0 at zero: sign and magnitude bits as one ordered integer."""
    rounded, integers = _COUNTED[dtype]
    bits = values.to(rounded).contiguous().view(integers).to(torch.int64)
    magnitude = bits & torch.iinfo(integers).max
    return torch.where(bits < 0, -magnitude, magnitude)
