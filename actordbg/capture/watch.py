"""The watch thread, and what it tells the training job's log.

The thread looks at the switch twice a second, from the first call of an actor on, so that the thread that trains never touches a
file. That call waits for the first look, which takes a millisecond, so that a job whose switch is on records its very first
call; if the store's file system hangs, at most FIRST_SECONDS, once.

Whatever goes wrong inside the recorder (a bug of ours, memory, disk, a library) ends at one of a few edges: entering and leaving
a call (`actordbg.capture.hook`, `Recorder.enter`), a step of the writer thread or the watch thread, and the end of the process.
Even calling a function may fail (MemoryError), so an edge consists of assignments only. It puts the fault into `later`,
or the half-made call into `Writer.failed`; a thread finishes the books, and the watch thread tells.
`tests/capture/test_capture_faults.py` lets every call fail in turn. KeyboardInterrupt and SystemExit are the user's and pass.

One warning is given when a kind of trouble begins, not one for each call, and none again until that kind was over and a minute
has passed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from actordbg.base.errors import describe
from actordbg.capture.control import POLL_SECONDS

REPEAT_SECONDS = 60.0
"""Least time between two warnings of one kind."""
TEXTS = {
    "fault": "recording failed: {}; training goes on",
    "writer": "the writer had a fault: {}; it goes on",
    "counters": "counters could not be published: {}; training goes on",
}

_log = logging.getLogger("actordbg")


class Notices:
    """Warnings for the training job's log, one for each change of state.

    `active`: the kinds of trouble that are there now. `later`: faults (kind of TEXTS, error) still to be told; whoever adds one
    holds `lock`. `faults`: how many of the recorder's own were told.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.active: set[str] = set()
        self.lock = threading.Lock()
        self.later: tuple[tuple[str, BaseException], ...] = ()
        self.faults = 0
        self._said: dict[str, float] = {}

    def warn(self, kind: str, message: str) -> None:
        """This kind of trouble is there (still or again)."""
        now = self._clock()
        if kind in self.active or now - self._said.get(kind, float("-inf")) < REPEAT_SECONDS:
            return
        self.active.add(kind)
        self._said[kind] = now
        _log.warning("actordbg: %s", message)

    def over(self, *kinds: str) -> None:
        """These kinds of trouble have passed."""
        self.active.difference_update(kinds)

    def tell(self) -> None:
        """Give the warnings about faults that edges left here."""
        while self.later:
            kind, error = self.later[0]
            self.warn(kind, TEXTS[kind].format(describe(error)))
            with self.lock:
                self.later = self.later[1:]
                self.faults += kind == "fault"


FIRST_SECONDS = 5.0


class Watch:
    """Calls `look` every POLL_SECONDS in a daemon thread. Not used across a fork: the child makes a new one."""

    def __init__(self, look: Callable[[], None], notices: Notices) -> None:
        self._look, self._notices = look, notices
        self._looked, self._stopped = threading.Event(), threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run yet, and wait for its first look, for a moment at most."""
        with self._lock:
            if self._thread is None and not self._ended:
                thread = threading.Thread(target=self._run, name="actordbg-watch", daemon=True)
                thread.start()
                self._thread = thread
        self._looked.wait(FIRST_SECONDS)

    def stop(self) -> None:
        """No more looks."""
        self._ended = True
        self._stopped.set()

    def _run(self) -> None:
        """Its steps in turn. One that fails does not stop the next ones: without this thread the switch is dead."""
        steps = (self._look, self._looked.set, self._notices.tell, self._pause)
        at, stumbled = 0, False
        while not self._ended:
            try:
                if stumbled and at == 0:  # it may be the pause that failed
                    stumbled = False
                    time.sleep(POLL_SECONDS)
                at = (at + 1) % len(steps)
                steps[at - 1]()
            except Exception as error:  # noqa: BLE001  # an edge: assignments only
                error.__traceback__ = None
                stumbled = True
                if not self._notices.later:
                    with self._notices.lock:
                        self._notices.later += (("fault", error),)

    def _pause(self) -> None:
        self._stopped.wait(POLL_SECONDS)
