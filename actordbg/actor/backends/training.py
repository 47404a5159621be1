"""Optimizer steps: what a training check needs from a backend, and the optimizer of backends without their own.

    backend.accumulate(loss)          # the backward of one micro-batch, as one of `training.accumulation`
    norms = backend.step()            # clip, step, clear; the norms of what was stepped

The gradient of a step is the mean over its micro-batches, on all lanes. Weights are stepped in fp32: where the Actor computes
in a lower dtype the optimizer keeps fp32 copies, as DeepSpeed's does. A norm is over all ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from actordbg.formats.weight_hashes import bare_name


@dataclass(frozen=True)
class Training:
    """How weights are stepped: AdamW with these numbers.

    max_norm: gradients are clipped to this global norm; 0 does not clip. accumulation: micro-batches of a lane for each step.
    wide: weights rounded to the dtype, everything computed in fp32: the reference of a training check.
    gradient_checkpointing: the backward recomputes each layer's forward, and its activations are not kept. frozen: names of
    parameters that are not trained.
    """

    lr: float = 5e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    accumulation: int = 1
    wide: bool = False
    gradient_checkpointing: bool = False
    frozen: Sequence[str] = ()

    @property
    def adam(self) -> dict[str, Any]:
        """The hyperparameters of AdamW, by the names that torch and DeepSpeed use."""
        return {name: value for name, value in asdict(self).items() if name in ("lr", "betas", "eps", "weight_decay")}


def freeze(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Let a model's parameters of these names not be trained."""
    for name, parameter in model.named_parameters():
        if bare_name(name) in names:
            parameter.requires_grad_(False)


Norms = tuple[float, float]
"""L2 norms of a step: of the gradient before clipping, and of the weights' update."""
Total = Callable[[Iterable[torch.Tensor]], float]
"""The global L2 norm of tensors, of which ranks may hold shards, as of the parameters."""


@dataclass(frozen=True)
class Stepped:
    """What this rank's next optimizer step depends on, for a checkpoint. (RNG states are set before each micro-batch.)

    tensors: what the optimizer steps, in its order: parameters, or this rank's parts of them. copies: the Actor's weights that a
    step writes from them.
    """

    optimizer: torch.optim.Optimizer
    tensors: Sequence[torch.Tensor]
    copies: Sequence[torch.Tensor] = ()

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts by name, not copied: "weight.3", and of the optimizer "exp_avg.3"."""
        held = {f"weight.{at}": _own_part(tensor) for at, tensor in enumerate((*self.tensors, *self.copies))}
        for at, tensor in enumerate(self.tensors):
            state = self.optimizer.state.get(tensor, {})
            held |= {f"{part}.{at}": _own_part(torch.as_tensor(value)) for part, value in state.items()}
        return held

    @torch.no_grad()
    def load(self, held: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned, in an Actor that was opened in the same way. Raises ValueError if it does not fit."""
        weights = {name: tensor for name, tensor in self.state().items() if name.startswith("weight.")}
        for name, tensor in weights.items():
            if name not in held or held[name].shape != tensor.shape:
                raise ValueError(f"{name} is missing, or not {[*tensor.shape]}")
            tensor.copy_(held[name])
        for name in held.keys() - weights:
            part, _, number = name.rpartition(".")
            tensor = self.tensors[int(number)]
            self.optimizer.state[tensor][part] = _like(held[name], tensor)


def _own_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a tensor that may be cut, without its graph."""
    own: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach()


def _like(value: torch.Tensor, tensor: Any) -> Any:
    """Return a part of an optimizer's state as it holds it: cut like its parameter; a number where it counts in one."""
    if value.dim() == 0:
        return value if value.is_floating_point() else value.item()
    if value.shape != _own_part(tensor).shape:
        raise ValueError(f"{[*value.shape]} is not the shape of its parameter")
    if not hasattr(tensor, "to_local"):
        return value.to(tensor.device)
    places = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return type(tensor.detach()).from_local(value.to(tensor.device), tensor.device_mesh, tensor.placements, **places)


def _in_fp32(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter itself if it is fp32, else a copy in fp32 that is stepped in its place."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().clone().requires_grad_()


class AdamSteps:
    """torch's AdamW over a model's parameters, or over fp32 copies of them where they have a lower dtype."""

    def __init__(self, parameters: Iterable[torch.Tensor], training: Training) -> None:
        self.training = training
        self._pairs = [(each, _in_fp32(each)) for each in parameters if each.requires_grad]
        # one tensor at a time: parameters on different meshes cannot be stepped together
        stepped = [stepped for _, stepped in self._pairs]
        self.optimizer = torch.optim.AdamW(stepped, foreach=False, **training.adam)
        self.stepped = Stepped(self.optimizer, stepped, [own for own, wide in self._pairs if own is not wide])

    def step(self, total: Total) -> Norms:
        """Clip what `backward` left in `.grad`, step, and clear it."""
        for own, stepped in self._pairs:
            if own is not stepped:
                stepped.grad = None if own.grad is None else own.grad.float()
        gradients = [stepped.grad for _, stepped in self._pairs if stepped.grad is not None]
        norm, most = total(gradients), self.training.max_norm
        if most and norm > most:
            for gradient in gradients:
                gradient.mul_(most / (norm + 1e-6))
        before = [stepped.detach().clone() for _, stepped in self._pairs]
        self.optimizer.step()
        self._write_back()
        with torch.no_grad():
            update = total(now - was for (_, now), was in zip(self._pairs, before, strict=True))
        self.clear()
        return norm, update

    def clear(self) -> None:
        """Drop all gradients."""
        for own, stepped in self._pairs:
            own.grad = stepped.grad = None

    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy the fp32 weights back into the Actor."""
        for own, stepped in self._pairs:
            if own is not stepped:
                own.copy_(stepped)
