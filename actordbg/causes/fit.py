"""CauseFit causes to recorded log-probs: arrays in, named causes out. Pure.

All arrays are over the same T tokens, those that the masks of the rows select, row after row, in float64 and nats.

    y = recorded - truth = (log-probs under the cause, of some size) - truth + noise

**Noise** is measured, never assumed: what rounding does to these tokens. `healthy` are the differences of real computations in
the run's dtype; `drawn` are draws (`actordbg.causes.in_worker`), scaled here to the mean of the healthy ones. Neither is white:
a healthy bf16 model reaches 5 to 7 standard errors of white noise along a cause. So errors of amounts are those of the draws' own
fits.

**Two regimes.** Where the mean of |y| is above `ACCEPTED` times the noise, a cause is accepted if what it leaves is at most
`ACCEPTED` times the noise and it takes away half of what is beyond the noise; if none does, the cause is unknown. (A cause that
rounds may leave `EXPLAINED` of what it does itself: values flip at some tokens.) Below, y looks like rounding token
by token, and a cause is named only if its amount, with the real differences as regressors beside it, is `HIDDEN` standard errors
from none, where the real differences themselves, each fitted in the same way, stay below a third of that. Within the noise
nothing else is searched: with as many rows as there are, some other row always fits a little better.

**Kin.** Accepted causes whose remainders do not differ by `APART` standard errors (of the paired differences of |remainder|) are
named together: the data cannot tell them apart.

**Arranged** causes move log-probs without a model: shifted by some tokens, or another row's. A shift is tried at all rows at
once, and another row is searched for each row alone, so a shift is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from actordbg.causes.bank import BY_NAME, ROWS, SHIFT, WEIGHTS, cause_and_part

Array = np.ndarray[Any, np.dtype[Any]]

ACCEPTED = 1.5
"""A fit is accepted if it leaves at most so many times the noise."""
EXPLAINED = 1 / 100
"""A fit of a cause that rounds is accepted too if it leaves at most this share of what it moves."""
HIDDEN = 12.0
APART = 3.0
SHARED = 0.15
"""A side computes in another dtype if its correlation with that dtype's rounding is above this, and 3 standard errors."""
FEWEST = 16
"""Tokens below which nothing is fitted; a row of fewer than half as many is not searched for."""
ZERO = -1e-3
"""A log-prob of exactly 0.0 is a placeholder where the truth, and any cause that was named, is below this."""


@dataclass(frozen=True)
class TokenSample:
    """Log-probs of T tokens. rows: (start, end) of each row.

    curves: by cause, (size, log-probs [T]) of each tried size. own: by cause, the size at which nothing is wrong. healthy [H, T]
    and drawn [K, T]: differences from the truth in the run's dtype. weights: by name, log-probs [T] of the truth with other
    weights. hidden: whether a cause is searched for that no token shows. beside [M, T]: differences along which it is not.
    """

    recorded: Array
    truth: Array
    rows: Sequence[tuple[int, int]]
    healthy: Array
    drawn: Array
    curves: Mapping[str, Sequence[tuple[float, Array]]] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, Array] = field(default_factory=dict)
    beside: Array = field(default_factory=lambda: np.zeros((0, 0)))
    hidden: bool = True

    @cached_property
    def noise(self) -> float:
        """The mean of |difference| that rounding makes, in nats: of the noisiest real computation, else of the draws."""
        of = self.healthy if len(self.healthy) else self.drawn
        return float(np.nanmean(np.abs(of), axis=1).max()) if len(of) else 0.0

    @cached_property
    def draws(self) -> Array:
        """The draws [K, T], scaled to the noise."""
        size = np.nanmean(np.abs(self.drawn)) if len(self.drawn) else 0.0
        return self.drawn * (self.noise / size if size else 0.0)


@dataclass(frozen=True)
class CauseFit:
    """A fitted cause. amount: its size (tokens of a shift, rows that are others'); error: its standard error, None if not
    defined.

    predicted: log-probs [T] under it, NaN where it says nothing. left: the mean of |recorded - predicted|, nats. z: for a cause
    that is hidden in the noise, how many standard errors its amount is from none.
    """

    name: str
    amount: float | None
    error: float | None
    predicted: Array = field(repr=False)
    left: float = math.inf
    z: float | None = None


