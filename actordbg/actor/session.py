"""One standalone actor, built as a configuration says, that replays captured calls one after another.

This is the heart of a replay: the trainer's own `Actor`, in the trainer's own DeepSpeed strategy or none, given exactly the
arguments that were captured. A replay is worth what these three properties are worth:

* **What is reported is what ran.** `session.resolved` is read off the built model (`config._attn_implementation`, the
  parameters' dtype, the engine's ZeRO stage), never copied from the options: a trainer's Actor swallows arguments that it does
  not know, and a fallback to another attention would go unseen.
* **Inputs do not influence each other.** The generators are set before each input: as the run recorded them, else to the seed.
  No optimizer step changes a weight, and no gradient is left behind. So a replay of one input gives what the replay of all gave
  for it.
* **Memory does not grow.** Logits are released before `run` returns; what stays is the log-probs of one input.

Example:
    with open_actor(ReplayConfig(backward=True), defaults=record, model_cache=store.models) as session:
        session.resolved["attn"]                                    # 'sdpa'
        outcome = session.run(payload.load(path), backward=session.backward_for(record))
        outcome.log_probs.shape, outcome.grad_norm                  # [B, A], 1.87
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from actordbg.actor import forward_outcome as measure
from actordbg.actor import known_failures as known
from actordbg.actor import randomness
from actordbg.actor.actors import actors_of
from actordbg.actor.backends.backend import Place, set_seed
from actordbg.actor.backends.opening import CompileCount, change_compilation, open_backend
from actordbg.actor.backends.training import Training
from actordbg.actor.forward_outcome import ForwardOutcome
from actordbg.actor.gradient_samples import GradientKeeper
from actordbg.actor.model_code import guard, require_consent
from actordbg.actor.sharing import host_key
from actordbg.actor.truth_session import TruthSession
from actordbg.base.errors import Unsupported, UsageError
from actordbg.config.choices import choose, first_of, gather_facts
from actordbg.config.replay_config import COMPILE_BACKENDS, ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.payload import Dump
from actordbg.trainers.built_model import change_attention, describe, follow_adapters, resolved_dtype
from actordbg.trainers.trainer import Call

T = TypeVar("T")


class Observer(Protocol):
    """Who is told how far an input is, and may stop there (`actordbg.debug.replay_stops`).

    active: it wants to be told at all. begun: the Actor was called for this input.
    """

    active: bool
    begun: bool

    @property
    def held_s(self) -> float:
        """Seconds spent in stops so far."""

    def forward(self, actor: Any, call: Mapping[str, Any], model: Any, names: Mapping[str, Any]) -> Any:
        """Call the Actor."""

    def after(self, actor: Any, call: Mapping[str, Any], model: Any, names: Mapping[str, Any]) -> None:
        """The forward is done, the backward is not."""

    def failed(self, error: Exception) -> None:
        """The input failed; its frames are still there."""


@contextlib.contextmanager
def open_actor(config: ReplayConfig, *, defaults: DumpRecord | None = None, model_cache: Path) -> Iterator[Session]:
    """Build the actor that `config` describes (or the truth, where it asks for that), and close it afterwards.

    `defaults` is the record of the first dump to be replayed (see `actordbg.config.choices`), `model_cache` a folder for what
    is built on the way: the tiny model, truncated models. Rank and world size come from RANK, LOCAL_RANK
    and WORLD_SIZE; with the deepspeed backend every rank has to call this.

    Raises UsageError, UnsafeInput (a model with code of its own, without consent), Unsupported (a combination known to fail or
    to be wrong here), EnvironmentProblem (the trainer or the model is missing); whatever torch, transformers or DeepSpeed
    raise while building passes through.
    """
    require_consent(config.model, model_cache)
    guard(config.model)
    kind: type[Any] = ActorSession if config.truth is None else TruthSession
    session = kind(config, defaults, model_cache)
    try:
        yield session
    finally:
        session.close()


class ActorSession:
    """A built actor: `resolved` says what it is, `run` replays one dump, `close` frees it. Made by `open_actor`."""

    def __init__(
        self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path, training: Training | None = None
    ) -> None:
        os.environ["ACTORDBG_DISABLE"] = "1"  # a replay in a patched environment must not record itself
        began = time.perf_counter()
        self.config = config
        self._facts = gather_facts(cuda=torch.cuda.is_available(), gpus=torch.cuda.device_count())
        self.choices = choose(config, defaults, self._facts)
        known.refuse(config, self.choices, self._facts)
        self._actors = actors_of(self.choices)
        self._actors.prepare_process()
        set_seed(self.choices.seed)
        self.watch: Observer | None = None
        self._backend = open_backend(config, self.choices, model_cache, training)
        self._records = Place.from_environment().rank % config.lane_width == 0
        self.resolved: dict[str, Any] = self._describe() | {"load_s": time.perf_counter() - began}

    @property
    def is_collective(self) -> bool:
        """True when a rank cannot run an input alone: every rank has to call `run` equally often, and alike in `backward`."""
        return self._backend.is_collective(self.choices.backward)

    @property
    def tainted(self) -> bool:
        """True when a failure left the engine in the middle of a step: nothing that it computes can be trusted any more."""
        return self._backend.tainted

    def backward_for(self, record: DumpRecord) -> bool:
        """Whether to replay this dump with a backward: as configured, else (plain backend) as its own record has it.

        A DeepSpeed engine is built with or without an optimizer, and its ranks act together, so there it is decided once.
        """
        if self.config.backward is not None or self.config.backend != "plain" or record.grad_enabled is None:
            return self.choices.backward
        return record.grad_enabled

    def run(self, dump: Dump, *, backward: bool, keep: bool = False) -> ForwardOutcome:
        """Replay one captured call, and its backward; with `keep`, the outcome's `tensors` hold what is worth storing.

        The loss is the mean of -log_probs over the outcome's mask: the gradient of PPO's loss at ratio 1 with advantage 1.
        Whatever the model raises passes through, after what it left behind is cleared away (`tainted` if it cannot be).
        """
        if backward and not self._backend.can_train:
            raise UsageError("this actor was opened without backward", hint="set backward in the configuration")
        call = self._actors.make_call(self.actor, dump, self.resolved["vocab_size"], self.device, self.ring_group)
        settings = self._follow(dump.record, backward)
        try:
            outcome = self._run(call, settings, dump, backward)
        except Exception as error:
            try:
                if self.watch is not None:
                    self.watch.failed(error)
            finally:
                if self.watch is None or self.watch.begun:
                    self._recover()
            raise
        if keep:
            outcome.keep()
        return outcome

    def probe(
        self, dump: Dump, read: Callable[[torch.Tensor, torch.Tensor | None], T], *, backward: bool, graph: bool = False,
        seed: int | None = None,
    ) -> T:  # fmt: skip
        """One forward as `run` makes it, and nothing else: `read` gets log-probs and entropies while their graph lives.

        graph: with gradients also where `run` had none, and without an engine that waits for a backward. seed: set instead of
        the one that `run` sets, or of recorded states.
        """
        call = self._actors.make_call(self.actor, dump, self.resolved["vocab_size"], self.device, self.ring_group)
        self._follow(dump.record, backward)
        set_seed(self.choices.seed if seed is None else seed)
        if seed is None:
            randomness.restore(dump, self.device, self.config.seed)
        try:
            around = self._backend.without_engine() if graph else contextlib.nullcontext()
            with torch.set_grad_enabled(backward or graph), around:
                with self._autocast(dump.record):
                    found = self._actors.read_result(self.actor(**call.arguments), call.mask)
                return read(*found)
        except Exception:
            self._recover()
            raise

    def gradient(self, dump: Dump, weights: torch.Tensor, *, keeper: GradientKeeper) -> None:
        """The gradients of -sum(weights * log-probs) through the backend's own backward, handed to `keeper`."""

        def backward(log_probs: torch.Tensor, _entropy: torch.Tensor | None) -> None:
            self._backend.backward(-(log_probs * weights.to(log_probs)).sum(), keeper)

        self.probe(dump, backward, backward=True)

    @property
    def actor(self) -> Any:
        """The trainer's Actor."""
        return self._backend.actor

    @property
    def model(self) -> Any:
        """The transformers model itself, out of whatever wraps it."""
        return self._backend.model

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self._backend.device

    @property
    def ring_group(self) -> Any:
        """The process group of this rank's ring, None without ring attention."""
        return self._backend.ring_group

    @property
    def records(self) -> bool:
        """Whether this rank records the results of its lane."""
        return self._records

    def takes(self, config: ReplayConfig, defaults: DumpRecord | None) -> bool:
        """Whether `switch` can take this configuration on the loaded Actor."""
        return host_key(config, choose(config, defaults, self._facts)) == host_key(self.config, self.choices)

    def switch(self, config: ReplayConfig, defaults: DumpRecord | None) -> None:
        """Go on under another configuration on the loaded Actor: what runs next is, bit for bit, what a new session runs.

        Raises Unsupported, before anything changed, for a configuration that needs another Actor (`sharing.host_key`) or that
        is refused anyway; and where the model does not take the attention. `resolved` then says what is there.
        """
        choices = choose(config, defaults, self._facts)
        known.refuse(config, choices, self._facts)
        if host_key(config, choices) != host_key(self.config, self.choices):
            raise Unsupported("this configuration needs an Actor of its own", hint="start another process for it")
        before, self.config, self.choices = self.config, config, choices
        change_attention(self._backend.model, choices)
        if (config.compile or before.compile) and not config.deepcompile:
            change_compilation(self._backend, config)
        self._backend.actor.packing_samples = choices.packing
        self._backend.actor.temperature = choices.temperature
        measure.release(self._backend.device)
        self.resolved = self._describe() | {"load_s": 0.0}

    def gather(self, name: str) -> torch.Tensor:
        """A copy of a parameter's full value; all ranks have to ask for it where the backend shards parameters."""
        return self._backend.gather(name)

    def save(self, folder: Path) -> None:
        """Write the model as `save_pretrained` does, in the dtype that it runs in. Every rank has to call it."""
        self._backend.save(folder)

    def close(self) -> None:
        """Free the model. A process group lives as long as its process."""
        self._backend.close()

    def _recover(self) -> None:
        """Clear away what a failed input left. Where that fails too, the session is tainted: nothing may hide the failure."""
        try:
            self._backend.recover()
        except Exception:  # noqa: BLE001 - any library's state may be broken here, and the input's own error is the answer
            traceback.print_exc()
            self._backend.tainted = True

    def _run(self, call: Call, settings: tuple[bool, float, bool], dump: Dump, backward: bool) -> ForwardOutcome:
        device = self._backend.device
        packing, temperature, training = settings
        set_seed(self.choices.seed)
        drawn = randomness.restore(dump, device, self.config.seed)
        measure.reset_peak(device)
        compiled = CompileCount.now()
        held = self.watch.held_s if self.watch is not None else 0.0
        began = measure.now(device)
        with torch.set_grad_enabled(backward), self._autocast(dump.record):
            log_probs, entropy = self._actors.read_result(self._call(call), call.mask)
        forward_s = measure.now(device) - began - (self.watch.held_s - held if self.watch is not None else 0.0)
        if self.watch is not None and self.watch.active:
            shown = {"log_probs": log_probs, "entropy": entropy, "mask": call.mask, "loss": _loss(log_probs, call.mask)}
            self.watch.after(self._backend.actor, call.arguments, self._backend.model, shown)
        outcome = ForwardOutcome(
            forward_s=forward_s,
            randomness=drawn and randomness.check(drawn, dump, device),
            log_probs=log_probs.detach().float().cpu(),
            mask=call.mask.cpu(),
            entropy=None if entropy is None else entropy.detach().float().cpu(),
            folded=call.folded,
            packing=packing,
            temperature=temperature,
            training=training,
            notes=call.notes,
        )
        if backward:
            self._backward(log_probs, call.mask, outcome, dump.record.dump_id)
        outcome.peak_memory_bytes = measure.peak_bytes(device)
        if self.config.compile or self.config.deepcompile:
            delta = CompileCount.now() - compiled
            outcome.graphs, outcome.graph_breaks = delta.graphs, delta.breaks
        return outcome

    def _call(self, call: Call) -> Any:
        actor = self._backend.actor
        if self.watch is None:
            return actor(**call.arguments)
        return self.watch.forward(actor, call.arguments, self._backend.model, {"mask": call.mask})

    def _backward(self, log_probs: torch.Tensor, mask: torch.Tensor, outcome: ForwardOutcome, dump_id: str) -> None:
        device = self._backend.device
        began = measure.now(device)
        loss = _loss(log_probs, mask)
        outcome.loss = float(loss.detach())
        keeper = GradientKeeper(self._records) if self.config.keep_gradients else None
        outcome.grad_norm = self._backend.backward(loss, keeper)
        outcome.backward_s = measure.now(device) - began
        over = self._backend.averaged_over(dump_id)
        outcome.gradient_over = tuple(sorted(over)) if len(set(over)) > 1 else ()
        if keeper is not None:
            outcome.tensors, outcome.gradients = keeper.tensors, keeper.facts

    def _follow(self, record: DumpRecord, backward: bool) -> tuple[bool, float, bool]:
        """Set (packing, temperature, training mode) and adapters on the actor: as configured, else as the record has them."""
        actor = self._backend.actor
        packing = first_of(self.config.packing, record.packing_samples, self.choices.packing)
        if packing != self.choices.packing:
            known.refuse(self.config, replace(self.choices, packing=packing), self._facts)
        actor.packing_samples = packing
        actor.temperature = first_of(self.config.temperature, record.temperature, self.choices.temperature)
        training = first_of(record.training, backward)
        if any(module.training is not training for module in actor.modules()):
            actor.train(training)
        follow_adapters(actor, record.actor)
        return packing, actor.temperature, training

    def _autocast(self, record: DumpRecord) -> contextlib.AbstractContextManager[Any]:
        """The autocast that the call ran under, unless another dtype than the record's was asked for."""
        dtype = getattr(torch, (record.autocast_dtype or "").removeprefix("torch."), None)
        if self.config.dtype is not None or not isinstance(dtype, torch.dtype):
            return contextlib.nullcontext()
        return torch.autocast(self._backend.device.type, dtype=dtype)

    def _describe(self) -> dict[str, Any]:
        """What was built, read off the objects themselves."""
        backend = self._backend
        source, through = Path(inspect.getfile(type(backend.actor))), self.choices.through
        return {
            **describe(backend.model, self.choices, backend.device),
            "dtype": resolved_dtype(backend.model),
            "packing": bool(getattr(backend.actor, "packing_samples", False)),
            "temperature": float(getattr(backend.actor, "temperature", 1.0)),
            "rank": Place.from_environment().rank,
            "actor": f"{type(backend.actor).__module__}.{type(backend.actor).__qualname__}",
            "actor_path": str(source),
            "actor_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "versions": dict(self._facts.versions),
            **({"through": through} if through == "rows" or self.choices.adapter else {}),
            **({"compile_backend": self.config.compile_backend or COMPILE_BACKENDS[0]} if self.config.compile else {}),
            **backend.facts(),
        }


Session: TypeAlias = ActorSession | TruthSession
"""A built model that replays dumps."""


def _loss(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of -log_probs over the mask."""
    chosen = mask.to(log_probs)
    return -(log_probs * chosen).sum() / chosen.sum().clamp(min=1)
