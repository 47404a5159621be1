"""From the queue to the disk: a bounded queue and one daemon thread that judges, encodes, publishes and keeps the books.

The training thread only reserves bytes and appends. Everything slow is here: waiting for device copies, counting tokens,
narrowing, hashing, compressing (most of it outside the GIL), writing, fsync, renaming.

Invariants:

- The queue is bounded in *bytes* of copies, including plain arguments, and each call counts as at least ITEM_BYTES. `reserve`
  returns False when it is full; nobody ever waits for it.
- With `--writer process` a process encodes and publishes calls that need only their inputs (`_send_ahead`). If it dies, this
  thread does everything, and `dump status` says so.
- Every queued call is closed exactly once: captured, dropped with a reason, or sampled out.
- The thread survives every error of an item; a stuck disk blocks only this thread. `close` returns within its timeout: unwritten
  calls stay pending in the ring; without a ring they are dropped as `exit`.
- Counters files are replaced at most once a second while something changes, every 10 s while recording is on, and at the end.

The thread polls the queue four times a second, since each turn takes the interpreter from the training; without a ring file,
where a kill would lose the queue, 20 times. It is woken (10 to 25 us of training time) for a long queue or for device copies.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
import zstandard  # noqa: F401  fails when the hook is installed, not at the first dump, if it is missing

from actordbg.base.fault import describe, from_outside
from actordbg.capture.control import BEFORE, Control
from actordbg.capture.facts import versions
from actordbg.capture.ledger import Ledger, Rotation
from actordbg.capture.recorded_call import ERROR, LEFT, Item, TriggerResult, trigger_of
from actordbg.capture.ring import Ring
from actordbg.capture.snapshot import LOGITS_SUM
from actordbg.capture.watch import Notices
from actordbg.formats.dump_record import OUTPUT_PREFIX, SUFFIX, DumpRecord
from actordbg.formats.ringfile import CAPTURED, OPEN
from actordbg.formats.store_files import FULL_DISK, StoreFiles, atomic_write
from actordbg.formats.weight_hashes import WEIGHTS, StepWeights

QUEUE_BYTES = 256 * 2**20
"""Most bytes of copied tensors and arguments that wait to be written."""
ITEM_BYTES = 16 * 2**10
"""Least bytes that a waiting call counts as. (The ring's slots are the other bound: fewer than a thousand calls wait.)"""
EXIT_SECONDS = 5.0
"""Longest time that the end of the process waits for the queue."""
LOOK_SECONDS, LOOK_BARE_SECONDS = 0.25, 0.05
"""Interval at which the thread polls the queue; the second if a kill would lose the queue."""
WAKE_BYTES, _BATCH = 2**20, 64
"""Queued bytes, or calls, above which the thread is woken."""
IDLE_SECONDS = 0.5
PUBLISH_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
_FLOOR_SECONDS = 1.0
_CHANCES = 8
"""Most attempts at a failing operation."""


class Writer:
    """The queue of one process and its thread. Not used across a fork: the child makes a new one.

    `process`: returns the process's facts for counters files. `kind`: what writes: "thread", "process", or "thread: " and why.
    """

    def __init__(self, store: StoreFiles, notices: Notices, capacity: int = QUEUE_BYTES) -> None:
        self.capacity = capacity
        self.control: Control | None = None
        self.ring: Ring | None = None
        self.process: Callable[[], dict[str, Any]] = dict
        self._store = store
        self.failed: tuple[tuple[Item | Ledger | None, BaseException], ...] = ()
        self._left: tuple[Item, ...] = ()
        self._notices = notices
        self._publishing = False
        self._turn = 0
        self._queue: deque[Item] = deque()
        self._last: deque[Item] = deque()
        self._wake = SimpleQueue[None]()  # not an Event, whose lock stays locked if a signal handler raises in it
        self.lock = threading.Lock()
        self._bytes = 0
        self._ledgers: list[Ledger] = []
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None
        self._give_up = 0.0
        self._published = self._heartbeat = time.monotonic()
        self._was_on = True
        self._floor_checked = float("-inf")
        self._free = 0
        self._versions: dict[str, str] | None = None
        self._scribe: Any = None  # the writer process, a `Scribe`
        self.kind = self._asked = "thread"

    def reserve(self, item: Item, nbytes: int) -> bool:
        """Reserve `nbytes` of copies for an item; returns False at once if the queue is full."""
        with self.lock:
            if self._bytes + nbytes > self.capacity:
                return False
            self._bytes += nbytes
            item.nbytes += nbytes
            return True

    def put(self, item: Item) -> None:
        """Queue an item whose bytes are reserved. Never waits."""
        self._queue.append(item)
        if self._bytes > WAKE_BYTES or len(self._queue) > _BATCH or item.device is not None:
            self._wake.put(None)

    def watch(self, ledger: Ledger) -> None:
        """Publish this ledger's counters from now on."""
        with self.lock:
            if ledger not in self._ledgers:
                self._ledgers.append(ledger)

    def watched(self) -> list[Ledger]:
        """Return the ledgers whose counters are published."""
        return [*self._ledgers]

    def start(self) -> None:
        """Start the thread if it is not running."""
        with self.lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="actordbg-writer", daemon=True)
                thread.start()
                self._thread = thread

    def close(self, timeout: float = EXIT_SECONDS) -> bool:
        """Write the queue as far as `timeout` seconds allow, publish the final counters, and stop. Returns whether it stopped.

        A second call waits no longer than the first call promised (several exit handlers may call this).
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        now = time.monotonic()
        if self._deadline is None:
            self._give_up = now + timeout
            self._deadline = now + 0.8 * timeout
        self._wake.put(None)
        thread.join(max(0.0, self._give_up - now))
        return not thread.is_alive()

    def _run(self) -> None:
        """Rest, handle, publish, until `close`. The loop is an edge: the calls in the queue must not be lost with this thread.

        A failing step is skipped (`stumbled`): the turn after a fault sleeps instead of resting, and the next does neither.
        """
        stumbled, finals = 0, _CHANCES
        while finals:
            item, finishing = None, False
            try:
                if stumbled == 0:
                    self._rest()
                elif stumbled == 1:
                    time.sleep(LOOK_SECONDS)
                half_made = len(self.failed)
                while self._queue:
                    ahead, self._queue[0].offered = not self._queue[0].offered, True
                    if ahead:
                        self._send_ahead()
                    item = self._queue[0]
                    del self._queue[0]
                    self._handle(item)
                    item = None
                    self._tick()
                finishing = half_made > 0
                if finishing:
                    self.finish_failed(half_made)
                    finishing = False
                while self._left:
                    left = self._left[0]
                    self._left = self._left[1:]
                    self.free(left)
                if self._last and (self._deadline is not None or self.control is None):
                    self._let_go(0)
                self._tick()
                if self._deadline is not None and not self._queue and not self._last and not self.failed:
                    for ledger in self._ledgers:
                        ledger.closed = ledger.changed = True
                    self._publish("ended")
                    self._end_scribe()
                    finals = 0
                stumbled = 0
            except Exception as error:  # noqa: BLE001  # an edge: assignments only
                error.__traceback__ = None
                if item is not None:
                    item.close_somehow()
                    self._left += (item,) * _CHANCES
                if finishing and self.failed:  # a call that cannot even be finished
                    with self.lock:
                        (what, _), self.failed = self.failed[0], self.failed[1:]
                    if isinstance(what, Item):
                        what.close_somehow()
                        what.failed = True
                        self._left += (what,) * _CHANCES
                    elif what is not None:
                        what.counts[ERROR] += 1
                stumbled = (stumbled + 1) % 3
                finals -= self._deadline is not None and not self._queue
                with self._notices.lock:
                    self._notices.later += (("counters" if self._publishing else "writer", error),)
                self._publishing = False

    def finish_failed(self, most: int = 1000) -> None:
        """Close the books of calls that the recorder failed on half way; write those that were copied completely.

        Calls that were queued before they failed have been handled by now: the queue comes first.
        """
        for _ in range(min(most, len(self.failed))):
            what, error = self.failed[0]
            with self.lock:
                self.failed = self.failed[1:]
            with self._notices.lock:
                self._notices.later += (("fault", error),)
            counted = what is None
            try:
                if isinstance(what, Item):
                    self._left += (what,) * _CHANCES
                    what.failed = True
                    if what.whole and not what.handled:
                        self._handle(what)
                    elif what.standing == OPEN:
                        what.dropped("error", describe(error))
                elif what is not None:
                    what.drop("error", describe(error))
                    counted = True
            finally:  # assignments only
                if isinstance(what, Item):
                    what.close_somehow()
                elif what is not None:
                    what.counts[ERROR] += not counted

    def _rest(self) -> None:
        if self._deadline is None and not self._queue:
            look = LOOK_SECONDS if self.ring is not None and self.ring.path is not None else min(LOOK_SECONDS, LOOK_BARE_SECONDS)
            with contextlib.suppress(Empty):
                self._wake.get(timeout=look if self.control is not None else IDLE_SECONDS)
        while not self._wake.empty():
            self._wake.get()

    def _send_ahead(self) -> None:
        """Let the writer process publish queued calls that need only their inputs. `_write` writes any others as usual."""
        if self._asked == "thread" == self._queue[0].control.writer:
            return
        batch, failed = [self._queue[place] for place in range(min(len(self._queue), _BATCH))], None
        for item in batch:
            item.offered = True
        control, ring = batch[0].control, batch[0].ring
        if control.writer != self._asked:
            self._asked, self.kind = control.writer, control.writer
            self._end_scribe()
        if self.kind != "process" or self._is_over() or not self._above_floor(control.free_floor_bytes):
            return
        self._versions = self._versions or versions()
        try:
            like = control.generation, ring  # losses have a switch of their own
            chosen = [item for item in batch if (item.control.generation, item.ring) == like and item.needs_only_inputs()]
            if chosen:
                for item in chosen:
                    self._land(item)
                if self._scribe is None:
                    from actordbg.capture.writer_process import Scribe

                    self._scribe = Scribe()
                slots = [(item.entry.slot, item.entry.sequence) for item in chosen]
                request = {"ring": str(ring.path), "store": str(self._store.root)}
                answers = self._scribe.ask(request | {"versions": self._versions, "slots": slots}, self._is_over)
                for item, answer in zip(chosen, answers, strict=True):
                    if answer is not None:
                        item.path, item.ahead = Path(answer[0]), answer[1]
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread can write instead
            error.__traceback__ = None
            failed = error
        if failed is not None:
            self.kind = "thread"  # first: a process that was not understood is never asked again, whatever fails here
            self._end_scribe()
            self.kind += ": " + describe(failed)
            for item in batch:  # the lost answer was for all of them: some may be published
                path = self._store.dump_folder(item.ledger.identity.run, item.ledger.identity.rank) / f"{item.dump_id}{SUFFIX}"
                if path.exists():
                    item.path, item.ahead = path, path.stat().st_size
            self._notices.warn("scribe", f"no writer process: {describe(failed)}; a thread writes")

    def _end_scribe(self) -> None:
        if self._scribe is not None:
            self._scribe.stop()  # if this fails, it is retried at the end
            self._scribe = None

    def _handle(self, item: Item) -> None:
        """Close an item's books, whatever happens, and free its resources."""
        item.handled = True
        try:
            self.watch(item.ledger)  # its actor may be gone and its books closed; a trigger can reopen them
            if item.cause is not None:
                self._keep_too(item, item.cause)
            else:
                self._settle(item)
        except Exception as error:  # noqa: BLE001  # if this also fails, the loop closes the item
            self._lost(item, error)
        item.close_somehow()
        if item.ended and item.control.before and item.held and item.cause is None and not item.failed:
            self._last.append(item)
            item.kept = 1
        self.free(item)
        self._let_go(item.control.before)

    def _let_go(self, most: int) -> None:
        """Keep at most `most` of the last calls, which a trigger may still keep, in the ring."""
        while len(self._last) > most:
            oldest = self._last[0]
            oldest.kept = 0
            self.free(oldest)
            del self._last[0]

    def _settle(self, item: Item) -> None:
        """Judge an item, and publish it if it is to be kept. Closes its books, or raises with its books still open."""
        self._land(item)
        if item.outputs is not None:
            item.outputs.wait()
        fired = self._fired(item) if item.ended and item.control.triggers else None
        if fired is not None:
            item.reopen()
        if item.standing != OPEN:
            return
        self._write(item, fired)
        if fired is not None and item.standing in (CAPTURED, LEFT):
            while self._last:  # they are handled next, each separately
                earlier = self._last[-1]
                if earlier.kept:
                    earlier.kept, earlier.cause = 0, item.dump_id
                    self._queue.appendleft(earlier)
                del self._last[-1]

    def _land(self, item: Item) -> None:
        """Copy an item's device copies into the ring."""
        if item.snapshot is not None:
            item.snapshot.land(item.ring.arena)
            item.ring.arrived(item.entry)
            item.snapshot = None

    def _fired(self, item: Item) -> TriggerResult | None:
        """Return the trigger that keeps an item, unless it has reached its limit."""
        tensors = item.outputs.tensors() if item.outputs is not None else {}
        mask = None
        if item.control.on.logprobs is not None:
            from actordbg.formats.encoding import tensors_in

            action_mask = tensors_in(item.ring.arena.memory, item.entry.data, item.own, item.kind.tensors).get("action_mask")
            mask = torch.from_numpy(action_mask.values != 0) if action_mask is not None else None
        fired = trigger_of(item, tensors, mask)
        return fired if fired and item.ledger.admits_trigger(item.control, fired.trigger) else None

    def _keep_too(self, item: Item, dump_id: str) -> None:
        """Keep a call that came before a triggered one: publish it, or pin what was published."""
        from actordbg.formats import encoding

        facts = {"before": dump_id}
        if item.written is None or self._is_over():
            item.reopen()
            if item.standing == OPEN:
                self._write(item, TriggerResult(BEFORE, facts))
            elif self._is_over() and item.standing in (CAPTURED, LEFT):
                item.leave_in_ring(TriggerResult(BEFORE, facts))
            return
        record, data = item.written
        if not record.pinned and item.path is not None:
            record = replace(record, pinned=True, triggered=BEFORE, trigger_facts=facts)
            self._store.publish_dump(record, encoding.pack(record, data))
            item.written = (record, data)
            self._rotation(item.ledger).spare(item.path)

    def _write(self, item: Item, fired: TriggerResult | None) -> None:
        """Encode and publish an item. Closes its call last, or raises with the call still open."""
        if item.path is not None and item.ahead:
            return self._count(item, item.path, item.ahead, False, None)
        if self._is_over():
            return item.leave_in_ring(fired)
        control = item.control
        if not self._above_floor(control.free_floor_bytes):
            self._notices.warn("disk_floor", f"free space is under {control.free_floor_bytes} bytes: dropping dumps")
            return item.dropped("disk_floor", f"only {self._free} bytes free")
        from actordbg.formats import encoding  # with numpy: most processes never need it

        record, payload_bytes = self._describe(item, fired)
        blob = encoding.pack(record, payload_bytes)
        if fired is None and item.over_max_bytes(len(blob)):
            return None
        path = item.path = self._store.publish_dump(record, blob)
        if control.before:
            item.written = (record, payload_bytes)
        return self._count(item, path, len(blob), record.pinned, fired)

    def _count(self, item: Item, path: Path, nbytes: int, pinned: bool, fired: TriggerResult | None) -> None:
        """Close the books of an item whose file is published, and rotate."""
        item.captured(nbytes, fired.trigger if fired else None)
        if item.weights is not None and item.weights.copies is not None:
            self.publish_weights(item.ledger, item.weights)
        self._notices.over("disk_full", "write_error", "error", "disk_floor")
        if item.control.keep_bytes is not None:
            rotation = self._rotation(item.ledger)
            rotation.hold(path, item.weights)
            if not pinned:
                rotation.add(path, nbytes)
                rotation.apply(item.control.keep_bytes)

    def publish_weights(self, ledger: Ledger, weights: StepWeights) -> None:
        """Write the weights that a captured call met, unless an earlier call had them. A failure is told once."""
        try:
            record = weights.record(ledger.identity)
            path, data = self._store.root / WEIGHTS / record.run / record.name, record.to_json().encode()
            atomic_write(path, data)
            weights.path, weights.size = path, len(data)
        except BaseException as error:  # a disk, a lost device: the dump itself is stored
            if from_outside(error):
                raise
            self._notices.later_on("weights", f"weights are not recorded: {describe(error)}")
        weights.copies, weights.held = None, ()

    def _describe(self, item: Item, fired: TriggerResult | None) -> tuple[DumpRecord, bytes]:
        """Return the record and the payload to store."""
        from actordbg.formats import encoding

        self._versions = self._versions or versions()
        tensors = encoding.tensors_in(item.ring.arena.memory, item.entry.data, item.own, item.kind.tensors)
        record = encoding.record_of(item.kind.fields, item.own, tensors, self._versions, **item.known(fired))
        if item.control.with_outputs and item.outputs is not None:
            strides = item.outputs.strides
            tensors |= {name: encoding.of_torch(t, strides.get(name)) for name, t in item.outputs.tensors().items()}
            tensors.pop(OUTPUT_PREFIX + LOGITS_SUM, None)
        return encoding.serialize(record, tensors)

    def _lost(self, item: Item, error: Exception) -> None:
        """Warn that an item failed, and close its books if they are open."""
        error.__traceback__ = None
        if item.standing != OPEN:
            with self._notices.lock:
                self._notices.later += (("writer", error),)
            return
        reason = "error"
        if isinstance(error, OSError):
            reason = "disk_full" if error.errno in FULL_DISK else "write_error"
        if item.path is not None:
            item.captured(0, None)
        else:
            item.dropped(reason, describe(error))
        self._notices.warn(reason, f"a dump was lost: {describe(error)}; training continues")

    def free(self, item: Item) -> None:
        """Release an item's resources. If this raises, another call releases the rest."""
        with self.lock:
            self._bytes -= item.nbytes
            item.nbytes = 0
        if item.failed:
            item.ring.abandon(item.entry)
        while item.held > item.kept:
            item.ring.release(item.entry)
            item.held -= 1
        item.outputs = item.snapshot = None

    def _is_over(self) -> bool:
        """Check whether the time to write is over."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def _rotation(self, ledger: Ledger) -> Rotation:
        ledger.rotation = ledger.rotation or Rotation(self._store, ledger)
        return ledger.rotation

    def _above_floor(self, floor: int) -> bool:
        now = time.monotonic()
        if now - self._floor_checked >= _FLOOR_SECONDS:
            space = os.statvfs(self._store.root)
            self._free, self._floor_checked = space.f_bavail * space.f_frsize, now
        return self._free >= floor

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._published < PUBLISH_SECONDS:
            return
        on = self.control is not None
        beat = on != self._was_on or (on and now - self._heartbeat >= HEARTBEAT_SECONDS)
        if beat:
            self._heartbeat, self._was_on = now, on
        self._published = now
        self._publish("on" if on else "off", beat)
        if self.ring is not None and not self._queue:
            self.ring.trim()

    def _publish(self, state: str, heartbeat: bool = False) -> None:
        """Publish the counters of every changed ledger. A ledger that fails comes last next time."""
        self._publishing = True
        process, ledgers, first = self.process() | {"queue_bytes": self._bytes, "writer": self.kind}, self.watched(), self._turn
        for place in range(first, first + len(ledgers)):
            self._turn = (place + 1) % len(ledgers)
            ledger = ledgers[place % len(ledgers)]
            if not ledger.closed and ledger.actor() is None:
                ledger.closed = ledger.changed = True
            if ledger.changed or (heartbeat and not ledger.closed):
                ledger.publish(self._store, state, process)
                ring, number = self.ring, ledger.leave_book()
                if ring is not None and number >= 0:  # so that a job with a new run each night does not run out of books
                    ring.close_book(number)
            if ledger.done and ledger.actor() is None:
                with self.lock:
                    self._ledgers.remove(ledger)
        self._publishing = False
        self._notices.over("counters")