@dataclass(frozen=True)
class FitResult:
    """The answer. named: the cause first, then those that cannot be told from it. expected: causes that are healthy in a rollout.

    before: the mean of |recorded - truth|, nats, over `tokens`. nearest: the best fit that was not accepted, if the cause is
    unknown and it takes away half of the difference.
    """

    before: float
    noise: float
    tokens: int
    named: tuple[CauseFit, ...] = ()
    placeholders: int = 0
    expected: tuple[CauseFit, ...] = ()
    nearest: CauseFit | None = None

    @property
    def unknown(self) -> bool:
        """Check whether there is a difference beyond noise, and none of the causes explains it."""
        return self.tokens >= FEWEST and not self.named and self.before > ACCEPTED * self.noise


def fit(sample: TokenSample) -> FitResult:
    """Name the causes of a sample's difference. A sample of fewer than `FEWEST` tokens gets no name."""
    zeros = (sample.recorded == 0.0) & (sample.truth < ZERO)
    expected = {name: points[0][1] for name, points in sample.curves.items() if points and cause_and_part(name)[0].expected}
    first = np.zeros(len(zeros), bool)
    for values in expected.values():
        first |= np.abs(values - sample.truth) > sample.noise / 10
    counted = np.isfinite(sample.recorded) & np.isfinite(sample.truth) & ~zeros & ~first
    before = _mean(sample.recorded - sample.truth, counted) if counted.any() else 0.0
    if counted.sum() < FEWEST:
        return FitResult(before, sample.noise, int(counted.sum()))
    named: tuple[CauseFit, ...] = ()
    nearest = None
    if before > ACCEPTED * sample.noise:
        fits = sorted(_fits(sample, counted), key=lambda each: each.left)
        named = tuple(_together(sample, [each for each in fits if _explains(sample, each, before, counted)], counted))
        nearest = next((each for each in fits if each.left <= before / 2), None)
    elif sample.hidden:
        named = tuple(_hidden(sample, counted))
    explained = named[0].predicted if named else sample.truth
    placeholders = int((zeros & ~(explained > ZERO)).sum())
    benign = tuple(_expected(sample, expected, first & np.isfinite(sample.recorded), explained))
    return FitResult(
        before, sample.noise, int(counted.sum()),
        named=named, placeholders=placeholders, expected=benign, nearest=None if named else nearest,
    )  # fmt: skip


def fit_to(sample: TokenSample, old: Array) -> FitResult:
    """Name the causes of a difference from log-probs that a policy without a truth was recorded with, old [T].

    Causes move them as they move the truth. Both have noise, and nothing is searched for within it.
    """
    apart, twice = old - sample.truth, math.sqrt(2)
    curves = {name: [(size, values + apart) for size, values in points] for name, points in sample.curves.items()}
    healthy, drawn = sample.healthy * twice, sample.drawn * twice
    return fit(replace(sample, truth=old, curves=curves, healthy=healthy, drawn=drawn, weights={}, hidden=False))


def rounds_as(sample: TokenSample, fitted: FitResult, rounded: Array) -> bool | None:
    """Check whether what is left of a difference goes along with the rounding of another dtype; None if that is open.

    rounded: log-probs [T] of a computation in that dtype. Kernels round in different ways and share a part: 0.29 to 0.59 for
    eager attention against sdpa or a cache, in bf16 and fp16; an epsilon of the norms, below bf16's rounding, has 0.02 to 0.06.
    """
    left = sample.recorded - (fitted.nearest.predicted if fitted.nearest else sample.truth)
    of_dtype = rounded - sample.truth
    both = np.isfinite(left) & np.isfinite(of_dtype)
    left, of_dtype = left[both], of_dtype[both]
    if len(left) < FEWEST or not of_dtype.std() or mean_apart(left, 0.0) > ACCEPTED * mean_apart(of_dtype, 0.0):
        return False
    shared, error = float(np.corrcoef(left, of_dtype)[0, 1]), 3 / math.sqrt(len(left))
    if shared > max(SHARED, error):
        return True
    return None if shared + error > SHARED else False


