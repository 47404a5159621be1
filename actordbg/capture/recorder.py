"""What happens around one call of `Actor.forward` while recording is on: count, select, copy, enqueue.

A Recorder belongs to one process and one store. It knows the actors it has met by weak reference: each gets an instance id
(a DPO process holds a policy and a reference), facts read once, and a ledger per run.

    begin(...)    before forward: returns None if nothing is left to do, or the call if its outputs are wanted
    end(...)      after forward: adds the outputs, or only hands over what `begin` took if forward raised

The inputs are copied and, unless outputs are wanted, enqueued *before* forward runs, so that a forward that kills the
process loses its input only if the writer thread had no time for it.
"""

from __future__ import annotations

import os
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from actordbg.capture import facts
from actordbg.capture.binding import Binder, Bound
from actordbg.capture.control import Control, ControlWatcher
from actordbg.capture.guard import Notices, attempt, describe
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.snapshot import Copier, PoolExhausted, cost
from actordbg.capture.writer import EXIT_SECONDS, ITEM_BYTES, Item, Writer
from actordbg.payload import storable
from actordbg.record import OUTPUT_PREFIX
from actordbg.store import Store


@dataclass
class Instance:
    """One actor of this process as the recorder knows it. `about` is read at its first recorded call."""

    name: str
    rank: facts.Rank
    role: str | None
    ledger: Ledger
    about: facts.ActorFacts | None = None

    def observe(self, call: facts.CallFacts) -> None:
        """An actor that runs forward in training mode with gradients is being trained: the policy."""
        if self.role is None and call.training and call.grad_enabled:
            self.role = self.ledger.role = "policy"


