"""How much a test takes of what has no end: kills, forks, faults, models. A sample in `make test`, all of it in `make whole`."""

import os
from typing import TypeVar

T = TypeVar("T")

WHOLE = bool(os.environ.get("WHOLE"))


def amount(sample, whole):
    """`sample` in `make test`, `whole` with WHOLE=1."""
    return whole if WHOLE else sample


def first_or_all(choices, count=1):
    """Returns the first of several slow variants (or the first `count`), and all of them with WHOLE=1."""
    return choices if WHOLE else choices[:count]