def refined(sample: TokenSample, fitted: FitResult) -> list[tuple[str, float]]:
    """Return the sizes to compute around the best fit of a continuous cause that explains much, if they may improve it: it leaves
    more than noise, or the nearest tried size is more than 3 % away.
    """
    best = fitted.named[0] if fitted.named else fitted.nearest
    if best is None or best.amount is None or best.z is not None or not cause_and_part(best.name)[0].along:
        return []
    known = [sample.own[best.name], *(size for size, _ in sample.curves[best.name])]
    near = min(abs(size / best.amount - 1) for size in known) < 0.03
    if best.left > fitted.before / 2 or (near and best.left <= ACCEPTED * fitted.noise):
        return []
    return [(best.name, size) for factor in (0.99, 1.0, 1.01) if (size := best.amount * factor) not in known]


def mean_apart(a: Array, b: Array | float) -> float:
    """Return the mean of |a - b| over the tokens that both have, nats; 0 without any."""
    apart = np.abs(a - b)
    return float(apart[np.isfinite(apart)].mean()) if np.isfinite(apart).any() else 0.0


def _mean(values: Array, where: Array) -> float:
    chosen = np.abs(values[where & np.isfinite(values)])
    return float(chosen.mean()) if len(chosen) else math.inf


def _explains(sample: TokenSample, of: CauseFit, before: float, counted: Array) -> bool:
    """Check whether a fit leaves noise alone, and takes away at least half of what is beyond the noise."""
    cause, noise = cause_and_part(of.name)[0], sample.noise
    if cause.spreads and of.amount:  # log-probs at a low temperature have more noise, as their logits have
        noise *= max(1.0, sample.own[of.name] / of.amount)
    flips = EXPLAINED * _mean(of.predicted - sample.truth, counted) if cause.rounds else 0.0
    return of.left <= max(ACCEPTED * noise, flips) and of.left <= (before + sample.noise) / 2


def _fits(sample: TokenSample, counted: Array) -> Iterator[CauseFit]:
    """Yield the best fit of each cause."""
    for name, points in sample.curves.items():
        cause = cause_and_part(name)[0]
        if cause.expected or not points:
            continue
        if cause.along:
            yield _along(sample, name, points, counted)
        else:
            yield min((_scored(sample, name, size, values, counted) for size, values in points), key=lambda each: each.left)
    for name, values in sample.weights.items():
        yield _scored(sample, f"{WEIGHTS}: {name}", None, values, counted)
    shifted = min(
        (_scored(sample, SHIFT, lag, _shifted(sample, lag), counted) for lag in (-2, -1, 1, 2)), key=lambda each: each.left
    )
    yield shifted
    if shifted.left > ACCEPTED * sample.noise:
        predicted, moved = _other_rows(sample, counted)
        if moved:
            yield _scored(sample, ROWS, moved, predicted, counted)


def _scored(sample: TokenSample, name: str, amount: float | None, predicted: Array, counted: Array) -> CauseFit:
    """Return the fit with what it leaves; infinite if it covers less than half of the tokens."""
    covered = counted & np.isfinite(predicted)
    left = _mean(sample.recorded - predicted, counted) if covered.sum() * 2 >= counted.sum() else math.inf
    return CauseFit(name, amount, None, predicted, left)


def _points(sample: TokenSample, name: str, points: Sequence[tuple[float, Array]]) -> tuple[Array, Array]:
    """Return x of the tried sizes and of none, in order, and their log-probs [P, T]. x is log(size / own), or size / own - 1."""
    own, log = sample.own[name], BY_NAME[name].along == "log"
    at = [(math.log(size / own) if log else size / own - 1, values) for size, values in points]
    known = sorted([(0.0, sample.truth), *at], key=lambda pair: pair[0])
    return np.array([x for x, _ in known]), np.stack([values for _, values in known])


