"""What a backend is: an Actor built and placed, and a backward that leaves nothing behind."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from actordbg.actor.gradient_samples import GradientKeeper


class Backend(Protocol):
    """One way of running an Actor. `actor` is callable as the trainer calls it; `device` is where its inputs go.

    ring_group: the process group of this rank's ring, None without ring attention: `forward` gets it as `ring_attn_group`.
    """

    actor: Any
    device: torch.device
    tainted: bool
    can_train: bool

    @property
    def ring_group(self) -> Any: ...

    @property
    def model(self) -> Any:
        """The transformers model itself, out of whatever wraps it."""

    def facts(self) -> dict[str, Any]:
        """What `session.resolved` says about the backend, read off what was built."""

    def is_collective(self, backward: bool) -> bool:
        """Whether every rank has to take part in a forward (and backward)."""

    def compile(self, compile_backend: str) -> None:
        """torch.compile the model through "inductor", "aot_eager" or "eager"; shapes are dynamic."""

    def uncompile(self) -> None:
        """Take back what `compile` did to the module; torch's own compiler state is not the backend's."""

    def backward(self, loss: torch.Tensor, keeper: GradientKeeper | None = None) -> float:
        """Gradients of the scalar `loss`, their global L2 norm, and then no gradients any more. Weights stay.

        With a keeper, every parameter's full gradient is handed to it. Where ranks compute together all of them give one.
        """

    def averaged_over(self, dump_id: str) -> list[str]:
        """After a backward: whose gradients are in the average, one dump id for each lane. Collective where backward is."""

    def recover(self) -> None:
        """After a failed input: drop what it left behind, or set `tainted` when that is not possible."""

    def save(self, folder: Path) -> None:
        """Write the model with `save_pretrained`; every rank calls it, rank 0 writes."""

    def close(self) -> None:
        """Free the model."""


@dataclass(frozen=True)
class Place:
    """This process's place in the job, as its launcher set it in the environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        """RANK, LOCAL_RANK and WORLD_SIZE; a process that no launcher started is rank 0 of 1."""
        rank = int(os.environ.get("RANK", "0"))
        local = int(os.environ.get("LOCAL_RANK", "-1"))
        return cls(rank, rank if local < 0 else local, int(os.environ.get("WORLD_SIZE", "1")))

    def device(self) -> torch.device:
        """The CUDA device of this local rank, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())


def set_seed(seed: int) -> None:
    """Seed everything that a forward with dropout or a model's initialisation draws from."""
    random.seed(seed)
    torch.manual_seed(seed)


def gradient_norm(parameters: Any) -> float:
    """L2 norm over all gradients, in float32; 0.0 where there are none."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
