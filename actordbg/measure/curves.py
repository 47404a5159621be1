"""`actordbg curve`: memory or time over length for each configuration, and the longest length that fits a budget.

Every length is reported with its source:

* **measured**: an input of that length ran.
* **interpolated**: between measured lengths, by the curve.
* **extrapolated**: beyond measured lengths, by the curve. More than twice the longest measured length comes with a caution,
  because kernels, allocators and caches behave differently at other sizes; more than `FURTHEST` times is refused.

A length that ran out of memory never fits, nor does any longer length, nor any length beyond the measured lengths that exceeded
the budget. A curve's value "fits" only if it fits with its error added (`Curve.error_at`): between measured lengths the held-out
error, beyond them the extrapolation error if it could be checked. A value within that error of the budget, or with an unknown
error, is "unsure".

Attention computes n^2 scores, and eager attention stores them. So times, and the memory of eager attention, always have a
quadratic term, even if the measured lengths are too short to show it.

The curve is y = a + b n, y = a + c n^2, or y = a + b n + c n^2, with no coefficient negative.
Memory and time are never negative, never shrink when inputs grow, and nothing in a transformer grows faster than the square of
the length. The method in full, so that a figure can be checked by hand:

* **weights**: the fit minimizes relative errors, so every point has weight 1 / y^2.
* **outliers**: Huber's weights on the relative residuals (k = 1.345 of their scale, 1.4826 x median |r|), until
  they converge. A single outlier among several points hardly moves the curve.
* **form**: each form is fitted without some of the points, which it then has to predict (leave-one-out; from 20 points on,
  10-fold). The form with the smallest median relative error wins, unless a simpler one is within a
  tenth of it (or within 1e-6). A form needs one more point than it has coefficients.
* **error**: the winner's held-out error: the root mean square of its relative errors, without those above four times their
  median (outliers).
* **ahead**: the extrapolation error: the largest relative error of the lengths beyond half of the longest, predicted from those
  up to it (if those are too few: of the longest length, predicted from all others); or, if larger, the spread at twice the
  longest length of the forms that predict at most three times worse. It holds for one doubling beyond the longest length, and
  grows with every further doubling (`Curve.error_at`). If the longer half could not be predicted, the spread includes all forms
  within 5 %, and the error beyond that doubling is unknown. For a flat curve the error is always unknown: something else
  (libraries, an earlier input) hid the growth, so it is unknown where growth begins to show.

Example::

    curve = fit([(512, 1.0e9), (1024, 1.5e9), (2048, 2.5e9)])
    curve.at(4096), curve.form          # 4.5e9, "a + b n"

Pure: measurements in, result out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np

from actordbg.base.units import letter_of
from actordbg.document.specifications import thinned
from actordbg.measure.measurements import Measurements

MEMORY, TIME = "memory", "time"
MEASURED, INTERPOLATED, EXTRAPOLATED = "measured", "interpolated", "extrapolated"
OUT_OF_MEMORY, UNKNOWN = "out of memory", "unknown"
YES, NO, UNSURE = "yes", "no", "unsure"
FAR = 2.0
"""Lengths beyond this multiple of the longest measured length come with a caution."""
FURTHEST = 4.0
"""Lengths beyond this multiple are refused. A curve's error is checked for one doubling (`Curve.ahead`) and guessed for a second;
a prediction at 3.3 times the longest length, measured later, was 30 % too long."""


@dataclass(frozen=True)
class At:
    """The cost of a length: `value` in bytes or seconds, `low` to `high` with the curve's error; None if unknown.

    fits: yes, no or unsure; None without a budget. far: more than twice the longest measured length. Beyond `FURTHEST` times the
    value is unknown.
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
    """The longest length that fits. measured: the longest measured length that fits; None if none does.

    by_curve: the length at which the curve reaches the budget, between `low` and `high` with its error; None without a curve, or
    if it never does. how: "measured" if a longer length is known not to fit, else "extrapolated". too_long: the shortest length
    known not to fit. refused: the curve's length if it is too far to extrapolate to.
    """

    how: str
    measured: int | None
    by_curve: int | None = None
    low: int | None = None
    high: int | None = None
    too_long: int | None = None
    far: bool = False
    refused: int | None = None


