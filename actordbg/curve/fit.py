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

Plain Python: three coefficients need no library.

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

Point = tuple[float, float]
Row = tuple[float, float, float]
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
    a, b, c = _robust(points[:known], _best(points[:known], square)[0][0])
    wrong = max(abs(a + b * n + c * n * n - y) / y for n, y in points[known:])
    twice = 2 * points[-1][0]
    plausible = [_robust(points, terms) for terms, _ in _best(points, square, _NOTHING if half >= LEAST else _UNCHECKED)]
    chosen, *others = [a + b * twice + c * twice * twice for a, b, c in plausible]
    return max([wrong, *(abs(other - chosen) / chosen for other in others)])


def _thinned(points: list[Point]) -> list[Point]:
    """At most 200 points: the medians of neighbours, so that thousands of lengths do not take minutes."""
    size = -(-len(points) // _MOST)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else [[point] for point in points]
    return [(median(n for n, _ in group), median(y for _, y in group)) for group in groups]


def _held_out(points: Sequence[Point], terms: tuple[int, ...]) -> list[float]:
    """Relative errors, absolute, of points that the form was fitted without."""
    folds = len(points) if len(points) < 2 * _FOLDS else _FOLDS
    errors = []
    for fold in range(folds):
        kept = [point for i, point in enumerate(points) if i % folds != fold]
        a, b, c = _robust(kept, terms)
        errors += [abs(a + b * n + c * n * n - y) / y for n, y in points[fold::folds]]
    return errors


def _size(errors: Sequence[float]) -> float:
    usual = [error for error in errors if error <= max(4 * median(errors), _NOTHING)]
    return math.sqrt(math.fsum(error * error for error in usual) / len(usual))


def _robust(points: Sequence[Point], terms: tuple[int, ...]) -> tuple[float, float, float]:
    """Coefficients (a, b, c), those outside `terms` 0, by weighted least squares on relative residuals."""
    unit = max(n for n, _ in points) or 1.0
    rows = [(1 / y, n / unit / y, n * n / unit / unit / y) for n, y in points]  # a row times the coefficients should be 1
    weights = [1.0] * len(rows)
    found = (0.0, 0.0, 0.0)
    for _ in range(_ROUNDS):
        before, found = found, _not_negative(rows, weights, terms)
        a, b, c = found
        residuals = [abs(a * p + b * q + c * r - 1) for p, q, r in rows]
        scale = 1.4826 * median(residuals)
        if scale < 1e-12 or _same(before, found):
            break
        weights = [min(1.0, _HUBER * scale / residual) if residual else 1.0 for residual in residuals]
    return found[0], found[1] / unit, found[2] / unit / unit


def _same(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-7, abs_tol=1e-30) for x, y in zip(one, other, strict=True))


def _not_negative(rows: Sequence[Row], weights: Sequence[float], terms: tuple[int, ...]) -> Row:
    """The best coefficients of which none is negative: the best over the subsets of terms whose own best has none.

    By the normal equations, which all subsets share.
    """
    weighted = list(zip(rows, weights, strict=True))
    square = [[math.fsum(w * row[i] * row[j] for row, w in weighted) for j in range(3)] for i in range(3)]
    right = [math.fsum(w * row[i] for row, w in weighted) for i in range(3)]
    best, least = (0.0, 0.0, 0.0), math.inf
    for kept in (one for size in range(1, len(terms) + 1) for one in combinations(terms, size)):
        solution = _eliminate([[*(square[i][j] for j in kept), right[i]] for i in kept])
        if solution is None or min(solution) < 0:
            continue
        values = dict(zip(kept, solution, strict=True))
        found = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))
        cost = math.fsum(w * (sum(x * y for x, y in zip(row, found, strict=True)) - 1) ** 2 for row, w in weighted)
        if cost < least:
            best, least = found, cost
    return best


def _eliminate(rows: list[list[float]]) -> list[float] | None:
    """Gauss-Jordan with pivoting on a square system with its right side as last column."""
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) <= 1e-14 * max(abs(value) for value in rows[pivot][:size]) or not rows[pivot][column]:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for r in range(size):
            if r != column:
                factor = rows[r][column]
                rows[r] = [value - factor * top for value, top in zip(rows[r], rows[column], strict=True)]
    return [row[size] for row in rows]
