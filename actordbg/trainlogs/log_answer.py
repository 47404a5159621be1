"""The answer of `actordbg compare-logs`, field by field as `--json` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field

from actordbg.trainlogs.trend import METHOD, Trend, trend

ALIGNED, DIFFERENT, NOTHING = "aligned", "different", "nothing-in-common"


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
    """The answer of `compare-logs`. verdict: aligned, different, or nothing-in-common; `reasons`: what decided.

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
