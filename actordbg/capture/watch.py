"""The thread that looks at the switch, so that the thread that trains never touches a file.

It looks twice a second, from the first call of an actor on. That call waits for the first look, which takes a millisecond, so
that a job whose switch is on records its very first call; if the store's file system hangs, at most FIRST_SECONDS, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actordbg.capture.control import POLL_SECONDS

FIRST_SECONDS = 5.0


class Watch:
    """Calls `look` every POLL_SECONDS in a daemon thread. Not used across a fork: the child makes a new one."""

    def __init__(self, look: Callable[[], None], on_fault: Callable[[Exception], object]) -> None:
        self._look, self._on_fault = look, on_fault
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
        """Guarded in place, since even calling a function may fail (MemoryError), and without this thread the switch is dead."""
        while not self._ended:
            fault: Exception | None = None
            for step in (self._look, self._looked.set, self._pause):
                try:
                    step()
                except Exception as error:  # noqa: BLE001  # see above
                    fault = error
            if fault is not None:
                try:
                    self._on_fault(fault)
                except Exception:  # noqa: BLE001  # it cannot be told
                    pass
                try:
                    time.sleep(POLL_SECONDS)  # it may be the pause that failed
                except Exception:  # noqa: BLE001  # there is nothing left to do
                    pass

    def _pause(self) -> None:
        self._stopped.wait(POLL_SECONDS)
