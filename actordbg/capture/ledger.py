"""The books of one recording actor: every call is captured, dropped, sampled out, or in the ring. Exactly.

    calls = captured + dropped + sampled_out + pending        at any moment

*Pending* calls are in the ring, waiting to be written, even after their process ended without time to write them. *Dropped*
calls were selected and lost (queue full, disk almost full, write failed, ...). *Sampled out* calls were excluded by a limit
that the user set (every, ranks, seq_len, max_dumps, max_bytes), or because only triggers keep calls (`armed`) and none fired.
Both are counted by reason. A call made while recording is off is not counted at all.

The counts are one row of numbers (`ringfile.COUNTS`). They live in the ring's books, so that a kill does not lose them, or in
private memory if the ring is full. Counting is a few plain additions, so the sums hold whatever fails. The writer thread
publishes each ledger as a small JSON file, which `dump status` reads: `store/counters/<run>/<rank>-<host>-<pid>-<instance>.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.capture.control import Control
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.ringfile import CLOSED, COUNTERS_FORMAT, COUNTS, DROPPED, PLACE, pending, totals
from actordbg.formats.store_files import FULL_DISK, StoreFiles, atomic_write, overwrite, remove
from actordbg.formats.weight_hashes import StepWeights

PAGE = 4096
"""Least size of a counters file, in bytes."""


@dataclass(frozen=True)
class Identity:
    """The owner of a ledger. `instance` is unique: the actor's number in its process, and the process's random token."""

    run: str
    rank: int
    world_size: int | None
    host: str
    pid: int
    instance: str

    def counters(self, store: StoreFiles) -> Path:
        """Return the path of this actor instance's counters file."""
        return store.counters / self.run / f"{self.rank:04d}-{self.host}-{self.pid}-{self.instance}.json"


def _total(name: str) -> Any:
    return property(lambda ledger: totals(ledger.counts)[name])


