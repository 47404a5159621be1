"""How much a test takes of what has no end: kills, forks, faults. A sample in `make test`, all of it in `make whole`."""

from __future__ import annotations

import os

WHOLE = bool(os.environ.get("WHOLE"))


def amount(sample: int, whole: int) -> int:
    """`sample` in `make test`, `whole` with WHOLE=1."""
    return whole if WHOLE else sample