@dataclass(frozen=True)
class CurveAnswer:
    """The curve of a configuration: its points, the fit and the results. `measurements` has its settings."""

    label: str
    measurements: Measurements
    curve: Curve | None
    values: tuple[tuple[int, float], ...]
    longest: Longest | None = None
    at: tuple[At, ...] = ()


@dataclass(frozen=True)
class CurvesAnswer:
    """The result of `actordbg curve`. quantity: memory or time; passes: forward, backward or both; budget: bytes or seconds."""

    quantity: str
    by: str
    passes: str | None
    budget: float | None
    replays: int
    curves: tuple[CurveAnswer, ...]
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Return whether something was measured, every requested length fits, and no longest length was refused instead."""
        measured = any(curve.values for curve in self.curves)
        refused = any(curve.longest and curve.longest.refused and not curve.at for curve in self.curves)
        return measured and not refused and all(at.fits in (None, YES) for curve in self.curves for at in curve.at)


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
    """Fit a curve per configuration. `budget`: bytes or seconds. `at`: lengths to evaluate."""
    curves = []
    for index, measurements in enumerate(measured):
        value_of = attrgetter(MEMORY if quantity == MEMORY else passes)
        values = tuple((point.n, value_of(point)) for point in measurements.points if value_of(point) is not None)
        curve = fit(values, square=quantity == TIME or measurements.settings.get("attn") == "eager")
        config = CurveAnswer(letter_of(index), measurements, curve, values)
        most = _longest(config, budget) if budget is not None and values else None
        curves.append(replace(config, longest=most, at=tuple(_value_at(config, n, budget) for n in at)))
    return CurvesAnswer(quantity, by, passes if quantity == TIME else None, budget, replays, tuple(curves), tuple(notes))


def _value_at(config: CurveAnswer, n: int, budget: float | None) -> At:
    """Return the cost of length `n`, and whether it fits."""
    known, curve, limit = dict(config.values), config.curve, math.inf if budget is None else budget
    too_long = _bounds(config, limit)[1]
    how, far, value, error = UNKNOWN, False, None, None
    fits = UNSURE if too_long is None or n < too_long else NO
    if n >= min(config.measurements.out_of_memory, default=math.inf):
        how, fits = OUT_OF_MEMORY, NO
    elif n in known:
        how, value, error = MEASURED, known[n], 0.0
        fits = YES if value <= limit else NO
    elif curve is not None:
        shortest, longest = config.values[0][0], config.values[-1][0]
        far = n > FAR * longest
        if n <= FURTHEST * longest:
            how = INTERPOLATED if shortest < n < longest else EXTRAPOLATED
            value, error = curve.at(n), curve.error_at(n)
    low, high = None, None
    if value is not None and error is not None:
        low, high = value * (1 - min(error, 1.0)), value * (1 + error)
        if fits == UNSURE:
            fits = YES if high <= limit else NO if low > limit else UNSURE
    return At(n, how, value, low, high, None if budget is None else fits, far)


def _bounds(config: CurveAnswer, budget: float) -> tuple[int | None, int | None]:
    """Return the longest length that ran within the budget, and the shortest that is known not to fit.

    A length is known not to fit if it ran out of memory, or over the budget with no longer length that fits.
    """
    bound = min(config.measurements.out_of_memory, default=None)
    below = [(n, value > budget) for n, value in config.values if bound is None or n < bound]
    most = max((n for n, over in below if not over), default=None)
    return most, min((n for n, over in below if over and n > (most or 0)), default=bound)


def _longest(config: CurveAnswer, budget: float) -> Longest:
    """Return the longest length that fits `budget`, given at least one measured length."""
    most, too_long = _bounds(config, budget)

    def clamped(n: float | None) -> int | None:
        """Round down to a whole length within the known bounds."""
        if n is None or not math.isfinite(n):
            return None
        whole = math.floor(n * (1 + 1e-9))  # the fit may end one bit below a whole number
        return max(whole if too_long is None else min(whole, too_long - 1), most or 0) or None

    by_curve, low, high = None, None, None
    if config.curve is not None:
        reached = config.curve.reaches(budget)
        by_curve = clamped(reached)
        if reached is not None and (error := config.curve.error_at(reached)) is not None:
            low = clamped(config.curve.reaches(budget / (1 + error)))
            high = clamped(config.curve.reaches(budget / (1 - error))) if error < 1 else None
    how = EXTRAPOLATED if too_long is None or most is None else MEASURED
    furthest = FURTHEST * config.values[-1][0] if too_long is None else math.inf
    if (by_curve or 0) > furthest:
        return Longest(how, most, far=True, refused=by_curve)
    high = None if (high or 0) > furthest else high
    far = (by_curve or 0) > furthest / FURTHEST * FAR
    return Longest(how, most, by_curve, low, high, too_long, far)


Array = np.ndarray[Any, np.dtype[np.float64]]
_HUBER = 1.345
_ROUNDS = 30
_FOLDS = 10
_MOST = 200
_CLOSE = 1.1
_PLAUSIBLE = 3.0
_NOTHING = 1e-6
_UNCHECKED = 0.05
_POWERS = np.arange(3)
_FORMS: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (0, 2), (0, 1, 2))
"""Powers of n in each form."""
LEAST = 3
"""Fewest different lengths for a curve: a line fits any two points."""


@dataclass(frozen=True)
class Curve:
    """y = a + b n + c n^2, in y's unit, through lengths up to `longest`. form: which of the terms it has.

    error: held-out relative error between measured lengths. ahead: the error for a doubling beyond them; None if unknown.
    checked: whether the longer half was predicted from the shorter one; if not, no error is known beyond that doubling.
    """

    form: str
    a: float
    b: float
    c: float
    longest: float
    error: float
    ahead: float | None
    checked: bool = True

    def at(self, n: float) -> float:
        """Return the curve's value at a length."""
        return self.a + self.b * n + self.c * n * n

    def error_at(self, n: float) -> float | None:
        """Return the expected relative error at a length; None beyond the longest if it is unknown."""
        if n <= self.longest:
            return self.error
        if not self.checked and n > 2 * self.longest:
            return None
        return None if self.ahead is None else max(self.error, self.ahead) * max(1.0, math.log2(n / self.longest))

    def reaches(self, y: float) -> float | None:
        """Return the length at which the curve reaches `y`; None if it never does (flat), or is already above it at 0."""
        if self.a > y:
            return None
        if self.c > 0:
            return 2 * (y - self.a) / (self.b + math.sqrt(self.b * self.b + 4 * self.c * (y - self.a)))
        return (y - self.a) / self.b if self.b > 0 else None


