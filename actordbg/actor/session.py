"""A standalone actor, built as a configuration says, that replays captured calls one after another.

This is the heart of a replay: the trainer's own `Actor`, in the trainer's own DeepSpeed strategy or none, given exactly the
arguments that were captured. A replay is worth what these three properties are worth:

* **What is reported is what ran.** `session.resolved` is read off the built model (`config._attn_implementation`, the
  parameters' dtype, the engine's ZeRO stage), never copied from the options: a trainer's Actor swallows arguments that it does
  not know, and a fallback to another attention would go unseen.
* **Inputs do not influence each other.** The RNG state is set before each input: as the run recorded it, else from the seed.
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
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from actordbg.actor import changes, forward_outcome as measure, randomness, routing, rules as known
from actordbg.actor.actors import actors_of
from actordbg.actor.backends.backend import Backend, change_compilation, compile_counts, open_backend, set_seed
from actordbg.actor.backends.training import Training
from actordbg.actor.endpoint_session import EndpointSession
from actordbg.actor.forward_outcome import ForwardOutcome, GradientKeeper
from actordbg.actor.sharing import host_key
from actordbg.actor.truth_model import code_of
from actordbg.actor.truth_session import Decided, TruthSession
from actordbg.base.errors import Unsupported, UsageError
from actordbg.config.choices import choose, first_of
from actordbg.config.replay_config import COMPILE_BACKENDS, ENDPOINT, ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import ReplayedCall, read_result, require_inert
from actordbg.trainers.images import pictures_of
from actordbg.trainers.rows_actor import change_attention, describe, follow_adapters, resolved_attention, resolved_dtype

if TYPE_CHECKING:
    from actordbg.debug.replay_stops import ReplayStops

T = TypeVar("T")


@contextlib.contextmanager
def open_actor(config: ReplayConfig, *, defaults: DumpRecord | None = None, model_cache: Path) -> Iterator[Session]:
    """Build the actor that `config` describes (or the truth, where it asks for that), and close it afterwards.

    `defaults` is the record of the first dump to be replayed (see `actordbg.config.choices`), `model_cache` a folder for what
    is built on the way: the tiny model, truncated models. Rank and world size come from RANK, LOCAL_RANK
    and WORLD_SIZE; with the deepspeed backend every rank has to call this.

    Raises UsageError, UnsafeInput (a model that ships with code, without consent), Unsupported (a combination known to fail or
    to be wrong here), EnvironmentProblem (the trainer or the model is missing); whatever torch, transformers or DeepSpeed
    raise while building passes through.
    """
    kind: type[Any] = TruthSession if config.truth else EndpointSession if config.backend == ENDPOINT else ActorSession
    session = kind(config, defaults, model_cache)
    try:
        yield session
    finally:
        session.close()


class ActorSession(Decided):
    """A built actor: `resolved` says what it is, `run` replays one dump, `close` frees it. Made by `open_actor`.

    model: the transformers model itself, without any wrapper. model_cache: the folder that `open_actor` got. ring_group: the
    process group of this rank's ring, None without ring attention. records: whether this rank records the results of its lane.
    `gather(name)` copies a parameter's full value: every rank has to call it where parameters are sharded.
    """

    def __init__(
        self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path, training: Training | None = None
    ) -> None:
        began = time.perf_counter()
        self.decide(config, defaults, model_cache)
        self._actors = actors_of(self.choices)
        self._actors.prepare_process()
        set_seed(self.choices.seed)
        self.watch: ReplayStops | None = None
        self.seen: routing.Seen | None = None
        self._backend = backend = self.open_backend(training)
        self.actor, self.model, self.device, self.ring_group = backend.actor, backend.model, backend.device, backend.ring_group
        self.gather = backend.gather
        self.records = backend.place.rank % config.lane_width == 0
        self.resolved: dict[str, Any] = self._describe() | {"load_s": time.perf_counter() - began}

    @property
    def ring(self) -> tuple[int, int]:
        """This rank's place in its ring, and the ring's size; (0, 1) without a ring."""
        return (self.ring_group.rank(), self.ring_group.size()) if self.ring_group is not None else (0, 1)

    def open_backend(self, training: Training | None) -> Backend:
        """Build the Actor in its backend."""
        return open_backend(self.config, self.choices, self.model_cache, training)

    @property
    def is_collective(self) -> bool:
        """True when a rank cannot run an input alone: every rank has to call `run` equally often, and alike in `backward`."""
        return self._backend.is_collective(self.choices.backward)

    @property
    def tainted(self) -> bool:
        """True when a failure left the engine in the middle of a step: nothing that it computes can be trusted anymore."""
        return self._backend.tainted

    def run(self, dump: Dump, *, backward: bool, keep: bool = False) -> ForwardOutcome:
        """Replay one captured call, and its backward; with `keep`, the outcome's `tensors` hold what is worth storing.

        The loss is the mean of -log_probs over the outcome's mask: the gradient of PPO's loss at ratio 1 with advantage 1.
        Whatever the model raises passes through, after what it left behind is cleared away (`tainted` if it cannot be).
        """
        if backward and not self._backend.can_train:
            raise UsageError("this actor was opened without backward", hint="set backward in the configuration")
        call = self.call_of(dump)
        training = self._follow(dump.record, backward)
        try:
            with self.routed(dump) as seen:
                outcome = self._run(call, training, dump, backward)
            routing.note(outcome, seen, free=self.config.routing == routing.FREE)
        except Exception as error:
            try:
                if self.watch is not None:
                    self.watch.failed(error)
            finally:
                if self.watch is None or self.watch.begun:
                    self._recover()
            if misfit := pictures_of(self.model, dump.inputs)[1]:
                raise Unsupported(misfit, hint="compare the tokens with those of the processor") from error
            raise
        if keep:
            outcome.keep()
        return outcome

    def call_of(self, dump: Dump) -> ReplayedCall:
        """Build the captured call for this Actor, its tensors on this rank's device."""
        return self._actors.make_call(self.actor, dump, self.resolved["vocab_size"], self.device, self.ring_group)

    def routed(self, dump: Dump) -> contextlib.AbstractContextManager[routing.Seen | None]:
        """Force the recorded experts of a call inside the block, unless the configuration says otherwise."""
        free = self.config.routing == routing.FREE
        experts = routing.experts_of(dump.tensors, free=free)
        if experts is None or not routing.blocks_of(self.model):
            if self.config.routing == routing.RECORDED:
                raise Unsupported("the call has no recorded experts, or the model routes to none", hint="pass --routing free")
            return contextlib.nullcontext()
        if self.config.compiles:
            if free:
                return contextlib.nullcontext()
            raise Unsupported("a compiled graph cannot be given the recorded experts", hint="pass --routing free")
        packing = bool(self.actor.packing_samples)
        real = dump.inputs.get("attention_mask", torch.ones_like(dump.inputs["sequences"])) != 0
        whole = Dump(dump.record, dump.tensors | {"attention_mask": real})
        chosen = routing.at_places(experts, changes.places(whole, packing, *self.ring), real)
        return routing.routed(self.model, chosen, force=not free)

    def probe(
        self, dump: Dump, read: Callable[[Tensor, Tensor | None], T], *, backward: bool, graph: bool = False,
        seed: int | None = None, call: ReplayedCall | None = None,
    ) -> T:  # fmt: skip
        """Run only the forward of `run`, and return what `read` makes of log-probs and entropies while their graph lives.

        graph: with gradients even where `run` had none, and without an engine that waits for a backward. seed: replaces the seed
        of `run`, or the recorded RNG states. call: the dump's, if it is built already. What routers do is then `seen`.
        """
        call = call or self.call_of(dump)
        self._follow(dump.record, backward)
        set_seed(self.choices.seed if seed is None else seed)
        if seed is None:
            randomness.restore(dump, self.device, self.config.seed)
        try:
            context = self._backend.without_engine() if graph else contextlib.nullcontext()
            with torch.set_grad_enabled(backward or graph), context, self.routed(dump) as self.seen:
                with self.autocast(dump.record):
                    returned = read_result(self.actor(**call.arguments), call.mask)
                return read(*returned)
        except Exception:
            self._recover()
            raise

    def gradient(self, dump: Dump, weights: Tensor, *, keeper: GradientKeeper) -> None:
        """Compute the gradients of -sum(weights * log-probs) in the backend's own backward, and pass them to `keeper`."""

        def backward(log_probs: Tensor, _entropy: Tensor | None) -> None:
            self._backend.backward(-(log_probs * weights.to(log_probs)).sum(), keeper)

        self.probe(dump, backward, backward=True)

    def takes(self, config: ReplayConfig, defaults: DumpRecord | None) -> bool:
        """Return whether `switch` can change the loaded Actor to this configuration."""
        return host_key(config, choose(config, defaults, self._facts)) == host_key(self.config, self.choices)

    def switch(self, config: ReplayConfig, defaults: DumpRecord | None) -> None:
        """Continue under another configuration on the loaded Actor: what runs next is, bit for bit, what a new session runs.

        Raises Unsupported, before anything changed, for a configuration that needs another Actor (`sharing.host_key`) or that
        is refused anyway; also for an attention that the model does not accept. Afterwards `resolved` has the new state.
        """
        before = self.config
        if not self.takes(config, defaults):
            known.refuse(config, choose(config, defaults, self._facts), self._facts)
            return super().switch(config, defaults)
        self.decide(config, defaults, self.model_cache)
        change_attention(self.model, self.choices)
        if (config.compile or before.compile) and not config.deepcompile:
            change_compilation(self._backend, config)
        self.actor.packing_samples, self.actor.temperature = self.choices.packing, self.choices.temperature
        measure.release(self.device)
        self.resolved = self._describe() | {"load_s": 0.0}
        return None

    def close(self) -> None:
        """Free the model. A process group lives as long as its process."""
        del self.actor, self.model, self.gather
        self._backend.close()

    def _recover(self) -> None:
        """Clear away what a failed input left. If that fails as well, the session is tainted: nothing may hide the failure."""
        try:
            self._backend.recover()
        except Exception:  # noqa: BLE001 - any library's state may be broken here, and the input's own error is the answer
            traceback.print_exc()
            self._backend.tainted = True

    def _run(self, call: ReplayedCall, training: bool, dump: Dump, backward: bool) -> ForwardOutcome:
        device, watch = self.device, self.watch
        set_seed(self.choices.seed)
        drawn = randomness.restore(dump, device, self.config.seed)
        measure.reset_peak(device)
        graphs, breaks = compile_counts()
        held = watch.held_s if watch is not None else 0.0
        began = measure.now(device)
        with torch.set_grad_enabled(backward), self.autocast(dump.record):
            if watch is None:
                returned = self.actor(**call.arguments)
            else:
                returned = watch.forward(call.arguments, {"mask": call.mask})
            log_probs, entropy = read_result(returned, call.mask)
        require_inert(dump, log_probs, call.mask)
        forward_s = measure.now(device) - began - (watch.held_s - held if watch is not None else 0.0)
        if watch is not None and watch.active:
            shown = {"log_probs": log_probs, "entropy": entropy, "mask": call.mask, "loss": loss_of(log_probs, call.mask)}
            watch.after(call.arguments, shown)
        outcome = ForwardOutcome(
            forward_s=forward_s,
            randomness=drawn and randomness.check(drawn, dump, device),
            log_probs=log_probs.detach().float().cpu(),
            mask=call.mask.cpu(),
            entropy=None if entropy is None else entropy.detach().float().cpu(),
            folded=call.folded,
            packing=self.actor.packing_samples,
            temperature=self.actor.temperature,
            training=training,
            notes=call.notes,
        )
        if backward:
            self._backward(log_probs, call.mask, outcome, dump.record.dump_id)
        outcome.peak_memory_bytes = measure.peak_bytes(device)
        if self.config.compiles:
            after = compile_counts()
            outcome.graphs, outcome.graph_breaks = after[0] - graphs, after[1] - breaks
        return outcome

    def _backward(self, log_probs: Tensor, mask: Tensor, outcome: ForwardOutcome, dump_id: str) -> None:
        began = measure.now(self.device)
        loss = loss_of(log_probs, mask)
        outcome.loss = float(loss.detach())
        keeper = GradientKeeper(self.records) if self.config.keep_gradients else None
        outcome.grad_norm = self._backend.backward(loss, keeper)
        outcome.backward_s = measure.now(self.device) - began
        averaged = self._backend.averaged_over(dump_id)  # a lane that fills in has another's, which then counts twice
        outcome.gradient_over = tuple(sorted(averaged)) if len(set(averaged)) > 1 else ()
        if keeper is not None:
            outcome.tensors, outcome.gradients = keeper.tensors, keeper.facts

    def _follow(self, record: DumpRecord, backward: bool) -> bool:
        """Set packing, temperature and adapters on the actor as configured, else as recorded; return whether it is training."""
        actor = self.actor
        actor.packing_samples = first_of(self.config.packing, record.packing_samples, self.choices.packing)
        if actor.packing_samples != self.choices.packing:
            known.refuse(self.config, replace(self.choices, packing=actor.packing_samples), self._facts)
        actor.temperature = first_of(self.config.temperature, record.temperature, self.choices.temperature)
        training: bool = first_of(record.training, backward)
        if any(module.training is not training for module in actor.modules()):
            actor.train(training)
        follow_adapters(actor, record.actor)
        return training

    def autocast(self, record: DumpRecord) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast that the call ran under, unless a dtype was requested."""
        dtype = getattr(torch, (record.autocast_dtype or "").removeprefix("torch."), None)
        if self.config.dtype is not None or not isinstance(dtype, torch.dtype):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def _describe(self) -> dict[str, Any]:
        """Describe what was built, read off the objects themselves."""
        actor, through = self.actor, self.choices.through
        source, attn = Path(inspect.getfile(type(actor))), resolved_attention(self.model)
        foreign = {package: name for package, name in code_of(self.model, attn).items() if package != "transformers"}
        return {
            **describe(self.model, self.choices, self.device),
            "recorded_model": self.choices.recorded_model,
            "dtype": resolved_dtype(self.model),
            "packing": bool(getattr(actor, "packing_samples", False)),
            "temperature": float(getattr(actor, "temperature", 1.0)),
            "actor": f"{type(actor).__module__}.{type(actor).__qualname__}",
            "actor_path": str(source),
            "actor_sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "versions": dict(self._facts.versions),
            **({"through": through} if through == "rows" or self.choices.adapter else {}),
            **({"foreign_code": foreign} if foreign else {}),
            **({"compile_backend": self.config.compile_backend or COMPILE_BACKENDS[0]} if self.config.compile else {}),
            **self._backend.facts(),
        }


Session: TypeAlias = ActorSession | TruthSession | EndpointSession
"""A built model that replays dumps."""


def loss_of(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of -log_probs over the mask."""
    chosen = mask.to(log_probs)
    return -(log_probs * chosen).sum() / chosen.sum().clamp(min=1)
