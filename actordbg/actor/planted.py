"""Faults of known sizes, planted in the truth's model for one forward: which of them would a comparison notice?

| fault | what is changed | size |
|---|---|---|
| matrix | one weight matrix in the middle of the model, times 1 + e, rounded to its dtype again | e |
| attention | the scale of every layer's attention scores, times 1 + e | e |
| position | the positions of the second half of each row are further on | tokens |

The log-probs of each are kept beside the input's own, as `planted/<fault>/<size>`; `judge.measured_limits` judges them.

Example:
    with planted(model, "matrix", 0.01):
        ...forward...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

PREFIX = "planted/"
_WIDE = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
_NARROW = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1)
_TOKENS = (1.0, 4.0, 16.0, 64.0)


def sizes_of(model: Any, dtype: torch.dtype) -> dict[str, tuple[float, ...]]:
    """The sizes to try, by fault: only faults that this model can have."""
    shares = _WIDE if dtype in (torch.bfloat16, torch.float16) else _NARROW
    found = {"matrix": shares, "position": _TOKENS}
    return found | ({"attention": shares} if _scaled(model) else {})


@contextlib.contextmanager
def planted(model: Any, fault: str, size: float) -> Iterator[None]:
    """Inside the block the model has this fault."""
    with {"matrix": _matrix, "attention": _attention, "position": _position}[fault](model, size):
        yield


@contextlib.contextmanager
def _matrix(model: Any, size: float) -> Iterator[None]:
    of_layers = [one for name, one in model.named_parameters() if any(part.isdigit() for part in name.split("."))]
    matrices = [one for one in of_layers if one.dim() == 2]
    weight = matrices[len(matrices) // 2]
    right = weight.data
    weight.data = (right.double() * (1 + size)).to(right.dtype)
    try:
        yield
    finally:
        weight.data = right


@contextlib.contextmanager
def _attention(model: Any, size: float) -> Iterator[None]:
    scaled = [(one, one.scaling) for one in _scaled(model)]
    for one, scaling in scaled:
        one.scaling = scaling * (1 + size)
    try:
        yield
    finally:
        for one, scaling in scaled:
            one.scaling = scaling


@contextlib.contextmanager
def _position(model: Any, size: float) -> Iterator[None]:
    last = getattr(model.config, "max_position_embeddings", None) or 2**31

    def shift(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs["position_ids"]
        further = torch.arange(positions.shape[-1], device=positions.device) >= positions.shape[-1] // 2
        return args, kwargs | {"position_ids": (positions + int(size) * further).clamp(max=last - 1)}

    hook = model.register_forward_pre_hook(shift, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _scaled(model: Any) -> list[Any]:
    return [one for one in model.modules() if isinstance(getattr(one, "scaling", None), float)]
