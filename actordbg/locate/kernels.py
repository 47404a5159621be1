"""Find an attention kernel that computes something else than the model's formula.

The clean model runs in the suspect's attention kernel, so what that kernel leaves out (sdpa has no soft cap of the attention
logits) is missing in both. Where the clean model's attention is off by much more than rounding, transformers' eager attention is
the healthy one, and the kernel has to come as near to the truth.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from actordbg.base.units import plural
from actordbg.locate.judgement import is_attention
from actordbg.locate.places import Key, Sums

_FAR = 8.0
"""Relative errors above this many roundings of the dtype are worth a run of eager attention. Healthy kernels: 0.2 to 2."""
_OTHER = {torch.bfloat16: 1.5, torch.float16: 1.5, torch.float32: 8.0}
"""Kernels whose errors differ by more than this factor compute different things. Healthy ones: 1.15 in bf16."""


def far_off(clean: dict[Key, Sums], dtype: torch.dtype) -> list[Key]:
    """Return the places behind attention where the clean model is further from the truth than rounding explains."""
    return [
        key for key, sums in clean.items()
        if is_attention(key) and _rms(sums) > _FAR * torch.finfo(dtype).eps * math.sqrt(sums.truths)
    ]  # fmt: skip


def hold_against_eager(clean: dict[Key, Sums], eager: dict[Key, Sums], far: list[Key], dtype: torch.dtype) -> float:
    """Replace the clean model's errors by those of its eager attention at the places `far` where its kernel is worse.

    Return the largest ratio of the two, 0 if no place was replaced.
    """
    largest = 0.0
    for key in far:
        ratio = _rms(clean[key]) / _rms(eager[key]) if key in eager and _rms(eager[key]) else 0.0
        if ratio > _OTHER[dtype]:
            clean[key], largest = eager[key], max(largest, ratio)
    return largest


def in_words(attn: str, config: Any, ratio: float, count: int) -> str:
    """Say what a kernel does that is further from the truth than eager attention, and what it leaves out if that is known."""
    cap = getattr(config, "attn_logit_softcapping", None)
    why = (
        f": {attn} ignores the soft cap of the attention logits (attn_logit_softcapping {cap:g})"
        if cap and attn == "sdpa"
        else ""
    )
    return f"{attn} attention is {ratio:,.3g} times as far from the truth as eager attention in {plural(count, 'layer')}{why}"


def _rms(sums: Sums) -> float:
    return math.sqrt(float(sums.errors.sum()))
