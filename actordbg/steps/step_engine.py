"""The worker of `actordbg step`: forward, loss and backward of a step's micro-batches, and the norm of their summed gradient.

A side's folder is a replay's folder plus `step.json` (`StepPlan`). The inputs are the forwards of the micro-batches, by place,
then rank. Two sides run here:

| Side | Forward | Loss |
|---|---|---|
| configuration | the Actor in its backend | the trainer's own class, with the recorded attributes and arguments |
| reference | fp32, one unpadded row at a time, eager | the formula, over the whole step as one batch |

The optimizer's step ends the configuration's side: it computes the norm, and its weights are not used again.

    python -m actordbg.steps.step_engine --supervisor PID --work store/cache/steps/<id>/<side>/work-0-1.json
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from actordbg.formats.record_reading import MOST_VALUES, strict_json
from actordbg.formats.store_files import read_regular
from actordbg.records.replay_record import PASSED, ReplayInput
from actordbg.replay.actor_engine import OnceEngine
from actordbg.replay.flushing import UNFLUSHED
from actordbg.replay.selection import defaults_of
from actordbg.steps.step_plan import PLAN, STEP, StepPlan

if TYPE_CHECKING:
    from actordbg.steps.step_sessions import ReferenceSession, StepSession

MODULE = "actordbg.steps.step_engine"


class StepEngine(OnceEngine):
    """Runs the micro-batches of one side. `actordbg.replay.actor_engine.ActorEngine` documents each method."""

    depth = 4
    tainted = False
    """After a failure in the middle of a step, its gradient is unknown: the command says so, and nothing is run again."""

    _session: StepSession | ReferenceSession  # type: ignore[assignment]

    def open(self) -> dict[str, Any]:
        from actordbg.steps.step_sessions import ReferenceSession, StepSession

        self.refuse_resumption("a step")
        self._plan, self._done = StepPlan(**strict_json(read_regular(self.folder / PLAN), most=MOST_VALUES)), 0
        kind: Any = StepSession if self.spec.config.truth is None else ReferenceSession
        session = kind(self.spec.config, defaults_of(self.root, self.spec.inputs), self.root / "models", self._plan)
        self._session = self._resources.enter_context(contextlib.closing(session))
        return self._begun()

    def load(self, item: ReplayInput) -> Any:
        from actordbg.store import payload

        return payload.load(self.root / item.path), payload.load(self.root / self._plan.losses[item.dump_id])

    def run(self, item: ReplayInput, loaded: Any, *, recorded: bool, **asked: Any) -> dict[str, Any]:
        import safetensors.numpy

        log_probs, figures, seconds = self._session.one_of_step(*loaded)
        self._done += 1
        fields = {
            "status": PASSED,
            "loss": figures["loss"],
            "forward_s": seconds,
            "tokens": item.tokens,
            "extra": {STEP: figures},
        }
        if self._done % self._session.together == 0:
            figures |= self._session.norms(last=self._done == len(self.spec.inputs) // self.spec.config.lanes)
            fields["grad_norm"] = figures.get("grad_norm")
        if recorded:
            blob = safetensors.numpy.save({"log_probs": log_probs.contiguous().numpy()})
            fields[UNFLUSHED] = self.written(item, blob)
        return fields


if __name__ == "__main__":
    from actordbg.replay.worker import run_worker

    run_worker(StepEngine)
