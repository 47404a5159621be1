"""`actordbg curve`: memory or time over length for each configuration, and the longest length that fits a budget.

Every length that is named says where it comes from:

* **measured**: an input of that length ran.
* **interpolated**: between measured lengths, by the curve (`actordbg.measure.fit`).
* **extrapolated**: beyond them, by the curve. More than twice the longest measured length comes with a caution, because kernels,
  allocators and caches behave differently at other sizes; more than `FURTHEST` times is refused.

A length that ran out of memory is never said to fit, nor is any longer one; nor is one beyond what ran over the budget. A
curve's value "fits" only if it does with its error added (`Curve.error_at`): between measured lengths the held-out error, beyond
them the error of extrapolation where that could be checked. Within that error of the budget, or if the error is unknown, it is
"unsure".

Attention computes n^2 scores, and eager attention stores them. So times, and the memory of eager attention, always have a
square term, even if the measured lengths are too short to show it.

Pure: measurements in, answer out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actordbg.base.units import letter_of
from actordbg.measure.fit import Curve, fit
from actordbg.measure.measurements import Measurements, Point

MEMORY, TIME = "memory", "time"
MEASURED, INTERPOLATED, EXTRAPOLATED = "measured", "interpolated", "extrapolated"
OUT_OF_MEMORY, UNKNOWN = "out of memory", "unknown"
YES, NO, UNSURE = "yes", "no", "unsure"
FAR = 2.0
"""Lengths beyond this many times the longest measured one come with a caution."""
FURTHEST = 4.0
"""Beyond this many times nothing is said. A curve's error is checked for one doubling (`Curve.ahead`) and guessed for a second;
measured later, a length that was told at 3.3 times was 30 % too long."""


@dataclass(frozen=True)
class At:
    """What a length needs: `value` in bytes or seconds, `low` to `high` with the curve's error; None if unknown.

    fits: yes, no or unsure; None without a budget. far: more than twice the longest measured length. One that is too far is
    unknown.
    """

    n: int
    how: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    fits: str | None = None
    far: bool = False


@dataclass(frozen=True)
class Longest:
    """The longest length that fits. measured: among those that ran; None if none of them fits.

    by_curve: where the curve reaches the budget, between `low` and `high` with its error; None without a curve, or if it never
    does. how: "measured" if a longer length is known not to fit, else "extrapolated". too_long: the shortest length that is
    known not to fit. exceptions: shorter lengths that were over the budget nevertheless. refused: the curve's answer where
    that is too far.
    """

    how: str
    measured: int | None
    by_curve: int | None = None
    low: int | None = None
    high: int | None = None
    too_long: int | None = None
    far: bool = False
    exceptions: tuple[int, ...] = ()
    refused: int | None = None


@dataclass(frozen=True)
class CurveAnswer:
    """One configuration: its points, the curve through them, and the answers. `measurements` has its settings."""

    label: str
    measurements: Measurements
    curve: Curve | None
    values: tuple[tuple[int, float], ...]
    longest: Longest | None = None
    at: tuple[At, ...] = ()


@dataclass(frozen=True)
class CurvesAnswer:
    """The answer of `actordbg curve`. quantity: memory or time; passes: which of a time's passes; budget: bytes or seconds."""

    quantity: str
    by: str
    passes: str | None
    budget: float | None
    replays: int
    curves: tuple[CurveAnswer, ...]
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Something was measured, and in every configuration the asked lengths fit, else the longest one is known."""
        measured = any(one.values for one in self.curves)
        refused = any(one.longest and one.longest.refused and not one.at for one in self.curves)
        return measured and not refused and all(at.fits in (None, YES) for one in self.curves for at in one.at)


def answer(
    measured: Sequence[Measurements],
    quantity: str,
    by: str,
    *,
    passes: str = "both",
    budget: float | None = None,
    at: Sequence[int] = (),
    replays: int = 0,
    notes: Sequence[str] = (),
) -> CurvesAnswer:
    """Fit a curve for each configuration. `budget`: bytes or seconds. `at`: lengths whose value is wanted."""
    curves = []
    for index, one in enumerate(measured):
        values = tuple((point.n, value) for point in one.points if (value := value_of(point, quantity, passes)) is not None)
        curve = fit(values, square=quantity == TIME or one.settings.get("attn") == "eager")
        bound = next(iter(one.out_of_memory), None)
        most = longest(values, curve, bound, budget) if budget is not None and values else None
        at_lengths = tuple(value_at(n, values, curve, bound, budget) for n in at)
        curves.append(CurveAnswer(letter_of(index), one, curve, values, most, at_lengths))
    return CurvesAnswer(quantity, by, passes if quantity == TIME else None, budget, replays, tuple(curves), tuple(notes))


def value_of(point: Point, quantity: str, passes: str | None) -> float | None:
    """Return the value of a curve's quantity at one point."""
    value: float | None = getattr(point, MEMORY if quantity == MEMORY else passes or "both")
    return value


