"""Record one call of `Actor.forward`: count, select, copy, hand over.

    look()         poll the switch, twice a second, in the watch thread: turn recording on or off, make the ring, start the writer
    enter(...)     before forward: None if nothing is left to do, or the Item to call `leave` with
    leave(...)     after forward returned or raised

The training thread touches no file: `enter` reads the switch from the watch thread, copies the inputs into the ring and appends
to the queue. A call is queued *before* forward runs, unless its end is also recorded (outputs, RNG state, triggers). Either way,
a kill inside forward leaves the input in the ring.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns, time_ns
from typing import Any, TypeVar

import torch

from actordbg.base.fault import from_outside
from actordbg.capture import facts
from actordbg.capture.control import Control, ControlWatcher
from actordbg.capture.facts import Args, Binder, Named
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.recorded_call import Item, Kind, error_facts, kind_of
from actordbg.capture.ring import Ring
from actordbg.capture.snapshot import Copier, cost, memmove, named_outputs
from actordbg.capture.watch import Notices, RingKeeper, Watch
from actordbg.capture.writer import EXIT_SECONDS, ITEM_BYTES, Writer
from actordbg.formats.dump_record import LOSS, RNG_PREFIX
from actordbg.formats.ringfile import DROPPED, OPEN, aligned, host_name
from actordbg.formats.store_files import StoreFiles
from actordbg.formats.weight_hashes import StepWeights, step_weights

T = TypeVar("T")
COMPILED = "torch.compile traces the whole forward, so its calls cannot be recorded: compile only actor.model to record them"


@dataclass
class Instance:
    """An actor of this process, by weak reference (a DPO process holds a policy and a reference).

    `ledger`: the books of the current run; `ledgers`: by run name. `control`: the switch at its last lookup. `about`: facts read
    at its first recorded call. `weights`: those that its last recorded call met.
    """

    name: str
    rank: dict[str, int | None]
    role: str | None
    actor: Callable[[], object]
    control: Control | None = None
    ledger: Ledger = None  # type: ignore[assignment]  # `Recorder.meet` sets it before anybody sees the instance
    about: dict[str, Any] | None = None
    weights: StepWeights | None = None
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    kinds: dict[Any, Kind] = field(default_factory=dict)


class Recorder:
    """Records the calls of one process into one store. Not used across a fork: the child makes a new one.

    `control`: the switch in force, None while recording is off; `on_change` is called when it may have changed. `stray` counts
    calls that the recorder failed to count. `compiled`: torch.compile traced a forward. `last`: the last call that was copied,
    while losses are recorded too. `losses_alone`: no Actor was called, so that the switch is off unless losses are recorded.
    `hashes`: weights are hashed too, for which the training thread waits (`run --hash-weights`).
    """

    def __init__(
        self,
        store: StoreFiles,
        run: str | None = None,
        *,
        writer: Writer | None = None,
        copier: Copier | None = None,
        notices: Notices | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.pid = os.getpid()
        self.stray, self.compiled, self.losses_alone, self.hashes = 0, False, False, False
        self._written = False
        self._timeout = EXIT_SECONDS
        self._strays_booked = 0
        self.control: Control | None = None
        self.ring: Ring | None = None
        self.last: Item | None = None
        self.closed = False
        self.notices = notices or Notices()
        self.watcher = ControlWatcher(store, on_problem=lambda text: self.notices.warn("control", text), job=run)
        self.writer = writer or Writer(store, self.notices)
        self.writer.process = self._of_the_process
        self.watch = Watch(self.look, self.notices)
        self._on_change = on_change
        self._run = run
        self._copier = copier or Copier()
        self._host = host_name()
        self._token = secrets.token_hex(4)
        self._dump_tokens = itertools.count(int(secrets.token_hex(4), 16))
        self.rings = RingKeeper(store, self._host, self._token, self.notices)
        self._instances: dict[int, Instance] = {}
        self._met = 0
        self._meeting = threading.Lock()

    def look(self) -> None:
        """Read the switch and follow it. Called by the watch thread; may raise."""
        control = None if self.closed else self.watcher.poll()
        if self.losses_alone and control is not None and LOSS not in control.calls:
            control = None
        if control is not None:
            self._use(self.rings.ring_for(control, self.writer.capacity, "counters" in self.notices.active))
            self.writer.control = control
            self.writer.start()
            if self.compiled:
                self.meet(self.watch, control).ledger.last_error = COMPILED
                self.notices.warn("compiled", COMPILED)
        if control is not self.control:
            self.control = self.writer.control = control
            self.notices.over("control")
            self._on_change()
        self.rings.complete()

    def _use(self, ring: Ring) -> None:
        """Store calls and books in this ring from now on; the books are in a file at any moment."""
        if (before := self.ring) is ring:
            return
        for ledger in self.writer.watched():
            ledger.move(*(ring.add_ledger(ledger.names()) if not ledger.done else (-1, None)))
        self.ring = self.writer.ring = ring
        if before is not None:
            before.remove()

    def enter(self, binder: Binder, actor: Any, args: Args, kwargs: Named, control: Control | None = None) -> Item | None:
        """Count a call that is about to run and, if `control` or else the switch selects it, copy it. Raises no Exception."""
        control, ring = control or self.control, self.ring
        if control is None or ring is None:
            return None
        open_: Item | Ledger | None = None
        opened: list[Any] = []
        try:
            instance = self._instances.get(id(actor))
            if instance is None or instance.control is not control or instance.actor() is not actor:
                instance = self.meet(actor, control)
            ledger = instance.ledger
            seq_len = None if control.min_seq_len is None else _peek_seq_len(binder, args, kwargs)
            number, reason = ledger.open(control, seq_len, opened)
            open_ = ledger if reason is None else None
            if reason is not None and not ring.keep and not control.triggers:
                return None
            open_ = item = Item(self.pid, ledger, control, ring, number, reason)
            if LOSS in control.calls:  # a call that is kept longer costs the next one its release
                self.last = item
            return self._hand_over(item) if self._copy(item, instance, actor, binder, args, kwargs) else None
        except BaseException as error:  # an edge: assignments only
            if open_ is None and opened and opened[1] is None:  # it was counted, and interrupted at once
                open_ = ledger
            self.stray += not opened
            with self.writer.lock:
                self.writer.failed += ((open_, error),)
            if from_outside(error):
                raise
            error.__traceback__ = None
            return None

    def leave(self, item: Item, output: Any, error: BaseException | None) -> None:
        """Note that the item's call returned or raised. If this raises, the item goes to `Writer.failed`."""
        if item.pid != self.pid:
            return  # forked inside forward: the parent hands it over
        if error is None and not item.deferred:
            return item.ring.leave(item.entry, False)
        try:
            if error is not None:
                item.error = error_facts(error, item.device)
                item.ring.set_end(item.entry, item.error)
            if item.deferred:
                self._note_end(item, output, error)
        finally:
            try:
                item.ring.leave(item.entry, error is not None)
            finally:
                if item.deferred:
                    self.writer.put(item)

    @property
    def faults(self) -> int:
        """Return how often the recorder itself failed."""
        untold = sum(not isinstance(why, str) for _, why in self.notices.later)
        return self.notices.faults + untold + len(self.writer.failed)

    def close(self, timeout: float = EXIT_SECONDS) -> bool:
        """Stop recording and write the queue. Returns whether the writer ended in time; unwritten calls stay in the ring."""
        self.closed, self.control, self._timeout = True, None, timeout
        steps = (self._on_change, self.watch.stop, self._count_strays, self._end_writer, self._end_ring, self.notices.tell)
        for step in steps:
            for _ in ("now", "once more"):  # the last chance to retry
                try:
                    step()
                    break
                except Exception as error:  # noqa: BLE001  # an edge: assignments only
                    error.__traceback__ = None
                    with self.notices.lock:
                        self.notices.later += (("fault", error),)
        return self._written

    def _end_writer(self) -> None:
        self._written = self.writer.close(self._timeout)
        if self._written:
            self.writer.finish_failed()

    def _end_ring(self) -> None:
        ledgers = self.writer.watched()
        published = not any(ledger.changed for ledger in ledgers)
        if self.rings.asked is not None and not published:
            self._use(self.rings.ring_for(self.rings.asked, self.writer.capacity, True))
        path = self.rings.close(self._written, published)
        left = sum(ledger.pending for ledger in ledgers)
        if path is not None and left:
            self.notices.warn("exit", f"{left} calls are still in the ring {path}: run `actordbg dump recover` to save them")

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Return `action()`, or None if it raised."""
        try:
            return action()
        except BaseException as error:  # an edge: assignments only
            if from_outside(error):
                raise
            error.__traceback__ = None
            with self.notices.lock:
                self.notices.later += (("fault", error),)
        return None

    def _copy(self, item: Item, instance: Instance, actor: Any, binder: Binder, args: Args, kwargs: Named) -> bool:
        """Copy a call into the ring and reserve its place in the queue. If that fails, count it and return False.

        Everything it allocates belongs to the item at once, so that `Writer.free` releases it whatever fails.
        """
        control, ring = item.control, item.ring
        call = facts.facts_of_call(actor)
        if instance.role is None or instance.about is None:
            self._observe(instance, actor, call)
        if item.reason is None or control.triggers:
            item.weights = self.attempt(lambda: self._weights(instance, actor, item, call[0]))
        if control.with_rng:
            places = (value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.is_cuda)
            kwargs = kwargs | {RNG_PREFIX + name: state for name, state in facts.states(next(places, None)).items()}
        kind, layout, tensors, addresses = kind_of(item.ledger, instance, call, binder, args, kwargs)
        item.kind = kind
        simple = len(addresses) == len(tensors)
        device = None if simple else next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        item.device = device
        if device is not None and not self._copier.may_copy(tensors):
            return self._refuse(item, "cuda_graph")
        at = kind.place_in(ring)
        entry = ring.open(item, layout.count, layout.end if at[1] else layout.end + aligned(len(kind.text)))
        if entry is None:
            return self._refuse(item, "queue_full")
        if entry.spare and (item.reason is None or control.triggers or device is not None):
            nbytes = max(ITEM_BYTES, (layout.end if device is None else cost(tensors)) + kind.weight)
            if self.writer.reserve(item, nbytes):
                entry.holds += 1  # nobody else knows it yet
                item.held = 1
        if simple:
            base = ring.arena.address + entry.data
            for address, offset, size in zip(addresses, layout.offsets, layout.sizes, strict=True):
                memmove(base + offset, address, size)
            for index in layout.apart:
                tensor = tensors[index].detach().contiguous()
                memmove(base + layout.offsets[index], tensor.data_ptr(), tensor.nbytes)
        elif device is None or item.nbytes:
            snapshot = self._copier.place(tensors, ring.arena, entry.data, layout.offsets)
            item.snapshot = snapshot if device is not None else None
        else:  # nobody would copy it into the ring
            ring.abandon(entry)
            return self._refuse(item, "queue_full")
        if not at[1]:
            at = entry.data + layout.end, len(kind.text)
            ring.arena.memory[at[0] : sum(at)] = kind.text
        standing = item.standing if item.nbytes or item.standing != OPEN else DROPPED
        token = next(self._dump_tokens) & 0xFFFFFFFF
        item.own = own = (item.number, time_ns(), monotonic_ns(), call[0], token, *layout.shape, *layout.described)
        layout.pack_into(ring.arena.memory, entry.offset, *own)
        ring.commit(entry, item.ledger.book, standing, at, own, device is None)
        if device is not None and control.on.slow is not None:
            item.timer = self._copier.timer(device)
        item.began = own[2]
        if standing == DROPPED:  # the ring still keeps it
            self._refuse(item, "queue_full")
        elif "queue_full" in self.notices.active:
            self.notices.over("queue_full")
        item.whole = True
        return True

    def _observe(self, instance: Instance, actor: Any, call: tuple[Any, ...]) -> None:
        """Read the actor's facts and role: an actor that runs forward in training mode with gradients is the policy."""
        if instance.role is None and call[1] and call[3] is True:
            instance.role = instance.ledger.role = "policy"
        if instance.about is None:
            instance.about = (self.attempt(lambda: facts.facts_of_actor(actor)) or {}) | getattr(actor, "recorded_fields", {})

    def _weights(self, instance: Instance, actor: Any, item: Item, step: int) -> StepWeights | None:
        """Return the weights that a call meets, which are taken at the first recorded call of an optimizer step.

        Where steps are unknown, only hashes are taken, whenever a parameter was changed. A loss has those of its forward.
        """
        known = step != facts.NO_STEP
        if instance.about is None or instance.about.get("point") == LOSS or not (known or self.hashes):
            return None
        met: Any = item.ledger, step
        if not known:
            met = item.ledger, [each._version for each in facts.unwrap(actor.model).parameters()]
        if instance.weights is None or instance.weights.met != met:
            instance.weights = self.attempt(lambda: self._taken(actor, item)) or StepWeights()
            instance.weights.met, instance.weights.step = met, step if known else None
            if self.hashes and instance.weights.copies is not None:
                self.writer.publish_weights(item.ledger, instance.weights)  # at once: the process may die
        return instance.weights

    def _taken(self, actor: Any, item: Item) -> StepWeights | None:
        model = facts.unwrap(getattr(actor, "model", None))
        busy = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        if busy or not isinstance(model, torch.nn.Module):
            return None
        optimizer = getattr(actor.model, "optimizer", None) if LOSS in item.control.calls else None
        taken = step_weights(model, self._copier.outputs, hashed=self.hashes, optimizer=optimizer)
        taken.call_index = item.number
        return taken

    def _hand_over(self, item: Item) -> Item | None:
        """Queue a call that can be queued at once. Returns the item if `leave` has to be called with it."""
        control, ring = item.control, item.ring
        if item.nbytes:
            item.deferred = bool(control.triggers or ((control.with_outputs or control.with_rng) and item.standing == OPEN))
            if not item.deferred:
                self.writer.put(item)
        if ring.keep or item.deferred:
            return item
        ring.leave(item.entry, False)
        return None

    def _refuse(self, item: Item, why: str) -> bool:
        """Count a call that cannot be copied or queued as dropped, if it was selected. Returns False."""
        if item.standing == OPEN:
            item.ledger.drop(why, item=item)
            self.notices.later_on(why)
        return False

    def _note_end(self, item: Item, output: Any, error: BaseException | None) -> None:
        """Record the end of a call, as far as the switch asks for it: time, outputs, RNG state."""
        control = item.control
        item.seconds = item.timer() if item.timer is not None else None
        item.until, item.ended = monotonic_ns(), True
        if control.with_rng:
            item.rng_after = facts.states(item.device)
        if error is None and (control.with_outputs or control.on.of_outputs):
            outputs = named_outputs(output, item.kind.returns, logits=control.on.nan)
            nbytes = cost(outputs.values())
            if not outputs:
                return
            if self.writer.reserve(item, nbytes):
                item.outputs = self._copier.outputs(outputs)
            else:
                item.ledger.lost_outputs()

    def known(self, actor: Any) -> Instance | None:
        """Return the instance of an actor; None if it was never met."""
        instance = self._instances.get(id(actor))
        return instance if instance is not None and instance.actor() is actor else None

    def meet(self, actor: Any, control: Control) -> Instance:
        """Look up or register an actor under this switch's run; its ledger is created, or continues where it stopped."""
        with self._meeting:  # two threads may meet an actor at once, and it gets only one ledger
            instance, run, key = self.known(actor), self._run or control.run, id(actor)
            if instance is None:
                role = getattr(actor, "recorded_role", None) or self.attempt(facts.role_from_ray)
                forget: Any = functools.partial(self._instances.pop, key)  # no Python code: an exception in it would be lost
                here = weakref.ref(actor, forget)
                instance = Instance(f"actor{self._met}-{self._token}", facts.rank_of_process(), role, here)
            before, ledger = instance.ledger, instance.ledgers.get(run)
            if ledger is None:
                rank, world_size = instance.rank["rank"] or 0, instance.rank["world_size"]
                who = Identity(run, rank, world_size, self._host, self.pid, instance.name)
                ledger = Ledger(who, role=instance.role, actor=instance.actor)
                if not self._met:
                    self.attempt(self._close_in_a_fork_of_multiprocessing)
            if ledger is not before:
                if before is not None:
                    before.closed = before.changed = True
                ledger.closed, ledger.changed = False, True
                if self.ring is not None and ledger.book < 0:
                    ledger.move(*self.ring.add_ledger(ledger.names()))
                # last, when nothing can fail: counters of a ledger without calls would hide the real ones
                instance.ledger = instance.ledgers[run] = ledger
            self._met += before is None
            self._instances[key] = instance
            self.writer.watch(ledger)
            instance.control = control  # if this is not reached, the next call is here again
            return instance

    def _close_in_a_fork_of_multiprocessing(self) -> None:
        """Close at the end of children that multiprocessing forks: without `atexit`, but with its own finalizers."""
        import multiprocessing.util

        multiprocessing.util.Finalize(None, self.close, exitpriority=10)

    def _count_strays(self) -> None:
        """Book calls that the recorder failed to count, if there are any."""
        ledgers = self.writer.watched()
        stray = self.stray - self._strays_booked
        if stray and ledgers:
            ledgers[0].drop("error", unopened=stray)
            self._strays_booked += stray

    def _of_the_process(self) -> dict[str, Any]:
        """Return the facts of the process that counters files hold."""
        self.attempt(self._count_strays)
        return {"faults": self.faults, "ring": self.rings.about()}


def _peek_seq_len(binder: Binder, args: Args, kwargs: Named) -> int | None:
    """Return S of a call before its arguments are sorted; None if unknown."""
    first = args[0] if args else kwargs.get(binder.names[0] if binder.names else "sequences")
    shape = getattr(first, "shape", None)
    return int(shape[-1]) if shape is not None and len(shape) else None