def between(xs: Array, values: Array, x: float) -> Array:
    """Interpolate log-probs [P, T], known at xs [P] in order, at x: Lagrange's cubic through the four nearest points."""
    start = min(max(int(np.searchsorted(xs, x)) - 2, 0), max(len(xs) - 4, 0))
    near = range(start, min(start + 4, len(xs)))
    weights = [math.prod((x - xs[j]) / (xs[i] - xs[j]) for j in near if j != i) for i in near]
    total: Array = sum(weight * values[i] for i, weight in zip(near, weights, strict=True))
    return total


def _along(sample: TokenSample, name: str, points: Sequence[tuple[float, Array]], counted: Array) -> CauseFit:
    """CauseFit the size of a continuous cause: the least mean of |remainder|, by steps, then by golden section."""
    xs, values = _points(sample, name, points)

    def left(x: float) -> float:
        return _mean(sample.recorded - between(xs, values, x), counted)

    steps = np.concatenate([np.linspace(low, high, 6, endpoint=False) for low, high in pairwise(xs)] + [xs[-1:]])
    best = min(range(len(steps)), key=lambda index: left(float(steps[index])))
    low, high = float(steps[max(best - 1, 0)]), float(steps[min(best + 1, len(steps) - 1)])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, b) if left(a) < left(b) else (a, high)
    x = (low + high) / 2
    error = _spread(sample, np.where(counted, slope_at(xs, values, x), 0.0)) * math.sqrt(math.pi / 2)
    predicted = between(xs, values, x)
    return CauseFit(name, *_sized(sample, name, x, error), predicted, _mean(sample.recorded - predicted, counted))


def slope_at(xs: Array, values: Array, x: float) -> Array:
    """Return the derivative of `between` at x [T]."""
    width = float(np.diff(xs).min()) / 8
    return (between(xs, values, x + width) - between(xs, values, x - width)) / (2 * width)


def _sized(sample: TokenSample, name: str, x: float, error: float) -> tuple[float, float]:
    """Return the size at x, and its standard error."""
    own = sample.own[name]
    size = own * (math.exp(x) if BY_NAME[name].along == "log" else 1 + x)
    return size, error * (size if BY_NAME[name].along == "log" else own)


def _spread(sample: TokenSample, slope: Array) -> float:
    """Return the standard error of the amount of `slope` [T] that a least-squares fit finds in the draws and the real
    differences.

    sqrt(pi / 2) more for a fit of absolute remainders (Laplace), which the caller adds.
    """
    norm = float(slope @ slope)
    if not norm or not len(sample.draws):
        return math.inf
    projected = [np.nan_to_num(each) @ slope / norm for each in (sample.draws, sample.healthy) if len(each)]
    white = float(np.sqrt(np.nanmean(sample.draws**2) / norm))
    return max(white, *(float(np.sqrt(np.mean(each**2))) for each in projected))


def _shifted(sample: TokenSample, lag: int) -> Array:
    """Return the truth of the token `lag` further in the same row [T]."""
    shifted = np.full_like(sample.truth, np.nan)
    for start, end in sample.rows:
        low, high = max(start, start - lag), min(end, end - lag)
        if low < high:
            shifted[low:high] = sample.truth[low + lag : high + lag]
    return shifted


def _other_rows(sample: TokenSample, counted: Array) -> tuple[Array, int]:
    """Return, for each row, the truth of the row that fits best [T], and how many rows are others' than their own."""
    predicted, moved = np.full_like(sample.truth, np.nan), 0
    for start, end in sample.rows:
        best = (_mean(sample.recorded[start:end] - sample.truth[start:end], counted[start:end]) / 2, start, end - start)
        for other, stop in sample.rows:
            size = min(end - start, stop - other)
            if other != start and size >= FEWEST // 2:
                away = sample.recorded[start : start + size] - sample.truth[other : other + size]
                best = min(best, (_mean(away, counted[start : start + size]), other, size))
        _, source, size = best
        predicted[start : start + size] = sample.truth[source : source + size]
        moved += source != start
    return predicted, moved


