"""Gradients of a model's parameters, as samples that are taken and freed while the backward runs.

Example:
    samples = samples_of(model, {"lm_head.weight"})
    loss.backward()
    samples                                              # {"lm_head.weight": float64 [65536]}
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.forward_outcome import sample


def samples_of(model: Any, trained: set[str]) -> dict[str, Tensor]:
    """Train these parameters of a model and no others; return a dict that fills with samples of their gradients, float64.

    The places are those of `forward_outcome.sample`. Gradients of several backwards are added up; none is kept whole.
    """
    samples: dict[str, Tensor] = {}

    def take(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        samples[name] = samples.get(name, 0) + sample(parameter.grad).to("cpu", torch.float64)
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        if name in trained:
            parameter.register_post_accumulate_grad_hook(partial(take, name=name))
    return samples


def without_gradient(own: Tensor, want: Tensor, shape: tuple[int, ...]) -> str:
    """Name the experts of a parameter [E, out, in] without a gradient where the truth has one; "" if there are none.

    own, want: samples of the gradient [n], of equal shares of every expert.
    """
    if len(shape) != 3:
        return ""
    expert = torch.arange(len(want)) * shape[0] // len(want)
    power = [torch.zeros(shape[0], dtype=torch.float64).index_add_(0, expert, each.double().abs()) for each in (own, want)]
    lost = ((power[0] == 0) & (power[1] > 0)).nonzero().flatten().tolist()
    return f"expert{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost and len(lost) < shape[0] else ""