def value_at(n: int, values: Sequence[tuple[int, float]], curve: Curve | None, bound: int | None, budget: float | None) -> At:
    """What length `n` needs, and whether that fits."""
    if bound is not None and n >= bound:
        return At(n, OUT_OF_MEMORY, fits=None if budget is None else NO)
    known = dict(values)
    if n in known:
        value = known[n]
        return At(n, MEASURED, value, value, value, None if budget is None else YES if value <= budget else NO)
    too_long = None if budget is None else _too_long(values, bound, budget)
    fits = None if budget is None else UNSURE if too_long is None or n < too_long else NO
    shortest, most = (values[0][0], values[-1][0]) if values else (n, n)
    if curve is None or n > FURTHEST * most:
        return At(n, UNKNOWN, fits=fits, far=curve is not None)
    value, error = curve.at(n), curve.error_at(n)
    how, far = INTERPOLATED if shortest < n < most else EXTRAPOLATED, n > FAR * most
    if error is None:
        return At(n, how, value, fits=fits, far=far)
    low, high = value * (1 - min(error, 1.0)), value * (1 + error)
    if budget is not None and fits == UNSURE:
        fits = YES if high <= budget else NO if low > budget else UNSURE
    return At(n, how, value, low, high, fits, far)


def _too_long(values: Sequence[tuple[int, float]], bound: int | None, budget: float) -> int | None:
    """The shortest length that is known not to fit: over the budget with no longer one that fits, or out of memory."""
    below = [(n, value > budget) for n, value in values if bound is None or n < bound]
    most = max((n for n, over in below if not over), default=0)
    return min((n for n, over in below if over and n > most), default=bound)


def longest(values: Sequence[tuple[int, float]], curve: Curve | None, bound: int | None, budget: float) -> Longest:
    """The longest length that fits `budget`; `values` ascending and not empty, `bound` the first that ran out of memory."""
    below = [(n, value > budget) for n, value in values if bound is None or n < bound]
    most = max((n for n, over in below if not over), default=None)
    too_long = _too_long(values, bound, budget)
    exceptions = tuple(n for n, over in below if over and most is not None and n < most)
    by_curve, low, high = _by_curve(curve, budget, most, too_long)
    how = EXTRAPOLATED if too_long is None or most is None else MEASURED
    times = (by_curve or 0) / values[-1][0] if too_long is None else 0.0
    if times > FURTHEST:
        return Longest(how, most, far=True, exceptions=exceptions, refused=by_curve)
    if too_long is None and high is not None and high > FURTHEST * values[-1][0]:
        high = None
    return Longest(how, most, by_curve, low, high, too_long, times > FAR, exceptions)


def _by_curve(
    curve: Curve | None, budget: float, most: int | None, too_long: int | None
) -> tuple[int | None, int | None, int | None]:
    """Where the curve reaches the budget, alone and with its error added and subtracted, within the known bounds."""
    if curve is None:
        return None, None, None

    def clamped(n: float | None) -> int | None:
        if n is None or not math.isfinite(n):
            return None
        whole = math.floor(n * (1 + 1e-9))  # the fit may end one bit below a whole number
        whole = whole if too_long is None else min(whole, too_long - 1)
        whole = max(whole, most or 0)
        return whole if whole > 0 else None

    reached = curve.reaches(budget)
    error = None if reached is None else curve.error_at(reached)
    if error is None:
        return clamped(reached), None, None
    bold = curve.reaches(budget / (1 - error)) if error < 1 else None
    return clamped(reached), clamped(curve.reaches(budget / (1 + error))), clamped(bold)
