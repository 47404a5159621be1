"""Optimizer steps: what a training check needs from a backend, and the optimizer of backends without their own.

    backend.accumulate(loss)          # the backward of one micro-batch, as one of `training.accumulation`
    norms = backend.step()            # clip, step, clear; the norms of what was stepped

The gradient of a step is the mean over its micro-batches, on all lanes. Weights are stepped in fp32: where the Actor computes
in a lower dtype the optimizer keeps fp32 copies, as DeepSpeed's does. A norm is over all ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Training:
    """How weights are stepped: AdamW with these numbers.

    max_norm: gradients are clipped to this global norm; 0 does not clip. accumulation: micro-batches of a lane for each step.
    wide: weights rounded to the dtype, everything computed in fp32: the reference of a training check.
    gradient_checkpointing: the backward recomputes each layer's forward, and its activations are not kept.
    """

    lr: float = 5e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    accumulation: int = 1
    wide: bool = False
    gradient_checkpointing: bool = False

    @property
    def adam(self) -> dict[str, Any]:
        """The hyperparameters of AdamW, by the names that torch and DeepSpeed use."""
        return {name: value for name, value in asdict(self).items() if name in ("lr", "betas", "eps", "weight_decay")}


@dataclass(frozen=True)
class Norms:
    """L2 norms of a step: of the gradient before clipping, and of the weights' update."""

    gradient: float
    update: float


Total = Callable[[Iterable[tuple[torch.Tensor, torch.Tensor]]], float]
"""The global L2 norm of tensors, each beside the parameter that it belongs to."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamSteps:
    """torch's AdamW over a model's parameters, or over fp32 copies of them where they have a lower dtype."""

    def __init__(self, parameters: Iterable[torch.Tensor], training: Training) -> None:
        self.training = training
        self._pairs = [
            (p, p if p.dtype == torch.float32 else p.detach().float().clone().requires_grad_())
            for p in parameters
            if p.requires_grad
        ]
        # one tensor at a time: parameters on different meshes cannot be stepped together
        self.optimizer = torch.optim.AdamW([stepped for _, stepped in self._pairs], foreach=False, **training.adam)

    def step(self, total: Total) -> Norms:
        """Clip what `backward` left in `.grad`, step, and clear it."""
        for own, stepped in self._pairs:
            if own is not stepped:
                stepped.grad = None if own.grad is None else own.grad.float()
        gradients = [(stepped.grad, own) for own, stepped in self._pairs if stepped.grad is not None]
        norm, most = total(gradients), self.training.max_norm
        if most and norm > most:
            for gradient, _ in gradients:
                gradient.mul_(most / (norm + 1e-6))
        before = [stepped.detach().clone() for _, stepped in self._pairs]
        self.optimizer.step()
        self._write_back()
        with torch.no_grad():
            update = total((now - was, own) for (own, now), was in zip(self._pairs, before, strict=True))
        self.clear()
        return Norms(norm, update)

    def clear(self) -> None:
        """Drop all gradients."""
        for own, stepped in self._pairs:
            own.grad = stepped.grad = None

    def save(self, folder: Path, model: Any) -> None:
        """Write this rank's part of weights, buffers and AdamW's state with torch.distributed.checkpoint. Collective.

        A parameter that `fully_shard` or tensor parallelism cut is a DTensor, and torch knows which part is whose. Names are the
        model's. It holds tensors only: what else a step depends on is set by each micro-batch (seeds, recorded RNG states) or is
        an option of the check (learning rate, clipping).
        """
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with _without_warnings():
            save(self._tensors(model), storage_writer=FileSystemWriter(folder))

    def load(self, folder: Path, model: Any) -> None:
        """Load what `save` wrote into the existing tensors, whatever they hold. Every rank has to call it."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        with _without_warnings():
            load(self._tensors(model), storage_reader=FileSystemReader(folder))
        self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy the fp32 weights back into the Actor."""
        for own, stepped in self._pairs:
            if own is not stepped:
                own.copy_(stepped)

    def _tensors(self, model: Any) -> dict[str, Any]:
        """Return all tensors by name, not copied. A parameter that was never stepped gets the state that a first step creates."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        tensors = {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
        for own, stepped in self._pairs:
            name, state = names[id(own)], self.optimizer.state[stepped]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state.update({moment: torch.zeros_like(stepped, memory_format=torch.preserve_format) for moment in _MOMENTS})
            tensors |= {f"{part}.{name}": value for part, value in state.items()} | {f"weight.{name}": stepped.detach()}
        return tensors


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch's warning about saving from a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        yield
