"""Run a replay in this process, of a model that is here already, instead of starting workers that load it.

    outcome = run_here(store, spec, model=model)      # as `run_replay`: the same journals, the same tensors

A truth is loaded and computed here as well. The worker's loop (`actordbg.replay.worker`) is not used: it takes over a process.
"""

import contextlib
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from actordbg.actor.backends.backend import Backend, Place
from actordbg.actor.backends.training import Training
from actordbg.actor.session import ActorSession
from actordbg.actor.truth_session import TruthSession
from actordbg.base.errors import machine_fault
from actordbg.config.choices import Choices
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord, now_timestamp
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.locate.clean_models import flags_restored
from actordbg.records.journal import SPEC, SUPERVISOR, TENSORS, Journal, rank_journal
from actordbg.records.replay_record import ReplaySpec, ResultRecord
from actordbg.records.run_files import MET_WEIGHTS
from actordbg.replay.actor_engine import ActorEngine, Failure
from actordbg.replay.flushing import UNFLUSHED, flush
from actordbg.replay.instruments import AT_END, INSTRUMENTS
from actordbg.replay.selection import defaults_of
from actordbg.replay.supervise import COMPLETE, ReplayOutcome
from actordbg.replay.work_order import result_from
from actordbg.store.layout import Store
from actordbg.trainers.rows_actor import ROWS, RowsActor


class OwnBackend(Backend):
    """A model of transformers, where and as it is."""

    def __init__(self, model: Any, choices: Choices, config: ReplayConfig) -> None:
        self.config, self.place, self.actors = config, Place(0, 0, 1), ROWS
        self.device = next(model.parameters()).device
        self.actor = RowsActor(model, packing=choices.packing, temperature=choices.temperature)


class OwnSession(ActorSession):
    """An `ActorSession` of a model that is here already."""

    def __init__(self, model: Any, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path) -> None:
        self._own = model
        super().__init__(config, defaults, model_cache)

    def open_backend(self, training: Training | None) -> Backend:
        return OwnBackend(self._own, self.choices, self.config)


class OwnEngine(ActorEngine):
    """Runs dumps through this model, or computes the truth of its checkpoint."""

    def __init__(self, folder: Path, spec: ReplaySpec, model: Any) -> None:
        super().__init__(folder, spec, 0)
        self._model = model

    def open(self) -> dict[str, Any]:
        """Wrap the model, or load the truth's."""
        config, defaults, cache = self.spec.config, defaults_of(self.root, self.spec.inputs), self.root / "models"
        if config.truth is None:
            self._session = OwnSession(self._model, config, defaults, cache)
        else:
            self._session = TruthSession(config, defaults, cache)
        self._resources.callback(self._session.close)
        self._session.resolved[MET_WEIGHTS] = {"same": [None], "other": {}, "unknown": 0}  # the call had this very model
        return self._begun()


def run_here(store: Store, spec: ReplaySpec, *, model: Any, **_: Any) -> ReplayOutcome:
    """Run every input of `spec` in this process, and write what a worker and its supervisor would write.

    Raises what building the truth raises; an input that raises has failed, as in a replay. A fault of the machine is raised.
    """
    folder = store.replays / spec.replay_id
    make_folder(folder / TENSORS)
    atomic_write(folder / SPEC, spec.to_json())
    journal, supervisor = Journal(rank_journal(folder, 0)), Journal(folder / SUPERVISOR)
    outcome = ReplayOutcome(spec.replay_id, folder, COMPLETE, len(spec.inputs))
    engine = OwnEngine(folder, spec, model)
    try:
        with flags_restored():
            outcome.resolved = engine.open()
            journal.append("ready", pid=os.getpid(), rank=0, attempt=1, resolved=outcome.resolved, collective=False)
            for slot, item in enumerate(spec.inputs):
                begun = {"dump_id": item.dump_id, "slot": slot, "rank": 0, "attempt": 1, "started_at": now_timestamp()}
                record = _result(engine, spec, slot, begun)
                outcome.results[item.dump_id] = record
                journal.append("end", **record.to_dict())
        supervisor.append("resolved", resolved=outcome.resolved)
        supervisor.append("finished", status=COMPLETE, finished_at=now_timestamp())
    finally:
        engine.close()
        journal.close()
        supervisor.close()
    return outcome


def _result(engine: OwnEngine, spec: ReplaySpec, slot: int, begun: dict[str, Any]) -> ResultRecord:
    item = spec.inputs[slot]
    asked = {name for name, instrument in INSTRUMENTS.items() if slot < instrument.inputs(spec)}
    if item is spec.inputs[-1]:
        asked.add(AT_END)
    try:
        loaded = engine.load(item)
        fields = engine.run(item, loaded, recorded=True, asked=asked)
    except Exception as error:
        if fault := machine_fault(error, engine.folder):
            raise fault from error
        fields = Failure.of(error).fields()
    if (kept := fields.pop(UNFLUSHED, None)) is not None:
        flush(kept)
    return result_from(spec.replay_id, begun, **fields)


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Leave the model's modes and gradients, the random generators, the environment and transformers' messages as they were.

    Inside, no garbage collection looks at what was there before: each replay ends with some, and imports left a million objects.
    """
    from transformers.utils import logging

    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    hooks = [own for parameter in model.parameters() if (own := parameter._post_accumulate_grad_hooks)]  # an optimizer may be one
    kept = [dict(own) for own in hooks]
    environment, drawn = dict(os.environ), random.getstate()
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    try:
        device = next(model.parameters()).device.type
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(), torch.autocast(device, enabled=False):
            for parameter, _ in gradients:
                parameter.grad = None
            for own in hooks:
                own.clear()
            yield
    finally:
        if not frozen:
            gc.unfreeze()
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for own, before in zip(hooks, kept, strict=True):
            own.update(before)
        random.setstate(drawn)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        logging.set_verbosity(verbosity)
