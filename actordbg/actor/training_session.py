"""Train an Actor on captured calls: each call is a micro-batch, and `accumulation` micro-batches per lane make a step.

The loss is that of a replay: the mean of -log_prob over the call's mask (`ActorSession.run`). The Actor is in training mode
unless the record says otherwise. After a failure the weights are undefined, so training cannot continue.
"""

import time
from pathlib import Path

from torch import Tensor

from actordbg.actor.backends.training import Norms, Training
from actordbg.actor.models import copy_beside
from actordbg.actor.session import ActorSession, loss_of
from actordbg.actor.training_checkpoints import Checkpoints
from actordbg.base.errors import StoreProblem, Unsupported
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.payload import Dump

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
        began, call = time.perf_counter(), self.call_of(dump)
        if self._checkpoints and dump.record.training is False:
            raise Unsupported("the input was recorded in eval mode, which disables gradient checkpointing", hint=_WITHOUT)

        def accumulate(log_probs: Tensor, entropy: Tensor | None) -> float:
            loss = self.objective(log_probs, entropy, call.mask)
            self._backend.accumulate(loss)
            return float(loss.detach())

        return self.probe(dump, accumulate, backward=True, call=call), time.perf_counter() - began

    def objective(self, log_probs: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        """Return the loss of a micro-batch. log_probs, entropy, mask: [B, A]."""
        return loss_of(log_probs, mask)

    def keep(self, kept: Checkpoints, step: int) -> None:
        """Write this rank's part of the checkpoint after a step."""
        kept.save(step, self._backend.place.rank, self._backend.stepped().state())

    def continue_from(self, kept: Checkpoints, step: int) -> None:
        """Load this rank's part of a checkpoint. StoreProblem if it does not fit this Actor."""
        try:
            self._backend.stepped().load(kept.load(step, self._backend.place.rank))
        except (ValueError, IndexError) as error:
            hint = "use the same model and processes as before, or another --storage"
            raise StoreProblem(f"the checkpoint after step {step} is not of this training: {error}", hint=hint) from error

    def save_model(self, folder: Path) -> None:
        """Save the trained weights with the files of the checkpoint that they come from. Collective."""
        weights = {name: self.gather(name).cpu() for name, _ in self.model.named_parameters()}
        if self._backend.place.rank == 0:
            self.model.save_pretrained(folder, state_dict=weights)
            copy_beside(self.choices.model, self.model_cache, self.choices.num_layers, folder)

    def step(self) -> Norms:
        """Run an optimizer step on the accumulated gradients. Collective: every rank must call it."""
        return self._backend.step()
