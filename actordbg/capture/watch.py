"""The watch thread, and its warnings in the training job's log.

The thread polls the switch twice a second, so that the training thread never touches a file. An actor's first call waits for the
first poll, which takes a millisecond, so that a job whose switch is on records its very first call; if the store's file system
hangs, it waits at most FIRST_SECONDS, once. The thread also makes and removes the ring (`RingKeeper`).

Every failure inside the recorder (a bug of ours, memory, disk, a library) is caught at one of a few edges: entering and leaving
a call (`actordbg.capture.hook`, `Recorder.enter`), a step of the writer thread or the watch thread, and the end of the process.
Even calling a function may fail (MemoryError), so an edge consists of assignments only. It puts the fault into `later`,
or the half-made call into `Writer.failed`; a thread closes the books, and the watch thread warns.
`tests/capture/test_capture_faults.py` makes every call fail in turn. What comes from outside passes (`base.fault.from_outside`):
Ctrl-C, an exit, what a signal handler raises. No handler runs between two assignments, so they mark what is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actordbg import __version__
from actordbg.base.fault import describe
from actordbg.capture.control import POLL_SECONDS, Control
from actordbg.capture.facts import versions
from actordbg.capture.ring import Ring
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.ringfile import MOST_OLD, forget_old, place, wanted_place
from actordbg.formats.store_files import StoreFiles, make_folder, processes

REPEAT_SECONDS = 60.0
"""Least time between two warnings of one kind."""
TEXTS = {
    "fault": "recording failed: {}; training continues",
    "writer": "the writer failed: {}; it continues",
    "counters": "counters could not be published: {}; training continues",
    "queue_full": "dropping dumps (queue full); training continues",
    "cuda_graph": "dropping dumps (cuda graph); training continues",
}

_log = logging.getLogger("actordbg")


class Notices:
    """Warnings for the training job's log: one when a problem begins, and none until it was over and a minute has passed.

    `active`: kinds of problems that persist. `later`: (kind, error or text) still to be reported; hold `lock` to add one.
    `faults`: how many of the recorder's own faults were reported.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.active: set[str] = set()
        self.lock = threading.Lock()
        self.later: tuple[tuple[str, BaseException | str], ...] = ()
        self.faults = 0
        self._said: dict[str, float] = {}

    def warn(self, kind: str, message: str) -> None:
        """Warn of a kind of problem, unless it is active or was warned of less than REPEAT_SECONDS ago."""
        now = self._clock()
        if kind in self.active or now - self._said.get(kind, float("-inf")) < REPEAT_SECONDS:
            return
        self.active.add(kind)
        self._said[kind] = now
        _log.warning("actordbg: %s", message)

    def later_on(self, kind: str, why: BaseException | str = "") -> None:
        """Let the watch thread warn: the training thread does not write into a log, which might wait, or swallow an exception."""
        with self.lock:
            if kind not in self.active and all(kind != known for known, _ in self.later):
                self.later += ((kind, why),)

    def over(self, *kinds: str) -> None:
        """Mark these kinds of problems as over."""
        self.active.difference_update(kinds)

    def tell(self) -> None:
        """Warn of the faults that edges left in `later`."""
        while self.later:
            kind, why = self.later[0]
            self.warn(kind, TEXTS.get(kind, "{}").format(why if isinstance(why, str) else describe(why)))
            with self.lock:
                self.later = self.later[1:]
                self.faults += kind == "fault"


FIRST_SECONDS = 5.0


class Watch:
    """Calls `look` every POLL_SECONDS in a daemon thread. Not used across a fork: the child makes a new one."""

    def __init__(self, look: Callable[[], None], notices: Notices) -> None:
        self._look, self._notices = look, notices
        self._looks, self._stopped = 0, threading.Event()
        self._ended, self._runs, self._lock = False, False, threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, again: bool = False) -> None:
        """Start the thread if it does not run yet, and wait at most FIRST_SECONDS for its first poll, or its next one."""
        seen, until = self._looks if again else 0, time.monotonic() + FIRST_SECONDS
        with self._lock:
            if self._thread is None and not self._ended:
                thread = threading.Thread(target=self._run, name="actordbg-watch", daemon=True)
                thread.start()
                self._thread = thread
        while self._looks == seen and not self._ended and time.monotonic() < until:
            time.sleep(0.0005)  # no threading.Event: if a signal handler raises in its `wait`, its lock stays locked

    def stop(self) -> None:
        """Stop polling, and wait at most a second for the poll in progress: it may be making a ring."""
        self._ended = True
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        """Run the steps in turn. A failing step does not stop the next: without this thread the switch would be dead."""
        with self._lock:
            if self._runs:  # a signal handler raised while the first thread was started, so that a second one was
                return
            self._runs = True
        steps = (self._look, self._notices.tell, lambda: self._stopped.wait(POLL_SECONDS))
        at, stumbled = 0, False
        while not self._ended:
            try:
                if stumbled and at == 0:  # it may be the pause that failed
                    stumbled = False
                    time.sleep(POLL_SECONDS)
                self._looks += at == 1
                at = (at + 1) % len(steps)
                steps[at - 1]()
            except Exception as error:  # noqa: BLE001  # an edge: assignments only
                error.__traceback__ = None
                stumbled = True
                if not self._notices.later:
                    with self._notices.lock:
                        self._notices.later += (("fault", error),)


