"""Failures of what is recorded beside the calls: printed instead of raised, because the job continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actordbg.base.fault import complain, describe, from_outside

_told: set[str] = set()


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print a failure, the first of its kind in this process."""
    try:
        yield
    except BaseException as error:  # agents and weights may be of any kind
        if from_outside(error):
            raise
        if what not in _told:
            _told.add(what)
            complain(f"{what}: {describe(error)}")
