"""The books of one recording actor: every call is captured, dropped, sampled out, or still in the queue. Exactly.

    calls = captured + dropped + sampled_out + pending        at any moment, under the ledger's lock
    calls = captured + dropped + sampled_out                  once the process has ended in an orderly way

*Dropped* was wanted and lost (queue full, disk under its floor, write failed, ...); *sampled out* was not wanted, by a
limit that the user set (every, ranks, seq_len, max_dumps, max_bytes). A call made while recording is off is not a call
in these books. Both are kept by reason.

A ledger is published as one small JSON file per actor instance and process, replaced at most once a second by the
process's writer thread: `dump status` reads these files and never talks to the job.

    store/counters/<run>/<rank>-<host>-<pid>-<instance>.json
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.capture.control import Control
from actordbg.errors import CorruptDump
from actordbg.record import now_timestamp
from actordbg.store import Store, atomic_write

COUNTERS_FORMAT = 1


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

    `closed` says that no call will come any more (the run's name changed, or the process ends).
    """

    identity: Identity
    role: str | None = None
    since: str = field(default_factory=now_timestamp)
    calls: int = 0
    captured: int = 0
    bytes: int = 0
    pending: int = 0
    outputs_dropped: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    sampled_out: dict[str, int] = field(default_factory=dict)
    last_error: str | None = None
    generation: int = 0
    changed: bool = True
    closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _admitted_before: int = 0
    _eligible: int = 0
    _bytes_before: int = 0
    _bytes_full: bool = False

    def open(self, control: Control, seq_len: int | None) -> tuple[int, str | None]:
        """Count a call. Returns its number (from 0) and why it is sampled out, or None if it is to be recorded.

        In the second case it is pending until `capture` or `drop` closes it. `seq_len` is None where there is no telling.
        """
        with self._lock:
            self.changed = True
            if control.generation != self.generation:
                self._begin(control.generation)
            number = self.calls
            self.calls += 1
            reason = self._unwanted(control, seq_len)
            if reason is None:
                self.pending += 1
            else:
                self.sampled_out[reason] = self.sampled_out.get(reason, 0) + 1
            return number, reason

    def capture(self, nbytes: int) -> None:
        """Close a pending call: its file of `nbytes` is published."""
        with self._lock:
            self.pending -= 1
            self.captured += 1
            self.bytes += nbytes
            self.changed = True

    def drop(self, reason: str, error: str | None = None) -> None:
        """Close a pending call: it was wanted and is lost."""
        with self._lock:
            self.pending -= 1
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            self.last_error = error or self.last_error
            self.changed = True

    def over_max_bytes(self, control: Control, nbytes: int) -> bool:
        """Whether a file of `nbytes` would pass `max_bytes`; if so the pending call is closed as sampled out."""
        with self._lock:
            if control.max_bytes is None or control.generation != self.generation:
                return False
            if self.bytes - self._bytes_before + nbytes <= control.max_bytes:
                return False
            self._bytes_full = True
            self.pending -= 1
            self.sampled_out["max_bytes"] = self.sampled_out.get("max_bytes", 0) + 1
            self.changed = True
            return True

    def lost_outputs(self) -> None:
        """A call is kept, but its outputs are not."""
        with self._lock:
            self.outputs_dropped += 1
            self.changed = True

    def path(self, store: Store) -> Path:
        """Where the counters of this ledger are published."""
        who = self.identity
        return store.counters / who.run / f"{who.rank:04d}-{who.host}-{who.pid}-{who.instance}.json"

    def publish(self, store: Store, queue_bytes: int, on: bool) -> None:
        """Write the counters file; `queue_bytes` waits in the process's queue, `on` is the switch. OSError passes through."""
        with self._lock:
            self.changed = False
            text = json.dumps(self._as_dict(queue_bytes, on), sort_keys=True)
        try:
            atomic_write(self.path(store), text.encode())
        except OSError:
            self.changed = True
            raise

    def _begin(self, generation: int) -> None:
        """Limits count from the last `dump enable`."""
        self.generation = generation
        self._eligible = 0
        self._admitted_before = self.captured + self.pending
        self._bytes_before = self.bytes
        self._bytes_full = False

    def _unwanted(self, control: Control, seq_len: int | None) -> str | None:
        """Who may record comes first, then what; `every` counts only the calls that got so far."""
        if not control.admits_rank(self.identity.rank):
            return "ranks"
        if seq_len is not None and not control.admits_seq_len(seq_len):
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

    def _as_dict(self, queue_bytes: int, on: bool) -> dict[str, Any]:
        who = self.identity
        return {
            "format": COUNTERS_FORMAT,
            "run": who.run,
            "rank": who.rank,
            "world_size": who.world_size,
            "host": who.host,
            "pid": who.pid,
            "instance": who.instance,
            "role": self.role,
            "state": "ended" if self.closed and not self.pending else "on" if on else "off",
            "since": self.since,
            "heartbeat": now_timestamp(),
            "generation": self.generation,
            "calls": self.calls,
            "captured": self.captured,
            "bytes": self.bytes,
            "pending": self.pending,
            "queue_bytes": queue_bytes,
            "dropped": self.dropped,
            "sampled_out": self.sampled_out,
            "outputs_dropped": self.outputs_dropped,
            "last_error": self.last_error,
        }


def read_counters(path: Path) -> dict[str, Any]:
    """One published counters file, checked. Raises CorruptDump if it is not one (CorruptDump: skip and count)."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptDump(f"{path}: unreadable counters: {error}", hint="the next publication replaces it") from None
    numbers = ("rank", "pid", "calls", "captured", "bytes", "pending", "queue_bytes", "generation")
    texts = ("run", "host", "instance", "state", "since", "heartbeat")
    good = (
        isinstance(data, dict)
        and data.get("format") == COUNTERS_FORMAT
        and all(type(data.get(name)) is int for name in numbers)
        and all(isinstance(data.get(name), str) for name in texts)
        and all(isinstance(data.get(name), dict) for name in ("dropped", "sampled_out"))
    )
    if not good:
        raise CorruptDump(f"{path}: not a counters file of this version", hint="upgrade actordbg, or delete the file")
    return dict(data)
