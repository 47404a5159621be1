"""The answer of `actordbg compare-logs`, field by field as `--json` prints it; and whether a series of values falls.

`trend` compares the median of the first third of the values with that of the last third; half of a third may be wild without
moving its median. A change counts if it is more than twice its standard error. That is estimated from how far neighbouring
steps are apart: sigma = 1.4826 x median |x[i+1] - x[i]| / sqrt(2), a scale that neither trend nor outliers inflate much. The
difference of two medians of m values each has the standard error 1.2533 x sigma x sqrt(2 / m).

Example::

    trend([5.0, 4.6, 4.1, 3.9, 3.4, 3.2, 2.9, 2.8, 2.6]).word      # "falls"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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


ALIGNED, DIFFERENT, NOTHING, TOO_FEW_COMMON = "aligned", "different", "nothing-in-common", "too-few-steps"


@dataclass(frozen=True)
class Step:
    """One step in both logs; values that are not finite are None here and in words in `note`."""

    step: int
    a: float | None
    b: float | None
    relative: float | None
    note: str = ""


@dataclass(frozen=True)
class LogSide:
    """One log's values of the metric. Figures are over its finite values; `left_out`: values that the rule does not count.

    nonfinite: how many values are NaN or infinite, and nonfinite_steps the first of their steps. rerun: steps that the log
    came back to. found: every metric in the log and how often it was seen (only where nothing could be compared, else empty).
    """

    path: str
    numbered_by: str | None = None
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None
    first: float | None = None
    mean: float | None = None
    last: float | None = None
    smallest: float | None = None
    largest: float | None = None
    trend: Trend = field(default_factory=lambda: trend(()))
    nonfinite: int = 0
    nonfinite_steps: tuple[int, ...] = ()
    rerun: int = 0
    left_out: int = 0
    round_lengths: tuple[int, ...] = ()
    found: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LogComparison:
    """The answer of `compare-logs`. verdict: aligned, different, too-few-steps, or nothing-in-common; `reasons`: what decided.

    first, mean, last: relative differences under the rule. common: steps in both; exceeding: those that differ by the
    threshold or more, `worst` the largest of them first. trend_method: how "falls" was decided.
    """

    a: LogSide
    b: LogSide
    metric: str | None
    rule: str
    threshold: float
    verdict: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    first: float | None = None
    mean: float | None = None
    last: float | None = None
    common: int = 0
    only_a: int = 0
    only_b: int = 0
    exceeding: int = 0
    median_relative: float | None = None
    max_relative: float | None = None
    worst: tuple[Step, ...] = ()
    trend_method: str = METHOD

    @property
    def good(self) -> bool:
        """Something was compared, and it agrees."""
        return self.verdict == ALIGNED


@dataclass(frozen=True)
class LogComparisons:
    """The answer of `compare-logs` over more than two logs: each against the first, or each against each."""

    verdict: str
    metric: str | None
    rule: str
    threshold: float
    comparisons: tuple[LogComparison, ...]

    @property
    def good(self) -> bool:
        """Every pair was compared, and agrees."""
        return all(pair.good for pair in self.comparisons)


def together(pairs: Sequence[LogComparison]) -> LogComparisons:
    """One answer: aligned if every pair is, else the first other verdict."""
    verdict = next((pair.verdict for pair in pairs if not pair.good), ALIGNED)
    metric = next((pair.metric for pair in pairs if pair.metric), None)
    return LogComparisons(verdict, metric, pairs[0].rule, pairs[0].threshold, tuple(pairs))