class RingKeeper:
    """Makes and removes the ring of one process.

    The ring's file remains if the process was killed or ended with an uncaught exception, or if it holds data stored nowhere else
    (a call that raised or could not be written in time, or counts that could not be published).
    """

    def __init__(self, store: StoreFiles, host: str, token: str, notices: Notices) -> None:
        self._store, self._host, self._token, self._notices = store, host, token, notices
        self._ring: Ring | None = None
        self._wanted: tuple[Any, ...] | None = None
        self._made, self._incomplete, self._untold = 0, False, False
        self.asked: Control | None = None

    def ring_for(self, control: Control, queued: int, untold: bool = False) -> Ring:
        """Return the ring that a switch asks for; never fails. The caller removes the one before.

        `untold`: counters cannot be published, so it needs a file.
        """
        self._untold, self.asked = self._untold or untold, control
        requested = (control.ring > 0 or self._untold, control.ring_bytes, control.ring_dir)
        if self._ring is None or requested != self._wanted:
            self._ring, self._wanted = self._make(control, queued), requested
        self._ring.keep = control.ring if self._ring.path is not None else 0
        return self._ring

    def complete(self) -> None:
        """Add the versions to the ring's header, which take some milliseconds to read."""
        if self._ring is not None and self._ring.path is not None and self._incomplete:
            self._incomplete = False
            self._ring.describe(self._facts() | {"versions": versions()})
            self._notices.over("ring")
            if len(os.listdir(self._ring.path.parent)) > MOST_OLD:
                forget_old(self._ring.path.parent)

    def about(self) -> dict[str, Any] | None:
        """Return the facts of the ring for the counters; None without a file."""
        ring = self._ring
        if ring is None or ring.path is None:
            return None
        facts = {"path": str(ring.path), "keeps": ring.keep, "bytes": ring.arena.limit, "missed": ring.missed}
        running = ring.running
        began = [struct.unpack_from("<q", ring.arena.memory, entry.offset + 16)[0] for entry in running[:1]]  # its third number
        seconds = round((time.monotonic_ns() - began[0]) / 1e9, 3) if began else None
        return facts | {"in_flight": len(running), "in_flight_s": seconds}

    def forked(self) -> None:
        """Leave the ring to the parent, in a forked child, also before it is used."""
        if self._ring is not None:
            self._ring.let_go()

    def close(self, stopped: bool, published: bool) -> Path | None:
        """Remove the ring's file at the end of the process, unless it is worth keeping. Returns its path if it stays.

        `stopped`: the writer has ended; if not, it may still write, so the ring stays held. `published`: the counters are.
        """
        ring, kept = self._ring, True
        if ring is None or ring.path is None:
            return None
        try:
            kept = getattr(sys, "last_value", None) is not None or not stopped or ring.is_worth_keeping() or not published
        finally:
            if not kept:
                ring.remove()
            elif stopped:
                ring.let_go()
        return ring.path if kept else None

    def _make(self, control: Control, queued: int) -> Ring:
        if not control.ring and not self._untold:
            return Ring.private(control.ring_bytes, queued)
        preferred = wanted_place(self._store, control.ring_dir)
        with contextlib.suppress(OSError):
            make_folder(preferred)  # before it is checked, so that nobody else can make it
        folder = place(self._store, control.ring_dir)
        if folder != preferred:
            self._notices.warn("ring", f"others own {preferred} or may write to it: the ring is in {folder}")
        self._made += 1
        name = f"{self._host}-{os.getpid()}-{self._token}-{self._made}"
        try:
            ring = Ring.create(folder, name, self._facts(), control.ring_bytes, queued)
        except Exception as error:  # noqa: BLE001  # whatever it is, calls are recorded without a ring
            self._notices.warn("ring", f"no ring in {folder}: {describe(error)}; the inputs of a killed process will be lost")
            return Ring.private(control.ring_bytes, queued)
        self._incomplete = True
        return ring

    def _facts(self) -> dict[str, Any]:
        return {
            "store": str(self._store.root),
            "host": self._host,
            "pid": os.getpid(),
            "processes": processes(),
            "made": now_timestamp(),
            "actordbg": __version__,
            "stderr": os.path.realpath("/proc/self/fd/2")[:1024],  # a Ray worker's is next to Ray's log of its end
        }
