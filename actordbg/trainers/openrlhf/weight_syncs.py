"""`run --hash-weights`: each transfer of weights from the trainer to its rollout engines, hashed on both sides. OpenRLHF's.

A process imports this module only on request, when it has imported one of `DOORS`. On the trainer's rank 0, `broadcast_to_vllm`
hashes each parameter when it is sent, and asks the engines' answers for what arrived. In the engine, `update_weight` hashes what
it passes to `load_weights`, and returns that hash, where OpenRLHF returns None and reads nothing. Under ZeRO-3 the parameter is
whole at that moment. Nothing is sent in another order, and a failure here is printed once; the transfer continues.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from actordbg.formats.dump_record import dtype_name, now_timestamp
from actordbg.formats.store_files import StoreFiles, atomic_write
from actordbg.formats.weight_hashes import sha256_of
from actordbg.formats.weight_syncs import SYNCS, EngineAnswer, SentParameter, WeightSync
from actordbg.trainers.openrlhf.told import told

_TRAINER = ("ActorPPOTrainer", "broadcast_to_vllm")
_ENGINES = ("WorkerWrap", "AsyncLLMEngine")
_SENDS = ("update_weight", "update_weight_cuda_ipc")
_FAILED = "weights of a transfer are not hashed"
_numbers: dict[str, int] = {}


def attach(module: ModuleType) -> None:
    """Wrap the sending method of the trainer, or the receiving ones of an engine's worker, in a module of OpenRLHF's."""
    name, method = _TRAINER
    if (trainer := getattr(module, name, None)) is not None:
        setattr(trainer, method, _sending(vars(trainer)[method]))
    for engine in filter(None, (getattr(module, name, None) for name in _ENGINES)):
        for method in _SENDS:
            if method in vars(engine):
                setattr(engine, method, _receiving(vars(engine)[method]))


def _receiving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the engine's method, which returns on rank 0 what it passed to `load_weights`: all ranks get the same."""

    @functools.wraps(original)
    def update_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "rank", 0):  # of vLLM's worker
            return original(self, *args, **kwargs)
        given: dict[str, Any] = {"sha256": None, "loaded": None}
        model = self.model_runner.model
        load = model.load_weights

        def load_weights(weights: Any, *more: Any, **named: Any) -> Any:
            pairs = list(weights)
            with told(_FAILED):
                given["sha256"] = sha256_of(pairs[0][1])
            loaded = load(pairs, *more, **named)
            given["loaded"] = len(loaded) if isinstance(loaded, set) else None
            return loaded

        own = "load_weights" in vars(model)  # usually a method of its class
        vars(model)["load_weights"] = load_weights
        try:
            original(self, *args, **kwargs)
        finally:
            vars(model).pop("load_weights")
            vars(model).update({"load_weights": load} if own else {})
        return given

    return update_weight


class _Sender:
    """Stands in for an engine's handle while weights are sent: notes what is sent, and keeps the answers."""

    def __init__(self, engine: Any, note: Callable[[str, Any], None]) -> None:
        self._engine, self._note = engine, note

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)
        return _RemoteMethod(method, self._note) if name in _SENDS else method


class _RemoteMethod:
    def __init__(self, method: Any, note: Callable[[str, Any], None]) -> None:
        self._method, self._note = method, note

    def remote(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine's method, and note its answer's reference."""
        answer = self._method.remote(name, *args, **kwargs)
        self._note(name, answer)
        return answer


class _Transport:
    """Stands in for the process group of the transfer: notes what it broadcasts."""

    def __init__(self, group: Any, note: Callable[[Any], None]) -> None:
        self._group, self._note = group, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def broadcast(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the tensor, and broadcast it."""
        self._note(tensor)
        return self._group.broadcast(tensor, *args, **kwargs)


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `broadcast_to_vllm`, which also publishes what was sent and what arrived."""

    @functools.wraps(original)
    def broadcast_to_vllm(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        engines, began = self.vllm_engines, time.perf_counter()
        if not engines or (torch.distributed.is_initialized() and torch.distributed.get_rank() != 0):
            return original(self, *args, **kwargs)
        group = getattr(self, "_model_update_group", None)
        parameters = dict(self.actor.model.module.named_parameters())
        had: dict[str, str] = {}
        sent: dict[str, str] = {}
        answers: dict[str, list[Any]] = {}

        def note_name(name: str, answer: Any) -> None:
            answers.setdefault(name, []).append(answer)
            if name not in had:
                with told(_FAILED):
                    had[name] = sha256_of(parameters[name].data)

        def note_tensor(tensor: Any) -> None:
            if answers and (name := next(reversed(answers))) in had:
                with told(_FAILED):
                    same = tensor.data_ptr() == parameters[name].data.data_ptr()
                    sent[name] = had[name] if same else sha256_of(tensor)

        self.vllm_engines = [_Sender(engine, note_name) for engine in engines]
        if hasattr(group, "broadcast"):
            self._model_update_group = _Transport(group, note_tensor)
        try:
            result = original(self, *args, **kwargs)
        finally:
            self.vllm_engines = engines
            if group is not None:
                self._model_update_group = group
        with told(_FAILED):
            _publish(self, parameters, had, sent, answers, engines=len(engines), seconds=time.perf_counter() - began)
        return result

    return broadcast_to_vllm


def _publish(
    trainer: Any, parameters: dict[str, Any], had: dict[str, str], sent: dict[str, str], answers: dict[str, list[Any]],
    engines: int, seconds: float,
) -> None:  # fmt: skip
    import ray

    arrived = {name: tuple(map(_answer, ray.get(references))) for name, references in answers.items()}
    record = {
        name: SentParameter(
            dtype_name(parameter.dtype), tuple(getattr(parameter, "ds_shape", parameter.shape)), had.get(name), sent.get(name),
            arrived.get(name, ()),
        )
        for name, parameter in parameters.items()
        if parameter.requires_grad or name in answers
    }  # fmt: skip
    root, run = os.environ["ACTORDBG_STORE"], os.environ.get("ACTORDBG_RUN", "run")
    number = _numbers[run] = _numbers.get(run, -1) + 1
    step = getattr(trainer.actor.model, "global_steps", None)
    sync = WeightSync(
        run, 0, socket.gethostname(), os.getpid(), number, step if type(step) is int else None, timestamp=now_timestamp(),
        seconds=round(seconds, 3), engines=engines, parameters=record,
    )  # fmt: skip
    atomic_write(StoreFiles(root).root / SYNCS / run / sync.name, sync.to_json())


def _answer(results: Any) -> EngineAnswer:
    """Read what an engine's workers returned: only rank 0's says something."""
    for each in results if isinstance(results, list) else [results]:
        if isinstance(each, dict) and "sha256" in each:
            return EngineAnswer(True, each["sha256"], each["loaded"])
    return EngineAnswer()
