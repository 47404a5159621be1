"""Is the gradient of the whole the sum of the gradients of its parts? Asked of the backend's own backward, after its reduction.

The loss is a sum of terms, one for each token. It is taken over one half of them (every other row, or of a single row every
other token), then over the other half, divided by the same count. Shapes are the whole's, so only the upstream gradient differs,
and the two gradients add up to the whole's for each parameter. Samples are enough (`actordbg.actor.gradient_samples`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from actordbg.actor.gradient_samples import PREFIX
from actordbg.formats.law_answer import BROKEN, KEPT, WITHIN_ROUNDING, LawAnswer
from actordbg.laws.judging import not_checked

LIMITS = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
"""How far, relative to its parts, a parameter's gradient may be from their sum. Healthy ones are an order of magnitude nearer."""
_SMALL = 0.05
"""A parameter's distance is relative to its own gradient, or to this share of the largest one where its own is smaller."""


def halves(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Float weights [B, S-1] of the two halves of the loss, each divided by the count of the whole. `terms`: bool."""
    rows = terms.any(1).nonzero().flatten()
    whole = terms.double() / terms.sum().clamp(min=1)
    if len(rows) > 1:
        first = torch.zeros(terms.shape[0], 1, dtype=torch.bool)
        first[rows[::2]] = True
    else:
        first = terms.cumsum(1) % 2 == 1
    return whole * first, whole * ~first


def judge_additivity(dtype: str, whole: dict[str, Tensor], one: dict[str, Tensor], other: dict[str, Tensor]) -> LawAnswer:
    """The answer of `additivity`, of samples by parameter."""
    if not whole:
        return not_checked("additivity", "this rank keeps no gradients")
    if not all(bool(tensor.isfinite().all()) for part in (whole, one, other) for tensor in part.values()):
        return not_checked("additivity", "a gradient is not finite")
    floor = _SMALL * max(float(tensor.norm()) for tensor in whole.values())
    if floor == 0:
        return not_checked("additivity", "the gradient is 0")
    apart = {name: _distance(tensor, one.get(name), other.get(name), floor) for name, tensor in whole.items()}
    limit = LIMITS.get(dtype, LIMITS["bf16"])
    worst = max(apart, key=lambda name: apart[name])
    bad = [name for name, size in apart.items() if size > limit]
    if not bad:
        verdict = WITHIN_ROUNDING if apart[worst] else KEPT
        return LawAnswer("additivity", verdict, "", apart[worst], limit, count=0, looked_at=len(apart))
    words = f"the gradient of {worst.removeprefix(PREFIX)} is not the sum of those of its rows"
    return LawAnswer("additivity", BROKEN, words, apart[worst], limit, count=len(bad), looked_at=len(apart))


def _distance(whole: Tensor, one: Tensor | None, other: Tensor | None, floor: float) -> float:
    parts = [torch.zeros_like(whole) if part is None else part for part in (one, other)]
    scale = max(floor, *(float(tensor.norm()) for tensor in (whole, *parts)))
    return float((parts[0].double() + parts[1].double() - whole.double()).norm()) / scale
