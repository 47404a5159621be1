"""Does a series fall? A robust answer, and how it was found.

The median of the first third of the values against the median of the last third. Half of a third may be wild without moving
its median. The change counts where it is more than twice its own standard error, estimated from how far neighbouring steps
are apart: sigma = 1.4826 x median |x[i+1] - x[i]| / sqrt(2) (a scale that neither trend nor outliers inflate much), and the
difference of two medians of m values each has the standard error 1.2533 x sigma x sqrt(2 / m).

Example::

    trend([5.0, 4.6, 4.1, 3.9, 3.4, 3.2, 2.9, 2.8, 2.6]).word      # "falls"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

METHOD = (
    "median of the last third against that of the first, beyond twice the standard error that the scatter of "
    "neighbouring steps gives"
)
LEAST = 6
"""Fewest values that say anything."""

FALLS, RISES, FLAT, TOO_FEW = "falls", "rises", "neither falls nor rises", "too few steps to tell"


@dataclass(frozen=True)
class Trend:
    """word: one of the four above. first, last: medians of the first and last third. error: its standard error."""

    word: str
    first: float | None = None
    last: float | None = None
    error: float | None = None


def trend(values: Sequence[float]) -> Trend:
    """Whether finite `values`, in order of their steps, fall or rise."""
    if len(values) < LEAST:
        return Trend(TOO_FEW)
    third = len(values) // 3
    first, last = median(values[:third]), median(values[-third:])
    moves = [abs(b - a) for a, b in pairwise(values)]
    sigma = 1.4826 * median(moves) / math.sqrt(2)
    error = 1.2533 * sigma * math.sqrt(2 / third)
    change = last - first
    word = FLAT if abs(change) <= 2 * error else FALLS if change < 0 else RISES
    return Trend(word, first, last, error)