def fit(points: Sequence[tuple[float, float]], *, square: bool = False) -> Curve | None:
    """Fit a curve to points (n, y) with y > 0 and distinct n; None for fewer than three points.

    `square`: y is known to grow with n^2, even if that part is still indistinguishable from noise. From four points on, only
    forms with n^2 are tried, which makes extrapolations larger and correct.
    """
    known = sorted((n, y) for n, y in points if y > 0)
    if len(known) < LEAST:
        return None
    array, longest = np.array(thinned(known, _MOST)), known[-1][0]  # thousands of lengths would take minutes
    form, errors = _best(array, square)[0]
    coefficients = _robust(array, form)
    named = " + ".join(name for name, value in zip(("a", "b n", "c n^2"), coefficients, strict=True) if value)
    half = sum(array[:, 0] <= array[-1, 0] / 2)
    ahead = _ahead(array, square, half) if coefficients[1:].any() else None
    usual = errors[errors <= max(4 * np.median(errors), _NOTHING)]
    error = float(np.sqrt(np.mean(usual**2)))
    a, b, c = coefficients.tolist()
    return Curve(named, a, b, c, longest, error, ahead, bool(half >= LEAST))


def _best(points: Array, square: bool, certain: float = _NOTHING) -> list[tuple[tuple[int, ...], Array]]:
    """Rank the forms with their held-out errors: the best, then all others whose error is at most three times the smallest, or at
    most `certain`.
    """
    forms = [form for form in _FORMS if len(points) > len(form) and (2 in form or not square or len(points) <= LEAST)]
    tried = [(form, _held_out(points, form)) for form in forms]
    wrong = [median(errors) for _, errors in tried]
    first = next(at for at, error in enumerate(wrong) if error <= max(min(wrong) * _CLOSE, _NOTHING))
    bound = max(min(wrong) * _PLAUSIBLE, certain)
    return [tried[first], *(tried[at] for at, error in enumerate(wrong) if at != first and error <= bound)]


