"""A row of a benchmark: ours against theirs, measured side by side in one run, because these machines are noisy.

A benchmark module has `run() -> list[Row]`. `python -m benchmarks` runs them all and prints one table.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from resource import RUSAGE_CHILDREN, getrusage
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside the block torch computes with one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes, by the clock."""
    start = perf_counter()
    call()
    return perf_counter() - start


def cpu_seconds_of(command: Sequence[str], good: Collection[int] = (0,), **environment: str) -> float:
    """CPU seconds (user and system) of a command and all its processes. good: exit codes of a command that did its work."""
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode in good and "Traceback" not in done.stderr, done.stderr
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median seconds of both, called in turn `repeat` times after one warm-up each."""
    ours(), theirs()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for call, into in zip((ours, theirs), times, strict=True):
            into.append(seconds_of(call))
    return median(times[0]), median(times[1])


def scatter(values: Sequence[float]) -> str:
    """How far repeated measurements lie from the median at most: the noise, as a note says it."""
    middle = median(values)
    return f"+- {max(abs(value - middle) for value in values) / middle:.1%}"
