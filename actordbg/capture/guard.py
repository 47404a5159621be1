"""A debugger never harms the run: the broad `except` of the package, and how it speaks.

Whatever goes wrong inside the recorder (a bug of ours, memory, disk, a library) ends here and not in the training loop.
`attempt` runs a function and hands what it raised to `on_fault`. KeyboardInterrupt and SystemExit are the user's and pass.

Even calling a function may fail (MemoryError), `attempt` included. So where books, memory or threads depend on it, the same is
written out in place: in the wrapped `forward`, in `Recorder.enter`, `leave` and `close`, and in the loops of the two threads.
What such a place does last consists of assignments only. `tests/test_capture_faults.py` lets every call fail in turn.

`Notices` keeps the log readable: one warning when a kind of trouble begins, not one for each call, and none again until
that kind of trouble was over and a minute has passed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

REPEAT_SECONDS = 60.0
"""Least time between two warnings of one kind."""

_log = logging.getLogger("actordbg")


def attempt(action: Callable[[], T], on_fault: Callable[[Exception], object], otherwise: T) -> T:
    """`action()`, or `otherwise` after `on_fault(error)` if it raised. Raises nothing that is an Exception."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001  # the one broad except: see this module's docstring
        fault = error
    try:
        on_fault(fault)
    except Exception:  # noqa: BLE001  # counting the fault failed as well (no memory, for example): there is nothing left to do
        return otherwise
    return otherwise


class Notices:
    """Warnings for the training job's log, one for each change of state. `active`: the kinds of trouble that are there now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.active: set[str] = set()
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
