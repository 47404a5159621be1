"""A curve through measured points: y = a + b n, y = a + c n^2, or y = a + b n + c n^2, with no coefficient negative.

For memory and time over a length: neither is negative or shrinks when inputs grow, and nothing in a transformer grows faster
than the square of the length. Stated once, so that a figure can be checked by hand:

* **weights**: relative errors are what counts, so every point weighs 1 / y^2.
* **outliers**: Huber's weights on the relative residuals (k = 1.345 of their scale, 1.4826 x median |r|), until they settle.
  One wild point among several hardly moves the curve.
* **which form**: each form is fitted without some of the points, which it then has to predict (each point in turn; from 20
  points on, every tenth together). The form with the smallest median relative error wins, unless a simpler one is within a
  tenth of it (or within 1e-6). A form needs one more point than it has coefficients.
* **error**: the winner's held-out error: the root of the mean square of its relative errors, of those up to four times their
  median (an outlier says nothing about the others).
* **ahead**: how wrong extrapolation was where it can be checked: the largest relative error of the lengths beyond half of the
  longest, predicted from those up to it (where those are too few: of the longest, predicted from all others); or how far
  apart the forms that predict at most three times worse are at twice the longest, if that is more. It holds for up to one
  doubling beyond the longest length, and grows with every further one (`Curve.error_at`). Where the longer half could not be
  predicted, forms up to 5 % off are held beside each other too, and nobody knows the error beyond that doubling. A flat curve
  has none at all: something else (libraries, an earlier input) hid what grows, so nobody knows where it begins to show.

Example::

    curve = fit([(512, 1.0e9), (1024, 1.5e9), (2048, 2.5e9)])
    curve.at(4096), curve.form          # 4.5e9, "a + b n"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np

Point = tuple[float, float]
Coefficients = tuple[float, float, float]
Array = np.ndarray[Any, np.dtype[np.float64]]
_HUBER = 1.345
_ROUNDS = 30
_FOLDS = 10
_MOST = 200
_CLOSE = 1.1
_PLAUSIBLE = 3.0
_NOTHING = 1e-6
_UNCHECKED = 0.05
_FORMS: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (0, 2), (0, 1, 2))
"""Powers of n in each form."""
LEAST = 3
"""Fewest different lengths that a curve is drawn through: two make a line through anything."""


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
        """The curve's value at a length."""
        return self.a + self.b * n + self.c * n * n

    def error_at(self, n: float) -> float | None:
        """The relative error to expect at a length; None beyond the longest if it is unknown."""
        if n <= self.longest:
            return self.error
        if not self.checked and n > 2 * self.longest:
            return None
        return None if self.ahead is None else max(self.error, self.ahead) * max(1.0, math.log2(n / self.longest))

    def reaches(self, y: float) -> float | None:
        """The length at which the curve is `y`; None if it never is (flat), or is above it at 0 already."""
        if self.a > y:
            return None
        if self.c > 0:
            return 2 * (y - self.a) / (self.b + math.sqrt(self.b * self.b + 4 * self.c * (y - self.a)))
        return (y - self.a) / self.b if self.b > 0 else None


def fit(points: Sequence[Point], *, square: bool = False) -> Curve | None:
    """The curve through points (n, y), y > 0, one for each n; None for fewer than three.

    `square`: y is known to grow with n^2, even if that part is still too small to tell from noise. From four points on, only
    forms with n^2 are tried. Extrapolations become larger, and right.
    """
    known = _thinned(sorted((n, y) for n, y in points if y > 0))
    if len(known) < LEAST:
        return None
    terms, errors = _best(known, square)[0]
    a, b, c = _robust(known, terms)
    form = " + ".join(name for name, value in (("a", a), ("b n", b), ("c n^2", c)) if value)
    ahead = _ahead(known, square) if b or c else None
    return Curve(form, a, b, c, known[-1][0], _size(errors), ahead, _half(known) >= LEAST)


def _half(points: list[Point]) -> int:
    """How many lengths are up to half of the longest."""
    return sum(n <= points[-1][0] / 2 for n, _ in points)


