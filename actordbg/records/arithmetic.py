"""The arithmetic of a report: what "median", "p95", "tokens per second" and "seq_len bucket" mean here.

Stated once, so that two reports can be compared:

* **percentile**: linear interpolation between the two closest ranks (Hyndman and Fan's type 7, numpy's default).
  With fewer than 20 values the 95th percentile is close to the largest one.
* **bucket**: seq_len by powers of two from 128 on: 0-127, 128-255, 256-511, ... seq_len counts padding.
* **tokens per second**: real tokens (sum of the attention mask) per second of forward, in one worker process.
  `median` is over inputs, `total` is all tokens by all seconds.
* **warm-up** is no part of steady timing: the first measured input of each worker start (a worker that started again after a
  crash warms up again), and every later input during which torch.compile built a graph.
* values that are missing or not finite are left out, never counted as zero; no value at all gives None.

Example::

    percentile([1.0, 2.0, 3.0, 4.0], 50)    # 2.5
    bucket_of(1861).label                   # "1024-2047"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actordbg.records.replay_record import GOES_ON, ResultRecord

PERCENTILE_DEFINITION = "linear interpolation between the closest ranks (type 7, numpy's default)"
FIRST_BUCKET = 128


@dataclass(frozen=True, order=True)
class Bucket:
    """A range of seq_len, both ends included."""

    low: int
    high: int

    @property
    def label(self) -> str:
        """The range as reports print it, "1024-2047"."""
        return f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Spread:
    """Seconds (or another unit) over several inputs: number measured, median, 95th percentile, largest, sum."""

    count: int
    median: float | None
    p95: float | None
    largest: float | None
    total: float


def bucket_of(seq_len: int) -> Bucket:
    """The bucket that a seq_len falls into."""
    high = FIRST_BUCKET
    while seq_len >= high:
        high *= 2
    return Bucket(high // 2 if high > FIRST_BUCKET else 0, high - 1)


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are neither None nor infinite nor NaN."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile of `values` (any order), None of nothing. See the module's docstring for the definition."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float | None:
    """The 50th percentile."""
    return percentile(values, 50)


def spread(values: Iterable[float | None]) -> Spread:
    """Count, median, p95, largest and sum of the finite values."""
    known = finite(values)
    return Spread(len(known), median(known), percentile(known, 95), max(known, default=None), sum(known))


def weighted_mean(pairs: Iterable[tuple[float | None, int | None]]) -> float | None:
    """The mean of (mean, count) pairs, each weighted by its count; None when nothing was counted."""
    known = [(mean, count) for mean, count in pairs if mean is not None and count and math.isfinite(mean)]
    total = sum(count for _, count in known)
    return sum(mean * count for mean, count in known) / total if total else None


def warm_up_of(results: Iterable[ResultRecord]) -> tuple[set[str], set[str]]:
    """Dump ids of the first measured input of each worker start, and of the other inputs that built a graph."""
    first: dict[tuple[int, int], ResultRecord] = {}
    compiling: set[str] = set()
    for one in sorted(results, key=lambda r: (r.started_at, r.slot)):
        if one.forward_s is None:
            continue
        if (one.extra.get(GOES_ON) or first.setdefault((one.worker, one.attempt), one) is not one) and one.graphs:
            compiling.add(one.dump_id)
    return {one.dump_id for one in first.values()}, compiling