@dataclass(eq=False)
class Ledger:
    """Counts of one actor instance in one run. All methods are thread-safe.

    `closed`: no more calls will come (the run's name changed, the process ends, or `actor`, a weak reference, is gone).
    `times`: seconds of the last calls, by kind of call (`recorded_call.trigger_of`). `rotated` counts captured dumps that were
    removed for newer ones, `triggered` captured calls by trigger.
    """

    identity: Identity
    role: str | None = None
    since: str = field(default_factory=now_timestamp)
    counts: memoryview = field(default_factory=lambda: memoryview(bytearray(8 * len(COUNTS))).cast("Q"))
    last_error: str | None = None
    generation: int = -1
    changed: bool = True
    closed: bool = False
    actor: Callable[[], object] = lambda: True
    rotation: Rotation | None = None
    times: dict[Any, deque[float]] = field(default_factory=dict)
    book: int = -1
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _before: tuple[int, ...] = (0,) * len(COUNTS)
    """The counts at the last `dump enable`: limits count from there."""
    _eligible: int = 0
    _bytes_full: bool = False

    calls, captured, bytes = map(_total, ("calls", "captured", "bytes"))
    outputs_dropped, rotated, rotated_bytes = map(_total, ("outputs_dropped", "rotated", "rotated_bytes"))
    dropped, sampled_out, triggered = map(_total, ("dropped", "sampled_out", "triggered"))

    @property
    def pending(self) -> int:
        """Return the number of calls in the ring: neither captured, dropped nor sampled out."""
        return pending(self.counts)

    def names(self) -> dict[str, Any]:
        """Return the owner's fields, as the ring and the counters file store them."""
        return {**vars(self.identity), "role": self.role, "since": self.since}

    def move(self, number: int, counts: memoryview | None) -> None:
        """Count in book `number` of a ring from now on (`counts`); in private memory if `counts` is None."""
        with self._lock:
            counts = counts or memoryview(bytearray(self.counts.nbytes)).cast("Q")
            counts[:] = self.counts
            self.book, self.counts = number, counts

    @property
    def done(self) -> bool:
        """Check whether no more calls will come and everything is published."""
        return self.closed and not self.changed and not self.pending

    def leave_book(self) -> int:
        """Give up the ring's book if the ledger is done. Returns its number, or -1 if it is still needed or there is none."""
        number = self.book if self.done else -1
        if number >= 0:
            self.move(-1, None)
        return number

    def open(self, control: Control, seq_len: int | None, opened: list[Any] | None = None) -> tuple[int, str | None]:
        """Count a call. Returns its number (from 0) and the reason it is sampled out, None if it is to be recorded.

        A call to be recorded is pending until `capture` or `drop` closes it. `opened` gets the answer, once it is counted.
        """
        with self._lock:
            if control.generation != self.generation:
                before = tuple(self.counts)
                self.generation, self._before, self._eligible, self._bytes_full = control.generation, before, 0, False
            reason = None if control.unlimited else self._unwanted(control, seq_len)
            place, counts = PLACE["sampled_out." + reason] if reason else -1, self.counts
            opened = [] if opened is None else opened
            self.changed, number = True, counts[0]
            counts[0] = number + 1  # no signal comes between these assignments
            if place >= 0:
                counts[place] += 1
            opened[:] = number, reason
            return number, reason

    def capture(self, nbytes: int, trigger: str | None = None) -> None:
        """Close a pending call: its file of `nbytes` is published."""
        with self._lock:
            if trigger is not None:
                self._add(f"triggered.{trigger}", 1)
            self.counts[1] += 1
            self.counts[2] += nbytes
            self.changed = True

    def drop(self, reason: str, error: str | None = None, unopened: int = 0, item: Any = None) -> None:
        """Close a pending call, that of `item`, as lost; or count `unopened` calls that the recorder itself failed to open."""
        with self._lock:
            self._add(f"dropped.{reason}", unopened or 1)
            if item is not None:
                item.standing, item.reason = DROPPED, reason
            self.counts[0] += unopened
            self.last_error = error or self.last_error

    def promote(self, reason: str) -> None:
        """Reopen a call that was sampled out for this reason: it is pending again."""
        with self._lock:
            self._add(f"sampled_out.{reason}", -1)

    def admits_trigger(self, control: Control, trigger: str) -> bool:
        """Check whether this trigger may keep one more call since the last `dump enable`."""
        with self._lock:
            place, most = PLACE[f"triggered.{trigger}"], control.max_triggered
            kept = self.counts[place] - self._before[place] if control.generation == self.generation else 0
            return most is None or kept < most

    def over_max_bytes(self, control: Control, nbytes: int) -> bool:
        """Check whether a file of `nbytes` would exceed `max_bytes`; if so, close the pending call as sampled out."""
        with self._lock:
            if control.max_bytes is None or control.generation != self.generation:
                return False
            if self.counts[2] - self._before[2] + nbytes <= control.max_bytes:
                return False
            self._bytes_full = True
            self._add("sampled_out.max_bytes", 1)
            return True

    def rotate(self, nbytes: int, files: int = 1) -> None:
        """Count a captured file of `nbytes` that was removed for newer ones (or restored: -nbytes, -1)."""
        with self._lock:
            self._add("rotated", files)
            self._add("rotated_bytes", nbytes)

    def lost_outputs(self) -> None:
        """Count a call that is kept without its outputs."""
        with self._lock:
            self._add("outputs_dropped", 1)

    def publish(self, store: StoreFiles, state: str, process: dict[str, Any]) -> None:
        """Write the counters file. `state`: on, off or ended; `process`: facts of the process. OSError passes through.

        A full disk has no room for a new file, so the existing one is overwritten: it has a whole page from the beginning.
        """
        with self._lock:
            self.counts[CLOSED] = self.closed or state == "ended"
            counters = {
                "format": COUNTERS_FORMAT,
                **self.names(),
                **totals(self.counts),
                "last_error": self.last_error,
                "state": "ended" if self.closed and not self.pending else state,
                "heartbeat": now_timestamp(),
                "generation": max(self.generation, 0),
            }
            text = json.dumps(counters | process, sort_keys=True).encode().ljust(PAGE)
            self.changed = False
        path, saved = self.identity.counters(store), False
        try:
            try:
                atomic_write(path, text)
            except OSError as error:
                if error.errno not in FULL_DISK or not path.exists():
                    raise
                overwrite(path, text)
            saved = True
        finally:
            self.changed = self.changed or not saved

    def _add(self, name: str, by: int) -> None:
        self.changed = True
        self.counts[PLACE[name]] += by

    def _unwanted(self, control: Control, seq_len: int | None) -> str | None:
        """Return the limit that excludes a call, or None. Ranks come first; `every` counts only calls that pass the others."""
        if control.ranks is not None and self.identity.rank not in control.ranks:
            return "ranks"
        if seq_len is not None and seq_len < (control.min_seq_len or 0):
            return "seq_len"
        if not control.every:
            return "armed"
        self._eligible += 1
        if (self._eligible - 1) % control.every:
            return "every"
        if control.max_dumps is not None:  # without a limit nothing is summed: this runs within the training step
            kept, before = (pending(counts) + counts[1] for counts in (self.counts, self._before))
            if kept - before >= control.max_dumps:
                return "max_dumps"
        full = self._bytes_full or control.max_bytes == 0
        return "max_bytes" if full and control.max_bytes is not None else None


