"""What rounding does to one input, measured: each module's output is rounded anew, at random, and one forward tells.

This is Monte Carlo arithmetic: the output of every module without children is multiplied by 1 +- u, where u is the unit
roundoff of its dtype. What that moves a log-prob by is what the last bit of every intermediate result is worth to it. Shapes stay
as they are, and rows do not meet: so a fault that lets rows see each other cannot raise the limit that it is judged by.

    with rounded_anew(model): ...forward...
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FACTOR = 4.0
"""How much further than in one random draw rounding may move a log-prob: kernels round in more places than modules end."""


@contextlib.contextmanager
def rounded_anew(model: Any, seed: int = 1) -> Iterator[None]:
    """Inside the block each module's output of `model` is rounded at random. A compiled model runs eagerly there."""
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(_module: Any, _inputs: Any, output: Any) -> Any:
        if type(output) is not Tensor or output.dtype not in _UNITS:
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(seed))
        sign = torch.randint(0, 2, output.shape, generator=generator, device=output.device, dtype=torch.int8) * 2 - 1
        wide = output.double() if output.dtype == torch.float32 else output.float()
        return (wide * (1 + sign * _UNITS[output.dtype])).to(output.dtype)

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [module.register_forward_hook(perturb) for module in leaves]
    try:
        with uncompiled(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Inside the block a module that was compiled in place runs as it was written; its graphs stay."""
    compiled = getattr(model, "_compiled_call_impl", None)
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


_UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
