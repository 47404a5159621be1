"""Whether memory grows: a robust line through samples, by step where steps are known, else by second.

Stated once, so that a figure can be checked by hand:

* **points**: of each step the smallest sample, because what a step only borrows is no leak. Samples before the first step (the
  model is loaded) and of the first step (warm-up) are left out. Where nobody counted steps, all samples by time.
* **slope**: Theil and Sen's, the median of the slopes between all pairs of points; a third of them may be wild.
* **range**: Sen's, from the ranks of those slopes, at 99 %.
* **scatter**: 1.4826 times the median distance of a point from the line.
* **grows**: the range lies above zero, and the growth over all that was seen is more than three times the scatter and a MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from actordbg.formats.memory_record import Growth, ProcessMemory, SizeFigures
from actordbg.memory.memory_samples import QUANTITIES, Sample
from actordbg.report.specifications import thinned

Point = tuple[float, int]
STEP, SECOND = "step", "second"
LEAST = 5
"""Fewest points that a line is drawn through."""
_MOST = 400
_SURE = 2.576
_SCATTERS, FLOOR = 3.0, 2**20
"""How far a growth must be beyond the scatter, and the smallest that is told, in bytes."""


def by_process(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each process, in the order in which they appeared."""
    found: dict[str, list[Sample]] = {}
    for one in samples:
        found.setdefault(one.process, []).append(one)
    return found


def figures(samples: Sequence[Sample]) -> tuple[ProcessMemory, ...]:
    """Every process with what its samples say."""
    return tuple(_process(name, own) for name, own in by_process(samples).items())


def _process(name: str, own: Sequence[Sample]) -> ProcessMemory:
    steps = len({one.step for one in own if one.step})
    unit = STEP if steps else SECOND  # a model that is being loaded grows by second
    sizes = {}
    for quantity in QUANTITIES:
        known = [value for one in own if (value := getattr(one, quantity)) is not None]
        if known:
            sizes[quantity] = SizeFigures(known[0], max(known), known[-1], growth_of(points(own, quantity, unit), unit))
    return ProcessMemory(name, own[0].node, len(own), steps, own[-1].seconds - own[0].seconds, sizes)


def points(own: Sequence[Sample], quantity: str, unit: str) -> list[Point]:
    """What a line is drawn through."""
    known = [(one, value) for one in own if (value := getattr(one, quantity)) is not None]
    if unit == SECOND:
        return [(one.seconds, value) for one, value in known]
    least: dict[int, int] = {}
    for one, value in known:
        if one.step is not None:
            least[one.step] = min(value, least.get(one.step, value))
    counted = sorted(step for step in least if step > 0)
    return [(float(step), least[step]) for step in counted[1:]]


def growth_of(found: Sequence[Point], unit: str) -> Growth | None:
    """The line through the points; None for fewer than five."""
    if len(found) < LEAST:
        return None
    import numpy

    x, y = (numpy.array(side, dtype=float) for side in zip(*thinned(found, _MOST), strict=True))
    one, other = numpy.triu_indices(len(x), 1)
    apart = x[other] != x[one]
    slopes = numpy.sort((y[other] - y[one])[apart] / (x[other] - x[one])[apart])
    if not len(slopes):
        return None
    slope = float(numpy.median(slopes))
    residuals = y - slope * x
    scatter = float(1.4826 * numpy.median(numpy.abs(residuals - numpy.median(residuals))))
    low, high = _range(slopes.tolist(), len(x))
    span = float(x[-1] - x[0])
    grows = low > 0 and slope * span > max(_SCATTERS * scatter, FLOOR)
    return Growth(unit, slope, low, high, scatter, span, grows)


def _range(slopes: Sequence[float], count: int) -> tuple[float, float]:
    """Where the slope lies: Sen's range, from the ranks of the sorted slopes."""
    half = _SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18) / 2
    middle = len(slopes) / 2
    return float(slopes[max(0, math.floor(middle - half))]), float(slopes[min(len(slopes) - 1, math.ceil(middle + half))])
