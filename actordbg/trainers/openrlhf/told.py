"""Failures of what is recorded beside the calls: printed instead of raised, because the job continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from actordbg.base.fault import complain, describe

_told: set[str] = set()


@contextmanager
def told(what: str) -> Iterator[None]:
    """Print a failure, the first of its kind in this process."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # agents and weights may be of any kind
        if what not in _told:
            _told.add(what)
            complain(f"{what}: {describe(error)}")
