"""Train an Actor on captured calls: each call is a micro-batch, and `accumulation` micro-batches per lane make a step.

The loss is that of a replay: the mean of -log_prob over the call's mask (`ActorSession.run`). The Actor is in training mode
unless the record says otherwise. After a failure the weights are undefined, so training cannot continue.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from actordbg.actor import randomness
from actordbg.actor.backends.backend import set_seed
from actordbg.actor.backends.training import Norms, Training
from actordbg.actor.session import ActorSession, loss_of
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import read_result

_WITHOUT = 'drop --gradient-checkpointing, or select inputs recorded in training mode with --where "training"'


class TrainingSession(ActorSession):
    """An Actor with its optimizer. Raises the same errors as `actordbg.actor.session.open_actor`."""

    def __init__(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path, training: Training) -> None:
        super().__init__(config, defaults, model_cache, training)
        self._checkpoints = training.gradient_checkpointing
        if self._checkpoints:
            if not self._backend.model.supports_gradient_checkpointing:
                raise Unsupported(f"{self.resolved['model_class']} does not support gradient checkpointing", hint=_WITHOUT)
            self._backend.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def stepped_by(self) -> str:
        """The name of the optimizer that ran."""
        return self._backend.stepped_by

    def micro_batch(self, dump: Dump) -> tuple[float, float]:
        """Run forward and backward of a captured call and accumulate its gradient; return its loss and its seconds."""
        began = time.perf_counter()
        call = self.call_of(dump)
        training = self._follow(dump.record, True)
        if self._checkpoints and not training:
            raise Unsupported("the input was recorded in eval mode, which disables gradient checkpointing", hint=_WITHOUT)
        set_seed(self.choices.seed)
        randomness.restore(dump, self.device, self.config.seed)
        with torch.enable_grad(), self.autocast(dump.record):
            log_probs, entropy = read_result(self.actor(**call.arguments), call.mask)
        loss = self.objective(log_probs, entropy, call.mask)
        self._backend.accumulate(loss)
        return float(loss.detach()), time.perf_counter() - began

    def objective(self, log_probs: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        """Return the loss of a micro-batch. log_probs, entropy, mask: [B, A]."""
        return loss_of(log_probs, mask)

    def step(self) -> Norms:
        """Run an optimizer step on the accumulated gradients. Collective: every rank must call it."""
        return self._backend.step()
