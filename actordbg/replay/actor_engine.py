"""The engine that runs a worker's inputs, and its failures as text. It runs the trainer's Actor on one captured call at a time,
and keeps a summary instead of the tensors.

torch is imported when the engine is opened, so that a worker writes `boot` before the seconds that takes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.actor.sharing import reopens
from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError, StoreProblem
from actordbg.base.fault import scrub
from actordbg.base.imports import without_collecting
from actordbg.config.replay_config import TINY
from actordbg.debug import stops
from actordbg.debug.prompt import StoppedByUser
from actordbg.debug.replay_stops import ReplayStops
from actordbg.formats.store_files import atomic_write
from actordbg.formats.weight_hashes import WEIGHTS
from actordbg.records.journal import TENSORS, read_results
from actordbg.records.locate_record import FORMULAS
from actordbg.records.replay_record import FAILED, KEPT_BYTES, STOPPED, ReplayInput, ReplaySpec
from actordbg.replay.flushing import UNFLUSHED
from actordbg.replay.instruments import AT_END, Examined, Examiner, examiners
from actordbg.replay.selection import defaults_of
from actordbg.replay.worker_logs import EXCERPT

if TYPE_CHECKING:
    from actordbg.actor.forward_outcome import ForwardOutcome, MemoryHistory
    from actordbg.actor.session import Session
    from actordbg.store.payload import Dump


Fields = dict[str, Any]
"""Fields of a result or of an event by name."""
_OF_OUTCOME = ("forward_s", "backward_s", "peak_memory_bytes", "loss", "grad_norm", "graphs", "graph_breaks")
"""The fields that a result copies from a forward's outcome, under the same names."""


