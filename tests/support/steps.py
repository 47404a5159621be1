"""Work counted in steps, so that a test can bound it without a clock."""

import sys
from contextlib import contextmanager


class Steps:
    """Guarantees: `count` is the number of Python functions entered inside of `counted`, the same on any machine."""

    def __init__(self):
        self.count = 0

    def __call__(self, frame, event, argument):
        self.count += event == "call"


@contextmanager
def counted():
    """Count the functions that this thread enters in the block, even if it ends with an exception."""
    steps, before = Steps(), sys.getprofile()
    sys.setprofile(steps)
    try:
        yield steps
    finally:
        sys.setprofile(before)


class TickingClock:
    """A clock that a look moves on. Guarantees: `monotonic` is a second later with each call, and nothing else moves it."""

    def __init__(self):
        self.looks = 0

    def monotonic(self):
        """Seconds; each call counts as a look."""
        self.looks += 1
        return float(self.looks)