def _best(points: list[Point], square: bool, certain: float = _NOTHING) -> list[tuple[tuple[int, ...], list[float]]]:
    """Forms and their held-out errors: the one to take, then all others that are at most three times as wrong,
    or as `certain`.
    """
    forms = [terms for terms in _FORMS if len(points) > len(terms)]
    if square and len(points) > LEAST:
        forms = [terms for terms in forms if 2 in terms]
    tried = [(terms, _held_out(points, terms)) for terms in forms]
    best = min(median(errors) for _, errors in tried)
    first = next(one for one in tried if median(one[1]) <= max(best * _CLOSE, _NOTHING))
    return [first, *(one for one in tried if one is not first and median(one[1]) <= max(best * _PLAUSIBLE, certain))]


def _ahead(points: list[Point], square: bool) -> float | None:
    half = _half(points)
    known = half if half >= LEAST else len(points) - 1
    if known < LEAST:
        return None
    wrong = max(_errors(_robust(points[:known], _best(points[:known], square)[0][0]), points[known:]))
    twice = 2 * points[-1][0]
    plausible = [_robust(points, terms) for terms, _ in _best(points, square, _NOTHING if half >= LEAST else _UNCHECKED)]
    chosen, *others = [a + b * twice + c * twice * twice for a, b, c in plausible]
    return max([wrong, *(abs(other - chosen) / chosen for other in others)])


def _thinned(points: list[Point]) -> list[Point]:
    """Reduce to at most 200 points, the medians of neighbours, so that thousands of lengths do not take minutes."""
    size = -(-len(points) // _MOST) or 1
    groups = [list(zip(*points[i : i + size], strict=True)) for i in range(0, len(points), size)]
    return [(median(lengths), median(values)) for lengths, values in groups]


def _held_out(points: Sequence[Point], terms: tuple[int, ...]) -> list[float]:
    """Return the absolute relative errors of points that the form was fitted without."""
    folds = len(points) if len(points) < 2 * _FOLDS else _FOLDS
    errors = []
    for fold in range(folds):
        rest = [point for i, point in enumerate(points) if i % folds != fold]
        errors += _errors(_robust(rest, terms), points[fold::folds])
    return errors


def _errors(coefficients: Coefficients, points: Sequence[Point]) -> list[float]:
    a, b, c = coefficients
    return [abs(a + b * n + c * n * n - y) / y for n, y in points]


def _size(errors: Sequence[float]) -> float:
    usual = [error for error in errors if error <= max(4 * median(errors), _NOTHING)]
    return math.hypot(*usual) / math.sqrt(len(usual))


def _robust(points: Sequence[Point], terms: tuple[int, ...]) -> Coefficients:
    """Fit (a, b, c), those outside `terms` 0, by weighted least squares on relative residuals."""
    n, y = np.array(points).T
    units = n.max() ** np.arange(3)
    rows = n[:, None] ** np.arange(3) / units / y[:, None]  # a row times the coefficients should be 1
    weights, fitted = np.ones(len(rows)), np.zeros(3)
    for _ in range(_ROUNDS):
        before, fitted = fitted, _not_negative(rows, weights, terms)
        residuals = abs(rows @ fitted - 1)
        scale = 1.4826 * np.median(residuals)
        if scale < 1e-12 or np.allclose(before, fitted, 1e-7, 1e-30):
            break
        weights = _HUBER * scale / np.maximum(residuals, _HUBER * scale)
    a, b, c = (fitted / units).tolist()
    return a, b, c


def _not_negative(rows: Array, weights: Array, terms: tuple[int, ...]) -> Array:
    """Solve for the best coefficients of which none is negative: the best over the subsets of terms whose own best has none."""
    root = np.sqrt(weights)
    best, least = np.zeros(3), math.inf
    for kept in (subset for size in range(1, len(terms) + 1) for subset in combinations(terms, size)):
        fitted = np.zeros(3)
        fitted[list(kept)] = np.linalg.lstsq(rows[:, kept] * root[:, None], root, rcond=None)[0]
        cost = float(weights @ (rows @ fitted - 1) ** 2)
        if fitted.min() >= 0 and cost < least:
            best, least = fitted, cost
    return best
