"""The Actor alone: no DeepSpeed, no process group. Ranks of a plain replay are independent of each other.

The shortest way from a captured call to its log-probs.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import torch

from actordbg.actor.actors import actors_of
from actordbg.actor.backends.backend import Backend, Place, gradient_norm
from actordbg.actor.backends.training import STEPPED_BY, AdamSteps, Norms, Training
from actordbg.actor.gradient_samples import GradientKeeper, norm_of
from actordbg.config.choices import Choices
from actordbg.config.replay_config import ReplayConfig


class PlainBackend(Backend):
    """An Actor on this rank's device."""

    def __init__(self, path: str, choices: Choices, config: ReplayConfig, place: Place, training: Training | None = None) -> None:
        self.device = place.device()
        self.actors = actors_of(choices)
        self.place = place
        self.actor = self.actors.build_actor(path, choices).to(self.device)
        if training is not None:
            if training.wide:
                self.actor.float()
            self.stepped_by = STEPPED_BY
            self._adam = AdamSteps(self.actor.model.parameters(), training)

    def facts(self) -> dict[str, Any]:
        """ZeRO stage 0: there is nothing to partition."""
        compiled = getattr(self.model, "_compiled_call_impl", None) is not None
        place = {"world_size": self.place.world_size, "engine": None, "zero_stage": 0}
        return {"backend": "plain", "compile": compiled, "deepcompile": False} | place

    def is_collective(self, backward: bool) -> bool:
        """Never."""
        return False

    def backward(self, loss: torch.Tensor, keeper: GradientKeeper | None = None) -> float:
        loss.backward()  # type: ignore[no-untyped-call]
        if keeper is not None:
            for name, parameter in self.actor.model.named_parameters():
                if parameter.grad is not None:
                    keeper.take(name, parameter.grad)
        norm = gradient_norm(self.actor.parameters())
        self.actor.zero_grad(set_to_none=True)
        return norm

    def accumulate(self, loss: torch.Tensor) -> None:
        (loss / self._adam.training.accumulation).backward()  # type: ignore[no-untyped-call]

    def step(self) -> Norms:
        return self._adam.step(lambda pairs: math.sqrt(sum(norm_of(tensor) ** 2 for tensor, _ in pairs)))

    def save_training(self, folder: Path) -> None:
        from actordbg.actor.backends import checkpoint_files

        checkpoint_files.save(folder, self.model, self._adam)

    def load_training(self, folder: Path) -> None:
        from actordbg.actor.backends import checkpoint_files

        checkpoint_files.load(folder, self.model, self._adam)

    def averaged_over(self, dump_id: str) -> list[str]:
        return [dump_id]

    def recover(self) -> None:
        """Drop the gradients of a backward that failed half-way, and the memory of what failed."""
        self.actor.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        if self.place.rank == 0:
            self.actor.model.save_pretrained(folder)