class Recorder:
    """Everything that one process needs to record into one store. Not used across a fork: the child makes a new one.

    `off_until`: until then (`time.monotonic`) recording is known to be off, and `begin` need not be called.
    """

    def __init__(
        self, store: Store, run: str | None = None, *, writer: Writer | None = None, copier: Copier | None = None
    ) -> None:
        self.pid = os.getpid()
        self.faults = 0
        self.notices = Notices()
        self.watcher = ControlWatcher(store, on_problem=lambda text: self.notices.warn("control", text))
        self.writer = writer or Writer(store, self.notices, still_on=lambda: self.watcher.current is not None)
        self.closed = False
        self.off_until = float("-inf")
        self._store = store
        self._run = run
        self._copier = copier or Copier()
        self._host = facts.host_name()
        self._token = secrets.token_hex(4)
        self._instances: weakref.WeakKeyDictionary[Any, Instance] = weakref.WeakKeyDictionary()
        self._met = 0

    def begin(self, binder: Binder, actor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        """Count and, if it is wanted, copy a call that is about to run. May raise; the books are right even then."""
        control = self.watcher.poll()
        if control is None or self.closed:
            self.off_until = float("inf") if self.closed else self.watcher.next_look
            return None
        instance = self._instance(actor, control)
        ledger = instance.ledger
        limited = control.min_seq_len is not None or control.max_seq_len is not None
        number, unwanted = ledger.open(control, _peek_seq_len(binder, args, kwargs) if limited else None)
        if unwanted:
            self._start()
            return None
        try:
            self._start()
            item, reason = self._take(control, instance, number, actor, binder.bind(args, kwargs))
        except BaseException as error:
            ledger.drop("error", describe(error))
            raise
        if item is None:
            ledger.drop(reason)
            self.notices.warn(reason, f"dropping dumps ({reason.replace('_', ' ')}); training goes on")
            return None
        self.notices.over("queue_full")
        if control.with_outputs:
            return item
        self.writer.put(item)
        return None

    def end(self, item: Item, output: Any) -> None:
        """Hand over a call that `begin` kept for its outputs; `output` is None if forward raised. May raise."""
        if item.ledger.identity.pid != self.pid:
            return  # forked inside forward: the parent hands it over
        try:
            outputs = named_outputs(output, _wants_actions(item))
            nbytes = cost(outputs)
            if outputs and not self.writer.reserve(nbytes):
                item.ledger.lost_outputs()
            elif outputs:
                self._add(item, outputs, nbytes)
        finally:
            self.writer.put(item)

    def fault(self, error: Exception) -> None:
        """Something in the recorder itself went wrong and was kept from the training."""
        self.faults += 1
        self.notices.warn("fault", f"recording failed: {describe(error)}; training goes on")

    def close(self, timeout: float = EXIT_SECONDS) -> bool:
        """Stop recording and write what is queued, within `timeout` seconds. True if all was written."""
        self.closed = True
        return self.writer.close(timeout)

    def _take(
        self, control: Control, instance: Instance, number: int, actor: Any, bound: Bound
    ) -> tuple[Item | None, str]:
        """Copy one call, or say why it has to be dropped."""
        if not self._copier.may_copy(bound.tensors):
            return None, "cuda_graph"
        call = facts.facts_of_call(actor)
        instance.observe(call)
        if instance.about is None:
            unknown = facts.ActorFacts(None, None, {})
            instance.about = attempt(lambda: facts.facts_of_actor(actor), self.fault, unknown)
        nbytes = max(ITEM_BYTES, cost(bound.tensors) + bound.argument_bytes)
        if not self.writer.reserve(nbytes):
            return None, "queue_full"
        try:
            snapshot = self._copier.snapshot(bound.tensors)
        except PoolExhausted:
            self.writer.release(nbytes)
            return None, "queue_full"
        except BaseException:
            self.writer.release(nbytes)
            raise
        shape, bound.tensors = bound.shape(), {}
        return (
            Item(
                instance.ledger, control, number, shape, bound, call, instance.about,
                instance.rank, instance.role, snapshot, nbytes,
            ),
            "",
        )  # fmt: skip

    def _add(self, item: Item, outputs: dict[str, torch.Tensor], nbytes: int) -> None:
        try:
            item.snapshot.merge(self._copier.snapshot(outputs))
        except BaseException as error:
            self.writer.release(nbytes)
            item.ledger.lost_outputs()
            if not isinstance(error, PoolExhausted):
                raise
        else:
            item.nbytes += nbytes

    def _instance(self, actor: Any, control: Control) -> Instance:
        run = self._run or control.run
        known = self._instances.get(actor)
        if known is not None and known.ledger.identity.run == run:
            return known
        if known is not None:
            known.ledger.closed = known.ledger.changed = True
            known.ledger = self._open_ledger(known.name, known.rank, known.role, run)
            return known
        name = f"actor{self._met}-{self._token}"
        self._met += 1
        rank = facts.rank_of_process()
        role = attempt(facts.role_from_ray, self.fault, None)
        made = Instance(name, rank, role, self._open_ledger(name, rank, role, run))
        self._instances[actor] = made
        return made

    def _open_ledger(self, name: str, rank: facts.Rank, role: str | None, run: str) -> Ledger:
        ledger = Ledger(Identity(run, rank.rank, rank.world_size, self._host, self.pid, name), role=role)
        self.writer.watch(ledger)
        return ledger

    def _start(self) -> None:
        if self.writer.start():
            _at_exit_of_child(self)


def named_outputs(output: Any, of_actions: bool) -> dict[str, torch.Tensor]:
    """The small tensors of what `forward` returned, named `output.<name>`; logits (B x S x V) are never among them.

    OpenRLHF returns log-probs, `(log-probs, model output)` or the model output. `of_actions` says whether log-probs are those
    of the actions. Since 0.7.2 the model output may carry `entropy`.
    """
    found: dict[str, Any] = {}
    parts = list(output) if isinstance(output, (tuple, list)) and not hasattr(output, "logits") else [output]
    if parts and isinstance(parts[0], torch.Tensor):
        found["action_log_probs" if of_actions else "log_probs"] = parts.pop(0)
    for part in parts:
        found.setdefault("entropy", getattr(part, "entropy", None))
    return {
        OUTPUT_PREFIX + name: value
        for name, value in found.items()
        if type(value) is torch.Tensor and storable(value) and value.device.type != "meta"
    }


def _wants_actions(item: Item) -> bool:
    """OpenRLHF returns log-probs of the actions if the call had an `action_mask`, or `num_actions` before 0.7."""
    masked = "action_mask" in item.snapshot.names or "action_mask" in item.bound.extra
    return masked or item.bound.arguments.get("num_actions") is not None


def _peek_seq_len(binder: Binder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """S of the call before its arguments are sorted; None where there is no telling."""
    first = args[0] if args else kwargs.get(binder.names[0] if binder.names else "sequences")
    shape = getattr(first, "shape", None)
    return int(shape[-1]) if shape is not None and len(shape) else None


def _at_exit_of_child(recorder: Recorder) -> None:
    """Children that multiprocessing forks end without `atexit`; its own finalizers do run there."""
    import multiprocessing.util

    multiprocessing.util.Finalize(None, recorder.close, exitpriority=10)