COUNT_SECONDS = 10.0
"""Longest time that the count of the run's actors is cached."""
REMEMBERED = 256
"""Removed files that a trigger may still restore (`--before`)."""


@dataclass
class Rotation:
    """Limit the size of the run's dumps (`dump enable --keep 10GB`) by removing the oldest unpinned dumps of this ledger.

    Ranks do not talk to each other, so each actor keeps to its share: the limit divided by the number of actors of the run that
    publish counters. Dumps that a trigger pinned stay, and do not count. `removed`: the last removed files. `weights`: by dump,
    the file of its step's weights, which goes with the last dump that has it; `held`: how many have each.
    """

    store: StoreFiles
    ledger: Ledger
    files: dict[Path, int] = field(default_factory=dict)
    bytes: int = 0
    removed: dict[Path, int] = field(default_factory=dict)
    weights: dict[Path, StepWeights] = field(default_factory=dict)
    held: Counter[Path] = field(default_factory=Counter)
    _actors: int = 1
    _counted: float = float("-inf")

    def add(self, path: Path, nbytes: int) -> None:
        """Add a file to the rotation."""
        self.files[path] = nbytes
        self.bytes += nbytes

    def hold(self, path: Path, weights: StepWeights | None) -> None:
        """Note the weights of a dump, pinned or not; the first that has them adds their size."""
        if weights is not None and weights.path is not None:
            self.weights[path] = weights
            self.bytes += weights.size if not self.held[weights.path] else 0
            self.held[weights.path] += 1

    def _release(self, path: Path) -> None:
        weights = self.weights.pop(path, None)
        if weights is not None:
            self.held[weights.path] -= 1
            if not self.held[weights.path]:
                remove(weights.path)
                del self.held[weights.path]
                self.bytes -= weights.size

    def spare(self, path: Path) -> None:
        """Exempt a file that was pinned later; if it had been removed, it has just been rewritten."""
        if path in self.files:
            self.bytes -= self.files[path]
            del self.files[path]
        elif path in self.removed:
            self.ledger.rotate(-self.removed[path], -1)
            del self.removed[path]

    def apply(self, keep_bytes: int) -> None:
        """Remove the oldest files until this actor's share holds; the newest always stays."""
        now = time.monotonic()
        if now - self._counted > COUNT_SECONDS:
            self._counted = now
            with contextlib.suppress(OSError):
                names = os.listdir(self.ledger.identity.counters(self.store).parent)
                self._actors = max(1, sum(name.endswith(".json") and name[0] != "." for name in names))
        share = keep_bytes // self._actors
        while self.bytes > share and len(self.files) > 1:
            path, nbytes = next(iter(self.files.items()))
            self.removed[path] = nbytes
            if len(self.removed) > REMEMBERED:
                del self.removed[next(iter(self.removed))]
            remove(path)  # it may be packed or pruned meanwhile
            self.ledger.rotate(nbytes)
            del self.files[path]  # last: a removal that failed half way is retried
            self.bytes -= nbytes
            self._release(path)
