"""Distances in units of last place: how many representable values lie between two numbers.

Kept log-probs and gradients are float32, whatever computed them, and OpenRLHF's log-probs are float32 sums over logits of the
model's dtype: in float32's units a bf16 model would always be tens of thousands apart. So both values are first rounded to the
dtype that computed (bf16, fp16), and its representable values are counted: 0 means that this dtype cannot tell them apart.
fp64 results were rounded to float32 when they were kept, so they are counted in float32.

The count is right across signs (-0 and +0 are one value, the smallest positive one is 1 from it), among denormals and up to
infinity. It grows without bound where values are near zero: the log-prob of a sure token, -1e-8 against -2e-8, is
8 million float32 values away, and nobody cares. So no default threshold is set on it.
"""

from __future__ import annotations

import torch

_COUNTED: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
    "fp64": (torch.float32, torch.int32),
}
"""By OpenRLHF's name of a dtype: what values are rounded to, and the integers of the same width."""


def ulp_distances(a: torch.Tensor, b: torch.Tensor, dtype: str) -> torch.Tensor:
    """int64 distances, element by element, of two tensors without NaNs. `dtype`: bf16, fp16, fp32 or fp64."""
    return (_place(a, dtype) - _place(b, dtype)).abs()


def is_counted(dtype: str | None) -> bool:
    """Whether distances are defined for this dtype."""
    return dtype in _COUNTED


def _place(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Each value's place among the representable ones, 0 at zero: sign and magnitude bits as one ordered integer."""
    rounded, integers = _COUNTED[dtype]
    bits = values.to(rounded).contiguous().view(integers).to(torch.int64)
    magnitude = bits & torch.iinfo(integers).max
    return torch.where(bits < 0, -magnitude, magnitude)
