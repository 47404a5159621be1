"""The worker of a training check: runs micro-batches in the order of its specification, and an optimizer step after each batch.

A cell's folder is a replay's folder plus `training.json`, the optimizer's settings. An input's id begins with its step
(`s0003-m02-...`), so a dump can repeat. The result of a step's last micro-batch has its norms in `extra["step"]`.

    python -m actordbg.campaign.train_engine --supervisor PID --work store/trainchecks/<id>/<cell>/work-0-1.json
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.formats.record_reading import strict_json
from actordbg.formats.store_files import read_regular
from actordbg.records.replay_record import FAILED, PASSED, ReplayInput
from actordbg.replay.actor_engine import OnceEngine
from actordbg.replay.selection import defaults_of

if TYPE_CHECKING:
    from actordbg.actor.backends.training import Training
    from actordbg.actor.training_checkpoints import Checkpoints
    from actordbg.actor.training_session import TrainingSession
    from actordbg.store.payload import Dump

TRAINING = "training.json"
KEPT = "kept"
"""Key in `training.json`: folder and interval of the cell's checkpoints, and the step to continue from."""
SAVED = "saved"
"""Key in `training.json`: folder of the trained model, and the step after which it is saved."""
STEP = "step"
"""Key in a result's `extra`: gradient norm, update norm and learning rate of the step that the input completed."""
MODULE = "actordbg.campaign.train_engine"
_ID = re.compile(r"s(\d+)-m(\d+)-")


def input_id(step: int, micro: int, dump_id: str) -> str:
    """Return the id of a micro-batch in a step; both count from 1."""
    return f"s{step:04d}-m{micro:02d}-{dump_id}"


def step_of(name: str) -> int:
    """Return the step that an input belongs to; 0 if its id names none."""
    match = _ID.match(name)
    return int(match[1]) if match else 0


class TrainEngine(OnceEngine):
    """Runs micro-batches through a `TrainingSession`. `actordbg.replay.actor_engine.ActorEngine` documents each method."""

    depth = 3
    tainted = False
    """After a failure in the middle of a step, the weights cannot be trusted."""

    _session: TrainingSession
    _checkpoints: Checkpoints
    _training: Training
    _done = 0
    _kept: dict[str, Any] | None = None
    _saved: dict[str, Any] | None = None

    def open(self) -> dict[str, Any]:
        from actordbg.actor.backends.training import Training
        from actordbg.actor.training_checkpoints import Checkpoints
        from actordbg.actor.training_session import TrainingSession

        self.refuse_resumption("training")
        settings = strict_json(read_regular(self.folder / TRAINING))
        self._kept, self._saved = settings.pop(KEPT, None), settings.pop(SAVED, None)
        self._training = Training(**{**settings, "betas": (settings["betas"][0], settings["betas"][1])})
        self._done, self.tainted = 0, False
        defaults = defaults_of(self.root, self.spec.inputs)
        session = TrainingSession(self.spec.config, defaults, self.root / "models", self._training)
        self._session = self._resources.enter_context(contextlib.closing(session))
        if self._kept is not None:
            self._checkpoints = Checkpoints(self._kept["folder"])
            if self._kept["from"]:
                session.continue_from(self._checkpoints, self._kept["from"])
        return self._session.resolved | {"training": asdict(self._training), "stepped_by": self._session.stepped_by}

    def run(self, item: ReplayInput, loaded: Dump, *, recorded: bool, **asked: Any) -> dict[str, Any]:
        self.tainted = True
        loss, seconds = self._session.micro_batch(loaded)
        self._done += 1
        figures = {"loss": loss}
        fields: dict[str, Any] = {"status": PASSED, "loss": loss, "forward_s": seconds, "tokens": item.tokens, "extra": {}}
        if self._done % self._training.accumulation == 0:
            gradient, update = self._session.step()
            fields["grad_norm"] = gradient
            fields["extra"] = {STEP: {"grad_norm": gradient, "update_norm": update, "lr": self._training.lr}}
            figures |= {"gradient norm": gradient, "update norm": update}
        if invalid := [name for name, value in figures.items() if not math.isfinite(value)]:
            error = f"not finite: {', '.join(invalid)}"
            fields |= {"status": FAILED, "error_class": "FloatingPointError", "error": error}
        else:
            self._checkpoint(step_of(item.dump_id), stepped=bool(fields["extra"]))
            self.tainted = False
        return fields

    def _checkpoint(self, step: int, *, stepped: bool) -> None:
        """Write a checkpoint, or the trained model, if one is due after this micro-batch. Collective after a step."""
        if stepped and self._kept is not None and step % self._kept["every"] == 0:
            self._session.keep(self._checkpoints, step)
        if stepped and self._saved is not None and step == self._saved["after"]:
            self._session.save_model(Path(self._saved["folder"]))


if __name__ == "__main__":
    from actordbg.replay.worker import run_worker

    run_worker(TrainEngine)