def _together(sample: TokenSample, accepted: Sequence[CauseFit], counted: Array) -> Iterator[CauseFit]:
    """Yield the best accepted fit, and those that the tokens cannot tell from it."""
    for each in accepted:
        apart = np.abs(sample.recorded - each.predicted) - np.abs(sample.recorded - accepted[0].predicted)
        apart = apart[counted & np.isfinite(apart)]
        error = float(apart.std()) / math.sqrt(max(len(apart), 1))
        if each is accepted[0] or float(apart.mean()) <= APART * error:
            yield each


def _hidden(sample: TokenSample, counted: Array) -> Iterator[CauseFit]:
    """Yield a cause that token by token is hidden in the noise, and those of its kin that cannot be told from it."""
    fits = []
    for name, points in sample.curves.items():
        cause = cause_and_part(name)[0]
        if cause.expected or not points:
            continue
        size, values = min(points, key=lambda pair: abs(_mean(pair[1] - sample.truth, counted) - sample.noise))
        xs = _points(sample, name, points) if cause.along else None
        slope = values - sample.truth if xs is None else slope_at(*xs, 0.0)
        if (measured := _amount(sample, np.where(counted, np.nan_to_num(slope), 0.0), counted)) is None:
            continue
        x, error, others = measured
        present = xs[0][0] <= x <= xs[0][-1] if xs else abs(x - 1.0) <= max(0.1, 3 * error)
        if present and abs(x) > HIDDEN * error and max(map(abs, others), default=0.0) < HIDDEN * error / 3:
            predicted = sample.truth + slope * x
            amount, spread = _sized(sample, name, x, error) if xs else (size, None)
            fits.append(CauseFit(name, amount, spread, predicted, _mean(sample.recorded - predicted, counted), x / error))
    fits.sort(key=lambda each: -abs(each.z or 0.0))
    yield from (each for each in fits if abs(each.z or 0.0) > 0.8 * abs(fits[0].z or 0.0))


def _amount(sample: TokenSample, slope: Array, counted: Array) -> tuple[float, float, list[float]] | None:
    """CauseFit the amount of `slope` [T] in recorded - truth, with the healthy differences as regressors beside it; weighted by
    token.

    Returns the amount, its standard error (from the draws, fitted likewise), and the amounts in the healthy differences.
    """
    draws = np.where(counted, np.nan_to_num(sample.draws), 0.0)
    known = np.concatenate([sample.healthy, sample.beside]) if len(sample.beside) else sample.healthy
    healthy = np.where(counted, np.nan_to_num(known), 0.0)
    if len(draws) < 4 or not slope.any():
        return None
    variance = (draws**2).mean(0) / 2 + (draws**2).sum() / (2 * len(draws) * max(int(counted.sum()), 1))
    weight = 1 / np.sqrt(variance)

    def of(y: Array, beside: Array) -> float:
        columns = np.stack([slope * weight, *(beside * weight)], axis=1)
        return float(np.linalg.lstsq(columns / np.linalg.norm(columns, axis=0), y * weight, rcond=None)[0][0]
                     / np.linalg.norm(columns[:, 0]))  # fmt: skip

    y = np.where(counted, np.nan_to_num(sample.recorded - sample.truth), 0.0)
    amounts = [of(draw, healthy) for draw in draws]
    white = 1 / float(np.linalg.norm(slope * weight))
    error = max(float(np.sqrt(np.mean(np.square(amounts)))), white)
    others = [of(each, np.delete(healthy, index, 0)) for index, each in enumerate(healthy)]
    return of(y, healthy), error, others


def _expected(sample: TokenSample, expected: Mapping[str, Array], first: Array, explained: Array) -> Iterator[CauseFit]:
    """Yield causes that are healthy in a rollout, if they explain what is left at the tokens that they move."""
    for name, values in expected.items():
        moved = values - sample.truth
        where = first & (np.abs(moved) > sample.noise / 10)
        if where.sum() < 2:
            continue
        y, size = (sample.recorded - explained)[where], moved[where]
        share = float(y @ size / (size @ size))
        error = math.sqrt(float(np.mean((y - share * size) ** 2)) / float(size @ size))
        if abs(share - 1.0) <= max(0.2, 3 * error) and share > 4 * error:
            left = float(np.abs(y - size).mean())
            yield CauseFit(name, None, None, explained + moved, left)