def _ahead(points: Array, square: bool, half: int) -> float | None:
    """Estimate the extrapolation error; None if it cannot be checked. half: number of lengths up to half of the longest."""
    known = half if half >= LEAST else len(points) - 1
    if known < LEAST:
        return None
    wrong = _errors(_robust(points[:known], _best(points[:known], square)[0][0]), points[known:])
    plausible = [_robust(points, form) for form, _ in _best(points, square, _NOTHING if half >= LEAST else _UNCHECKED)]
    chosen, *others = [float((2 * points[-1, 0]) ** _POWERS @ coefficients) for coefficients in plausible]
    return max([float(max(wrong)), *(abs(other - chosen) / chosen for other in others)])


def _held_out(points: Array, form: tuple[int, ...]) -> Array:
    """Return the absolute relative errors of held-out points."""
    folds = len(points) if len(points) < 2 * _FOLDS else _FOLDS
    fold_of = np.arange(len(points)) % folds
    return np.concatenate([_errors(_robust(points[fold_of != k], form), points[fold_of == k]) for k in range(folds)])


def _errors(coefficients: Array, points: Array) -> Array:
    """Return the absolute relative error of each point."""
    errors: Array = abs(points[:, :1] ** _POWERS @ coefficients / points[:, 1] - 1)
    return errors


def _robust(points: Array, form: tuple[int, ...]) -> Array:
    """Fit (a, b, c) by weighted least squares on relative residuals; coefficients outside `form` are 0."""
    n, y = points[:, :1], points[:, 1:]
    units = n.max() ** _POWERS
    rows = n**_POWERS / units / y  # a row times the coefficients should be 1
    kept_terms = [list(kept) for size in range(1, len(form) + 1) for kept in combinations(form, size)]
    weights, fitted = np.ones(len(rows)), np.zeros(3)
    for _ in range(_ROUNDS):
        before, least, root = fitted, math.inf, np.sqrt(weights)
        fitted = np.zeros(3)
        for kept in kept_terms:  # no coefficient may be negative: take the best subset of terms whose fit has none
            tried = np.zeros(3)
            tried[kept] = np.linalg.lstsq(rows[:, kept] * root[:, None], root, rcond=None)[0]
            cost = float(weights @ (rows @ tried - 1) ** 2)
            if tried.min() >= 0 and cost < least:
                fitted, least = tried, cost
        residuals = abs(rows @ fitted - 1)
        scale = 1.4826 * np.median(residuals)
        if scale < 1e-12 or np.allclose(before, fitted, 1e-7, 1e-30):
            break
        weights = _HUBER * scale / np.maximum(residuals, _HUBER * scale)
    return np.asarray(fitted / units)