@dataclass(frozen=True)
class Failure:
    """An exception as text, so that it keeps no tensors alive."""

    error_class: str
    error: str
    hint: str
    trace: str
    status: str = FAILED

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        hint = error.hint if isinstance(error, ActordbgError) else ""
        status = STOPPED if isinstance(error, StoppedByUser) else FAILED
        frames = traceback.extract_tb(error.__traceback__)
        message = str(error) or (f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")
        return cls(name, scrub(message), scrub(hint), scrub("".join(traceback.format_exception(error))), status)

    def fields(self) -> Fields:
        """Return the ResultRecord fields of an input that failed with this exception."""
        return {
            "status": self.status,
            "error_class": self.error_class,
            "error": self.error[:2000],
            "signature": signature_of(self.error_class, self.error, self.trace),
            "log_excerpt": self.trace[-EXCERPT:],
        }


class ActorEngine:
    """Runs dumps through an `ActorSession`.

    out_of_step: why this process must be restarted after a finished input; "" if it can continue.
    """

    depth = 2
    """Folders from the store to a replay's."""

    def __init__(self, folder: Path, spec: ReplaySpec, rank: int) -> None:
        self.folder, self.spec, self.rank = folder, spec, rank
        self.root = folder.parents[self.depth - 1]
        self._loaded_for = spec.replay_id
        self.out_of_step = ""
        self._resources = contextlib.ExitStack()
        self._session: Session
        self._history: MemoryHistory | None = None
        self._examiners: dict[str, Examiner] = {}

    @property
    def collective(self) -> bool:
        """Check whether a rank needs its peers to run an input."""
        return self._session.is_collective

    @property
    def tainted(self) -> bool:
        """Check whether the last failure left this process unable to give right results."""
        return self._session.tainted or self._device_is_lost()

    def open(self) -> Fields:
        """Build the actor, after closing any actor that this process holds, and return its resolved configuration."""
        with without_collecting("torch"):
            from actordbg.actor.backends.fsdp2 import decoder_layers
            from actordbg.actor.session import ActorSession, open_actor

        self._resources.close()
        self._loaded_for = self.spec.replay_id
        defaults = defaults_of(self.root, self.spec.inputs)
        opening = open_actor(self.spec.config, defaults=defaults, model_cache=self.root / "models")
        self._session = session = self._resources.enter_context(opening)
        watch = stops.in_replay
        if isinstance(watch, ReplayStops) and isinstance(session, ActorSession):  # the stops know the actor, and the actor them
            session.watch = watch
            watch.fit(session, decoder_layers(session.model))
        return self._begun()

    def _begun(self) -> Fields:
        """Start torch's allocation recording if the configuration wants it, compare the weights with recorded hashes, and make
        the instruments.
        """
        from actordbg.actor.forward_outcome import MemoryHistory

        if self._history is not None:
            self._history.stop()
        self._history = MemoryHistory(self.folder, self.rank) if self.spec.config.memory_snapshot else None
        if (self.root / WEIGHTS).is_dir():
            from actordbg.replay.recorded_weights import statement

            self._session.resolved |= statement(self.root, self.spec.inputs, self._session)
        self._examiners = examiners(self.spec, self._session, together=self.collective)
        return self._session.resolved

    def switch(self, folder: Path, spec: ReplaySpec) -> Fields:
        """Continue with another replay. If it loads nothing, `load_s` is 0 and `load_shared_with` names the replay that did."""
        before, self.folder, self.spec = self.spec, folder, spec
        defaults = defaults_of(self.root, spec.inputs)
        same_kind = reopens(spec.config) is not None and reopens(before.config) == reopens(spec.config)
        if same_kind and not self._session.takes(spec.config, defaults):
            return self.open()
        self._session.switch(spec.config, defaults)
        resolved = self._begun()
        return resolved if resolved["load_s"] else resolved | {"load_shared_with": self._loaded_for}

    def load(self, item: ReplayInput) -> Dump:
        """Read an input. Runs in another thread while the input before it is computed."""
        from actordbg.store import payload

        return payload.load(self.root / item.path)

    def run(
        self,
        item: ReplayInput,
        loaded: Dump,
        *,
        recorded: bool,
        asked: Collection[str] = (),
        on_step: Callable[[str], None] = lambda step: None,
    ) -> Fields:
        """Run an input; return fields of its ResultRecord, `status` among them, and under `UNFLUSHED` a file that it wrote.

        `recorded`: this rank's result counts. Otherwise nothing is written to the store, but the rank takes part in every
        collective. asked: the instruments that examine this input, by name, and AT_END after the last. on_step: called before
        each step of an examination.
        """
        from actordbg.actor.changes import vary

        failed = item.dump_id
        try:
            varied, undo = vary(loaded, self.spec.config.vary)
            backward = self._session.backward_for(loaded.record)
            outcome = self._session.run(varied, backward=backward, keep=self.spec.config.keep_tensors)
            outcome.apply(undo)
            fields = self._fields(loaded, outcome)
            fields["extra"] |= self._examined(loaded, outcome, asked, on_step)
            if outcome.tensors and recorded:
                kept = fields[UNFLUSHED] = self._keep(item, outcome)
                fields["extra"][KEPT_BYTES] = kept.stat().st_size
            failed = ""
        finally:
            if self._history is not None:
                self._history.keep(failed=failed)
        return fields

    def _examined(self, dump: Dump, outcome: ForwardOutcome, asked: Collection[str], on_step: Callable[[str], None]) -> Fields:
        """Let the instruments examine an input that was run, and return what they find.

        Once this process is out of step, none examines any more.
        """
        from actordbg.actor.forward_outcome import keeping_memory

        found: Fields = {}
        backward, varied = self._session.backward_for(dump.record), self.spec.config.vary is not None
        with keeping_memory() if asked else contextlib.nullcontext():  # it slows the next forward, whose memory is gone
            for name, examiner in self._examiners.items():
                goes_on = not self.out_of_step
                examined = goes_on and name in asked and not varied
                run = Examined(dump, outcome, backward, on_step, asked=examined, at_end=goes_on and AT_END in asked)
                found |= examiner.examine(run)
                self.out_of_step = self.out_of_step or examiner.out_of_step
        return found

    def close(self) -> None:
        self._resources.close()

    def _fields(self, dump: Dump, outcome: ForwardOutcome) -> Fields:
        from actordbg.replay.output_figures import against_golden, nonfinite_weights, summarise

        fields = summarise(outcome)
        if "error" in fields and (model := getattr(self._session, "model", None)) is not None:
            fields["error"] += nonfinite_weights(model)
        golden, not_compared = against_golden(dump, outcome, own_model=self._session.resolved["model"] != TINY)
        seconds, tokens = outcome.forward_s + (outcome.backward_s or 0.0), dump.record.tokens
        fields |= golden | {name: getattr(outcome, name) for name in _OF_OUTCOME}
        where_any = {
            "restored": list(outcome.randomness.restored) if outcome.randomness else [],
            "gradient_over": list(outcome.gradient_over),
            "not_compared": not_compared,
            "notes": list(outcome.notes),
            "routing_overlap": outcome.overlap,
            FORMULAS: asdict(outcome.formulas) if outcome.formulas else None,
        }
        extra = {name: getattr(outcome, name) for name in ("packing", "temperature", "training")}
        return fields | {
            "tokens": tokens,
            "tokens_per_s": tokens / seconds if seconds else None,
            "folded_ids": outcome.folded,
            "extra": extra | {name: value for name, value in where_any.items() if value},
        }

    def _keep(self, item: ReplayInput, outcome: ForwardOutcome) -> Path:
        """Write the tensors that a comparison needs (`--keep-tensors`) to a safetensors file named after the dump."""
        import safetensors.numpy

        plain = {name: tensor.detach().contiguous().numpy() for name, tensor in outcome.tensors.items()}
        about = {"dump_id": item.dump_id, "replay_id": self.spec.replay_id}
        if outcome.gradients:
            about["gradients"] = json.dumps(outcome.gradients)
        blob = safetensors.numpy.save(plain, metadata=about)
        return self.written(item, blob)

    def written(self, item: ReplayInput, blob: bytes) -> Path:
        """Write the kept tensors of an input; a thread of the worker flushes the file."""
        path = self.folder / TENSORS / f"{item.dump_id}.safetensors"
        atomic_write(path, blob, flush=False)
        return path

    def _device_is_lost(self) -> bool:
        """Try a CUDA call: after some errors (an illegal memory access) every later call in this process fails."""
        import torch

        gc.collect()
        if not torch.cuda.is_available():
            return False
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.zeros(1, device="cuda").add_(1).item()
        except RuntimeError:
            return True
        return False


class OnceEngine(ActorEngine):
    """An engine whose inputs build on each other: the folder's work runs once, in one process."""

    def refuse_resumption(self, what: str) -> None:
        """Raise StoreProblem if inputs ran before: what they left in the process is lost."""
        if read_results(self.folder):
            raise StoreProblem(f"{what} cannot be resumed: its weights and gradients are lost", hint="run the command again")

    def switch(self, folder: Path, spec: ReplaySpec) -> Fields:
        """Begin with another folder's work in this process, which saves the imports."""
        self._resources.close()
        self.folder, self.spec = folder, spec
        return self.open()
