"""How much a test takes of what has no end: kills, forks, faults. A sample in `make test`, all of it in `make whole`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

T = TypeVar("T")

WHOLE = bool(os.environ.get("WHOLE"))


def amount(sample: int, whole: int) -> int:
    """`sample` in `make test`, `whole` with WHOLE=1."""
    return whole if WHOLE else sample


def turn(choices: Sequence[T]) -> Sequence[T]:
    """One of several long ways of the same, another each day; all of them with WHOLE=1."""
    today = date.today().toordinal() % len(choices)
    return choices if WHOLE else choices[today : today + 1]
