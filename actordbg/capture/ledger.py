"""The books of one recording actor: every call is captured, dropped, sampled out, or still open. Exactly.

    calls = captured + dropped + sampled_out + pending        at any moment
    calls = captured + dropped + sampled_out                  once the process has ended in an orderly way, or, after
                                                              `dump recover`, in whatever way

*Dropped* was wanted and lost (queue full, disk under its floor, write failed, ...); *sampled out* was not wanted, by a
limit that the user set (every, ranks, seq_len, max_dumps, max_bytes), or because only triggers keep calls (`armed`) and none
fired. A call made while recording is off is not a call in these books. Both are kept by reason.

The sums hold whatever fails inside: what may raise comes first, and the counting itself is a few plain additions. The counts are
mirrored in the ring file as they change, so that a kill does not lose them. The writer thread publishes each ledger as one small
JSON file, which `dump status` reads: `store/counters/<run>/<rank>-<host>-<pid>-<instance>.json`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.capture.control import Control
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.ringfile import COUNTERS_FORMAT, PLACE
from actordbg.formats.store_files import StoreFiles, atomic_write

_serials = itertools.count()


@dataclass(frozen=True)
class Identity:
    """Whose books these are. `instance` is unique: an actor's number in its process, and the process's random token."""

    run: str
    rank: int
    world_size: int | None
    host: str
    pid: int
    instance: str


@dataclass
class Ledger:
    """Counts of one actor instance in one run. All methods are safe from any thread.

    `closed` says that no call will come any more (the run's name changed, or the process ends). `rotated` counts dumps that
    were captured and have made room for newer ones since; `triggered` counts captured calls by trigger. `faulted` counts
    dropped calls whose books could not be closed in any other way.
    """

    identity: Identity
    role: str | None = None
    since: str = field(default_factory=now_timestamp)
    calls: int = 0
    captured: int = 0
    bytes: int = 0
    outputs_dropped: int = 0
    rotated: int = 0
    rotated_bytes: int = 0
    faulted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    sampled_out: dict[str, int] = field(default_factory=dict)
    triggered: dict[str, int] = field(default_factory=dict)
    last_error: str | None = None
    generation: int = -1
    changed: bool = True
    closed: bool = False
    serial: int = field(default_factory=lambda: next(_serials))
    book: int = -1
    _mirror: memoryview | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _admitted_before: int = 0
    _eligible: int = 0
    _bytes_before: int = 0
    _bytes_full: bool = False
    _triggered_before: dict[str, int] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Calls that are neither captured nor dropped nor sampled out yet."""
        closed = self.captured + self.faulted + sum(self.dropped.values()) + sum(self.sampled_out.values())
        return self.calls - closed

    def names(self) -> dict[str, Any]:
        """Whose books these are, as the ring and the counters file say it."""
        return {**vars(self.identity), "role": self.role, "since": self.since}

    def mirror(self, number: int, counts: memoryview | None) -> None:
        """Keep the counts in a ring's books from now on, too. `number`: of the book there."""
        with self._lock:
            self.book, self._mirror = number, counts
            if counts is None:
                return
            for name, value in (("calls", self.calls), ("captured", self.captured), ("bytes", self.bytes)):
                counts[PLACE[name]] = value
            for kind, reasons in (("dropped", self.dropped), ("sampled_out", self.sampled_out)):
                for reason, value in reasons.items():
                    counts[_place(kind, reason)] += value

    def leave_mirror(self) -> int:
        """Give up the book if no call will come and all is published: its number, or -1 if it is needed or there is none."""
        with self._lock:
            if not self.closed or self.changed or self.pending:
                return -1
            number, self.book, self._mirror = self.book, -1, None
            return number

    def open(self, control: Control, seq_len: int | None) -> tuple[int, str | None]:
        """Count a call. Returns its number (from 0) and why it is sampled out, or None if it is to be recorded.

        In the second case it is pending until `capture`, `drop` or `sample` closes it. `seq_len` is None where there is no
        telling. If it raises, nothing is counted.
        """
        with self._lock:
            if control.generation != self.generation:
                self._begin(control.generation)
            reason = self._unwanted(control, seq_len)
            number, mirror = self.calls, self._mirror
            if reason is None:
                self.changed, self.calls = True, number + 1
                if mirror is not None:
                    mirror[0] = number + 1
                return number, None
            count, place = self.sampled_out.get(reason, 0) + 1, _place("sampled_out", reason)
            self.changed, self.calls = True, number + 1
            self.sampled_out[reason] = count
            if mirror is not None:
                mirror[0] = number + 1
                mirror[place] += 1
            return number, reason

    def lost(self, calls: int, reason: str, error: str | None = None) -> None:
        """Count calls that were not even opened, because the recorder itself failed."""
        with self._lock:
            self._close("dropped", self.dropped, reason, calls)
            self.calls += calls
            if self._mirror is not None:
                self._mirror[0] = self.calls
            self.last_error = error or self.last_error

    def capture(self, nbytes: int, trigger: str | None = None) -> None:
        """Close a pending call: its file of `nbytes` is published."""
        with self._lock:
            if trigger is not None:
                self.triggered[trigger] = self.triggered.get(trigger, 0) + 1
            self.captured += 1
            self.bytes += nbytes
            self.changed = True
            if self._mirror is not None:
                self._mirror[1] = self.captured
                self._mirror[2] = self.bytes

    def drop(self, reason: str, error: str | None = None) -> None:
        """Close a pending call: it was wanted and is lost."""
        with self._lock:
            self._close("dropped", self.dropped, reason, 1)
            self.last_error = error or self.last_error

    def promote(self, reason: str) -> None:
        """A call that was sampled out for this reason is wanted after all: it is pending again."""
        with self._lock:
            self._close("sampled_out", self.sampled_out, reason, -1)

    def admits_trigger(self, control: Control, trigger: str) -> bool:
        """Whether one more call may be kept for this trigger, since the last `dump enable`."""
        with self._lock:
            if control.max_triggered is None or control.generation != self.generation:
                return control.max_triggered is None or control.max_triggered > 0
            return self.triggered.get(trigger, 0) - self._triggered_before.get(trigger, 0) < control.max_triggered

    def over_max_bytes(self, control: Control, nbytes: int) -> bool:
        """Whether a file of `nbytes` would pass `max_bytes`; if so the pending call is closed as sampled out."""
        with self._lock:
            if control.max_bytes is None or control.generation != self.generation:
                return False
            if self.bytes - self._bytes_before + nbytes <= control.max_bytes:
                return False
            self._bytes_full = True
            self._close("sampled_out", self.sampled_out, "max_bytes", 1)
            return True

    def rotate(self, nbytes: int, files: int = 1) -> None:
        """A captured file of `nbytes` made room for newer ones (or is back: -nbytes, -1)."""
        with self._lock:
            self.rotated += files
            self.rotated_bytes += nbytes
            self.changed = True

    def lost_outputs(self) -> None:
        """A call is kept, but its outputs are not."""
        with self._lock:
            self.outputs_dropped += 1
            self.changed = True

    def path(self, store: StoreFiles) -> Path:
        """Where the counters of this ledger are published."""
        who = self.identity
        return counters_path(store, who.run, who.rank, who.host, who.pid, who.instance)

    def publish(self, store: StoreFiles, on: bool, process: dict[str, Any]) -> None:
        """Write the counters file. `on` is the switch, `process` what is said of the whole process. OSError passes through."""
        with self._lock:
            data = self._as_dict(on)
            self.changed = False
        saved = False
        try:
            atomic_write(self.path(store), json.dumps(data | process, sort_keys=True).encode())
            saved = True
        finally:
            self.changed = self.changed or not saved

    def _close(self, kind: str, reasons: dict[str, int], reason: str, by: int) -> None:
        place, count = _place(kind, reason), reasons.get(reason, 0) + by
        self.changed = True
        reasons[reason] = count
        if self._mirror is not None:
            self._mirror[place] += by

    def _begin(self, generation: int) -> None:
        """Limits count from the last `dump enable`."""
        admitted = self.captured + self.pending
        before = dict(self.triggered)
        self.generation, self._eligible, self._admitted_before = generation, 0, admitted
        self._bytes_before, self._bytes_full, self._triggered_before = self.bytes, False, before

    def _unwanted(self, control: Control, seq_len: int | None) -> str | None:
        """Who may record comes first, then what; `every` counts only the calls that got so far."""
        if control.ranks is not None and self.identity.rank not in control.ranks:
            return "ranks"
        low, high = control.min_seq_len, control.max_seq_len
        if seq_len is not None and (seq_len < (low or 0) or (high is not None and seq_len > high)):
            return "seq_len"
        if not control.every:
            return "armed"
        self._eligible += 1
        if (self._eligible - 1) % control.every:
            return "every"
        if control.max_dumps is not None and self.captured + self.pending - self._admitted_before >= control.max_dumps:
            return "max_dumps"
        full = self._bytes_full or control.max_bytes == 0
        return "max_bytes" if full and control.max_bytes is not None else None

    def _as_dict(self, on: bool) -> dict[str, Any]:
        pending, dropped = self.pending, dict(self.dropped)
        if self.faulted:
            dropped["error"] = dropped.get("error", 0) + self.faulted
        plain = ("calls", "captured", "bytes", "rotated", "rotated_bytes", "outputs_dropped", "last_error")
        return {
            "format": COUNTERS_FORMAT,
            **self.names(),
            **{name: getattr(self, name) for name in plain},
            "state": "ended" if self.closed and not pending else "on" if on else "off",
            "heartbeat": now_timestamp(),
            "generation": max(self.generation, 0),
            "pending": pending,
            "dropped": {reason: count for reason, count in dropped.items() if count},
            "sampled_out": {reason: count for reason, count in self.sampled_out.items() if count},
            "triggered": dict(self.triggered),
        }


def counters_path(store: StoreFiles, run: str, rank: int, host: str, pid: int, instance: str) -> Path:
    """Where the counters of one actor instance lie."""
    return store.counters / run / f"{rank:04d}-{host}-{pid}-{instance}.json"


def _place(kind: str, reason: str) -> int:
    """Where the count of a reason lies in a ring's books."""
    place = PLACE.get(f"{kind}.{reason}")
    return PLACE[f"{kind}.other"] if place is None else place


COUNT_SECONDS = 10.0
"""How old the count of the run's actors may be."""
REMEMBERED = 256
"""Removed files that a trigger may still want back (`--before`)."""


@dataclass
class Rotation:
    """Lets the run's dumps take at most so much (`dump enable --keep 10GB`): the oldest unpinned ones of this ledger go first.

    Ranks do not talk to each other, so each actor holds itself to its share: the whole, divided by the number of actors of the
    run that publish counters. What a trigger pinned stays, and does not count. `removed`: the last ones that made room.
    """

    store: StoreFiles
    ledger: Ledger
    files: deque[tuple[Path, int]] = field(default_factory=deque)
    bytes: int = 0
    removed: deque[tuple[Path, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _actors: int = 1
    _counted: float = float("-inf")

    def add(self, path: Path, nbytes: int) -> None:
        """One more file."""
        self.files.append((path, nbytes))
        self.bytes += nbytes

    def spare(self, path: Path) -> None:
        """This file is pinned after all; if it was removed already, it has just been written again."""
        for item in self.files:
            if item[0] == path:
                self.files.remove(item)
                self.bytes -= item[1]
                return
        for item in self.removed:
            if item[0] == path:
                self.ledger.rotate(-item[1], -1)
                self.removed.remove(item)
                return

    def apply(self, keep_bytes: int) -> None:
        """Remove the oldest until this actor's share holds; the newest always stays."""
        share = keep_bytes // self._count_actors()
        while self.bytes > share and len(self.files) > 1:
            path, nbytes = self.files[0]
            self.removed.append((path, nbytes))
            with contextlib.suppress(FileNotFoundError):  # packed or pruned meanwhile
                os.unlink(path)
            self.ledger.rotate(nbytes)
            del self.files[0]  # last: what failed half way is tried again
            self.bytes -= nbytes

    def _count_actors(self) -> int:
        now = time.monotonic()
        if now - self._counted > COUNT_SECONDS:
            self._counted = now
            with contextlib.suppress(OSError):
                names = os.listdir(self.ledger.path(self.store).parent)
                self._actors = max(1, sum(name.endswith(".json") and name[0] != "." for name in names))
        return self._actors
