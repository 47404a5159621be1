"""An Actor whose weights are stepped: a captured call is a micro-batch, and `accumulation` of them in each lane are a step.

The loss is the replay's: the mean of -log_prob over the call's mask (`ActorSession.run`). Where the record does not say
otherwise the Actor is in training mode. After a failure the weights are nobody's, so nothing continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from actordbg.actor import randomness
from actordbg.actor.backends.backend import Place, set_seed
from actordbg.actor.backends.training import Norms, Training
from actordbg.actor.model_code import guard, require_consent
from actordbg.actor.session import ActorSession
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import read_result

_WITHOUT = 'leave --gradient-checkpointing out, or select inputs of training mode: --where "training"'


class TrainingSession(ActorSession):
    """An Actor and its optimizer, until it is closed. Building it raises as `actordbg.actor.session.open_actor` does."""

    def __init__(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path, training: Training) -> None:
        require_consent(config.model, model_cache)
        guard(config.model)
        super().__init__(config, defaults, model_cache, training)
        self._checkpoints = training.gradient_checkpointing
        if self._checkpoints:
            if not self._backend.model.supports_gradient_checkpointing:
                raise Unsupported(f"{self.resolved['model_class']} has no gradient checkpointing", hint=_WITHOUT)
            self._backend.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def stepped_by(self) -> str:
        """The optimizer that ran, in words."""
        return self._backend.stepped_by

    def micro_batch(self, dump: Dump) -> tuple[float, float]:
        """Forward and backward of one captured call, its gradient added to the step's: its loss, and the seconds it took."""
        began = time.perf_counter()
        call = self.call_of(dump)
        training = self._follow(dump.record, True)
        if self._checkpoints and not training:
            raise Unsupported("it was recorded in eval mode, where there is no gradient checkpointing", hint=_WITHOUT)
        set_seed(self.choices.seed)
        randomness.restore(dump, self.device, self.config.seed)
        with torch.enable_grad(), self._autocast(dump.record):
            log_probs, _ = read_result(self.actor(**call.arguments), call.mask)
        chosen = call.mask.to(log_probs)
        loss = -(log_probs * chosen).sum() / chosen.sum().clamp(min=1)
        self._backend.accumulate(loss)
        return float(loss.detach()), time.perf_counter() - began

    def step(self) -> Norms:
        """One optimizer step over what was accumulated. Every rank has to call it."""
        return self._backend.step()

    def save_training(self, folder: Path, mark: Callable[[bool], None]) -> None:
        """Write a checkpoint. On rank 0 `mark(False)` before anybody writes, and `mark(True)` after all have."""
        leads = Place.from_environment().rank == 0
        if leads:
            mark(False)
        _meet()
        self._backend.save_training(folder)
        _meet()
        if leads:
            mark(True)

    def load_training(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        self._backend.load_training(folder)
        _meet()


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
