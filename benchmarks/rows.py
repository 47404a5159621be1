"""A row of a benchmark: ours against theirs, measured side by side in one run, because these machines are noisy.

A benchmark module has `run() -> list[Row]`. `python -m benchmarks` runs them all and prints one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter


@dataclass(frozen=True)
class Row:
    """One comparison: `ratio` is what the budget speaks of (say in `name` which way round), `note` the conditions."""

    name: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float
    budget: str = "-"
    note: str = ""
    within: bool | None = None


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median seconds of both, called in turn `repeat` times after one warm-up each."""
    ours(), theirs()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for call, into in zip((ours, theirs), times, strict=True):
            start = perf_counter()
            call()
            into.append(perf_counter() - start)
    return median(times[0]), median(times[1])


def scatter(values: Sequence[float]) -> str:
    """How far repeated measurements lie from the median at most: the noise, as a note says it."""
    middle = median(values)
    return f"+- {max(abs(value - middle) for value in values) / middle:.1%}"
