"""From the queue to the disk: a bounded queue and the one daemon thread that encodes, publishes and keeps the books.

The training thread only reserves bytes and puts. Everything slow is here: waiting for device copies, counting tokens,
narrowing, hashing, compressing (most of it outside the GIL), writing, fsync, renaming.

Invariants:

- The queue is bounded in *bytes* of copies, plain arguments included, and no call counts as less than ITEM_BYTES: so calls
  without tensors do not queue up for ever either. `reserve` says no when it is full; nobody ever waits for it.
- A call that got in is closed exactly once: captured, dropped with a reason, or sampled out by `max_bytes`.
- The thread outlives every error of an item. A stuck disk stops only this thread.
- `close` returns within its timeout: what is not written by then is dropped as `exit`, and counted.
- Counters files are replaced at most once a second while something changes, every 10 s otherwise (not while recording
  is off), and at the end.

A process that is killed loses what was in the queue. The thread writes as soon as something is there, so that is
normally the last call or none.
"""

from __future__ import annotations

import errno
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from actordbg import payload
from actordbg.capture.binding import Bound
from actordbg.capture.control import Control
from actordbg.capture.facts import ActorFacts, CallFacts, Rank, versions
from actordbg.capture.guard import Notices, attempt, describe
from actordbg.capture.ledger import Ledger
from actordbg.capture.snapshot import Snapshot
from actordbg.record import DumpRecord, make_dump_id
from actordbg.store import Store

QUEUE_BYTES = 256 * 2**20
"""Most bytes of copied tensors and arguments that wait to be written."""
ITEM_BYTES = 16 * 2**10
"""Least that a waiting call counts as, whatever it holds: so at most 16,384 of them wait."""
EXIT_SECONDS = 5.0
"""Longest time that the end of the process waits for the queue."""
PUBLISH_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
_FLOOR_SECONDS = 1.0
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class Item:
    """One call on its way to disk: its books, its switch, its copies, and the facts that its record needs."""

    ledger: Ledger
    control: Control
    number: int
    shape: tuple[int, int]
    bound: Bound
    call: CallFacts
    actor: ActorFacts
    rank: Rank
    role: str | None
    snapshot: Snapshot
    nbytes: int

    def record(self, tensors: dict[str, torch.Tensor], found_versions: dict[str, str]) -> DumpRecord:
        """The record of this call with these (complete) copies, all but what `payload.encode` fills in."""
        who, (batch, seq_len) = self.ledger.identity, self.shape
        attention, action = tensors.get("attention_mask"), tensors.get("action_mask")
        timestamp = self.call.timestamp
        return DumpRecord(
            dump_id=make_dump_id(timestamp, self.number, who.pid, secrets.token_hex(4)),
            run=who.run,
            rank=self.rank.rank,
            world_size=self.rank.world_size,
            local_rank=self.rank.local_rank,
            host=who.host,
            pid=who.pid,
            instance=who.instance,
            role=self.role,
            timestamp=timestamp,
            monotonic_ns=self.call.monotonic_ns,
            call_index=self.number,
            batch_size=batch,
            seq_len=seq_len,
            action_len=action.shape[-1] if action is not None and action.dim() else None,
            tokens=int(attention.count_nonzero()) if attention is not None else batch * seq_len,
            arguments=self.bound.arguments,
            process_groups=self.bound.groups,
            extra=self.bound.extra,
            replayable=not self.bound.extra and bool(seq_len),
            training=self.call.training,
            grad_enabled=self.call.grad_enabled,
            autocast_dtype=self.call.autocast_dtype,
            packing_samples=self.call.packing_samples,
            temperature=self.call.temperature,
            step=self.call.step,
            model_name=self.actor.model_name,
            model_dtype=self.actor.model_dtype,
            actor=self.actor.facts,
            versions=found_versions,
        )


class Publisher(Protocol):
    """What the writer asks of a store; `Store` is the real one, tests have slow and failing ones."""

    @property
    def root(self) -> os.PathLike[str]: ...

    def publish_dump(self, record: DumpRecord, blob: bytes) -> object: ...


