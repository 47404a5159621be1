"""Gradients worth keeping: a fixed sample of each parameter's full gradient, and the norm of all of it.

To say *which* parameter two configurations disagree on, a comparison needs gradients of single parameters. Kept whole they
would be as large as the model for every input. So of a parameter with more than `GRADIENT_SAMPLE` elements every n-th is kept,
at places that depend on its size alone: the same places in every backend, so the samples compare element by element.

Backends hand full gradients over one at a time (`GradientKeeper.take`): never is more than one parameter's gradient in memory
beside what the backend itself holds.

    store/replays/<id>/tensors/<dump>.safetensors
        grad/<name>                   float32, [min(numel, GRADIENT_SAMPLE)]
        metadata "gradients"          {"<name>": {"numel": 262144, "norm": 0.0171}}

Example:
    >>> keeper = GradientKeeper()
    >>> keeper.take("module.lm_head.weight", torch.ones(2, 3))
    >>> keeper.facts
    {'lm_head.weight': {'numel': 6, 'norm': 2.449489742783178}}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GRADIENT_SAMPLE = 65_536
"""Elements that are kept of one parameter's gradient."""
PREFIX = "grad/"
_PIECE = 2**24
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass
class GradientKeeper:
    """Collects one input's gradients. `records` False: takes part (collectives need every rank) and keeps nothing.

    tensors: by `grad/<name>`, float32, 1-D, on the CPU. facts: by name, `numel` of the whole gradient and its L2 `norm`.
    """

    records: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's full gradient, of any shape, dtype and device."""
        if self.records:
            plain = plain_name(name)
            self.tensors[PREFIX + plain] = sample(gradient).to("cpu", torch.float32, copy=True)
            self.facts[plain] = {"numel": gradient.numel(), "norm": norm_of(gradient)}


def sample(gradient: Tensor) -> Tensor:
    """The elements that are kept, in order: all of at most GRADIENT_SAMPLE, else those at floor(i * numel / GRADIENT_SAMPLE)."""
    flat = gradient.detach().reshape(-1)
    if flat.numel() <= GRADIENT_SAMPLE:
        return flat
    places = torch.arange(GRADIENT_SAMPLE, device=flat.device) * flat.numel() // GRADIENT_SAMPLE
    return flat[places]


def norm_of(gradient: Tensor) -> float:
    """L2 norm over all elements, in float64, a piece at a time: torch converts what it is given as a whole."""
    pieces = gradient.detach().reshape(-1).split(_PIECE)  # type: ignore[no-untyped-call]
    return math.sqrt(sum(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2 for piece in pieces))


def plain_name(name: str) -> str:
    """A parameter's name in the transformers model, without what engines and compilers put between."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