class Writer:
    """The queue and its thread, of one process. Not used across a fork: the child makes a new one."""

    def __init__(
        self,
        store: Store,
        notices: Notices,
        *,
        publisher: Publisher | None = None,
        capacity: int = QUEUE_BYTES,
        still_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._publisher: Publisher = publisher or store
        self._notices = notices
        self._capacity = capacity
        self._still_on = still_on
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
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

    def reserve(self, nbytes: int) -> bool:
        """Take room for `nbytes` of copies; False, at once, if the queue is full."""
        with self._lock:
            if self._bytes + nbytes > self._capacity:
                return False
            self._bytes += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Give reserved room back."""
        with self._lock:
            self._bytes -= nbytes

    def put(self, item: Item) -> None:
        """Hand over an item whose bytes are reserved. Never waits."""
        self._queue.put(item)

    def watch(self, ledger: Ledger) -> None:
        """Publish this ledger's counters from now on."""
        with self._lock:
            self._ledgers.append(ledger)

    def start(self) -> bool:
        """Start the thread if it is not running. True if this call started it."""
        if self._thread is not None:
            return False
        with self._lock:
            if self._thread is not None:
                return False
            thread = threading.Thread(target=self._run, name="actordbg-writer", daemon=True)
            thread.start()
            self._thread = thread
            return True

    def close(self, timeout: float = EXIT_SECONDS) -> bool:
        """Write what is queued, as far as `timeout` seconds allow, publish the final counters, and stop. True if it did.

        A second call waits no longer than the first one promised (several exit handlers may call it).
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return True
        now = time.monotonic()
        if self._deadline is None:
            self._deadline, self._give_up = now + 0.8 * timeout, now + timeout
            self._queue.put(None)
        thread.join(max(0.0, self._give_up - now))
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=PUBLISH_SECONDS)
            except queue.Empty:
                attempt(self._tick, self._counters_fault, None)
                continue
            if item is None:
                break
            self._handle(item)
            del item
            attempt(self._tick, self._counters_fault, None)
        for ledger in self._watched():
            ledger.closed = ledger.changed = True
        attempt(lambda: self._publish(heartbeat=True), self._counters_fault, None)

    def _handle(self, item: Item) -> None:
        def fault(error: Exception) -> None:
            reason = _reason(error)
            item.ledger.drop(reason, describe(error))
            self._notices.warn(reason, f"a dump was lost: {describe(error)}; training goes on")

        try:
            attempt(lambda: self._write(item), fault, None)
            attempt(item.snapshot.release, lambda error: self._notices.warn("release", describe(error)), None)
        finally:
            self.release(item.nbytes)

    def _write(self, item: Item) -> None:
        """Encode and publish one item. Closes its call as the last thing it does, or raises with the call still open."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            return item.ledger.drop("exit", "the process ended before the queue was written")
        if not self._above_floor(item.control.free_floor_bytes):
            self._notices.warn(
                "disk_floor", f"free space is under {item.control.free_floor_bytes} bytes: dropping dumps"
            )
            return item.ledger.drop("disk_floor", f"only {self._free} bytes free")
        item.snapshot.wait()
        if self._versions is None:
            self._versions = versions()
        tensors = item.snapshot.tensors()
        record = item.record(tensors, self._versions)
        record, blob = payload.encode(record, tensors, item.control.level, item.snapshot.strides)
        if item.ledger.over_max_bytes(item.control, len(blob)):
            return None
        self._publisher.publish_dump(record, blob)
        item.ledger.capture(len(blob))
        self._notices.over("disk_full", "write_error", "error", "disk_floor")
        return None

    def _above_floor(self, floor: int) -> bool:
        now = time.monotonic()
        if now - self._floor_checked >= _FLOOR_SECONDS:
            space = os.statvfs(self._publisher.root)
            self._free, self._floor_checked = space.f_bavail * space.f_frsize, now
        return self._free >= floor

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._published < PUBLISH_SECONDS:
            return
        on = self._still_on()
        beat = on != self._was_on or (on and now - self._heartbeat >= HEARTBEAT_SECONDS)
        if beat:
            self._heartbeat, self._was_on = now, on
        self._published = now
        self._publish(beat)

    def _publish(self, heartbeat: bool) -> None:
        for ledger in self._watched():
            if ledger.changed or (heartbeat and not ledger.closed):
                ledger.publish(self._store, self._bytes, self._was_on)
        self._notices.over("counters")

    def _watched(self) -> list[Ledger]:
        with self._lock:
            return list(self._ledgers)

    def _counters_fault(self, error: Exception) -> None:
        self._notices.warn("counters", f"counters could not be published: {describe(error)}; training goes on")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return "disk_full" if error.errno in _FULL_DISK else "write_error"
    return "error"
