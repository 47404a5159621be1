"""Compare one metric of two training logs, step by step.

One of two rules decides, and the result names it. A relative difference is |a - b| / max(|a|, |b|), and 0 where both are 0.
"Below" is strictly below the threshold.

* `first-mean-last` (default): the first value, the mean and the last value of both differ by less than the threshold. Numbered
  steps count if both logs have them; if lines have no step numbers, all values count.
* `every-step`: no common step differs by the threshold or more.

A NaN or an infinity is a failure. Fewer than LEAST_COMMON common steps are `too-few-steps`: first,
mean and last of a single step are equal. Two logs with nothing to compare give `nothing-in-common`. Values that differ while the
logs number their steps differently are `unequal-steps`: other steps may have been held together. None of these is aligned.

Whether a series falls: the median of the first third of its values is compared with that of the last third; half of the
values in a third can be outliers without moving its median. A change counts if it exceeds twice its standard error, which is
estimated from the differences of neighboring steps: sigma = 1.4826 x median |x[i+1] - x[i]| / sqrt(2), a scale that trend and
outliers hardly inflate. The difference of two medians of m values each has the standard error 1.2533 x sigma x sqrt(2 / m).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.base.units import letter_of, listed, plural
from actordbg.measure.log_exports import BAR, CALL, LINE, ORDER, plain_name
from actordbg.measure.log_lines import KINDS, Series, TrainLog, is_loss
from actordbg.trainers.trainer import TRAINER

FIRST_MEAN_LAST, EVERY_STEP = "first-mean-last", "every-step"
RULES = (FIRST_MEAN_LAST, EVERY_STEP)
THRESHOLD = 0.05
LEAST_COMMON = 3
"""Fewest common steps for the verdict "aligned"."""
_NAMED = 20
Pairs = list[tuple[int, float, float]]
"""Common steps, ascending, each with both values."""
Three = tuple[float | None, float | None, float | None]
ALIGNED, DIFFERENT, NOTHING, TOO_FEW_COMMON = "aligned", "different", "nothing-in-common", "too-few-steps"
UNEQUAL = "unequal-steps"
METHOD = "median of the last third against that of the first, beyond twice the standard error estimated from neighboring steps"
LEAST = 6
"""Fewest values for a trend."""

FALLS, RISES, FLAT, TOO_FEW = "falls", "rises", "neither falls nor rises", "too few steps to tell"


@dataclass(frozen=True)
class Trend:
    """The trend of a series. word: one of the four above. first, last: medians of the first and last third.

    error: standard error of their difference.
    """

    word: str
    first: float | None = None
    last: float | None = None
    error: float | None = None


def trend(values: Sequence[float]) -> Trend:
    """Decide whether finite `values`, in order of their steps, fall or rise."""
    if len(values) < LEAST:
        return Trend(TOO_FEW)
    third = len(values) // 3
    first, last = median(values[:third]), median(values[-third:])
    steps = [abs(b - a) for a, b in pairwise(values)]
    sigma = 1.4826 * median(steps) / math.sqrt(2)
    error = 1.2533 * sigma * math.sqrt(2 / third)
    word = FLAT if abs(last - first) <= 2 * error else FALLS if last < first else RISES
    return Trend(word, first, last, error)


@dataclass(frozen=True)
class Step:
    """A step in both logs. A value that is not finite is None, and `note` names it."""

    step: int
    a: float | None
    b: float | None
    relative: float | None
    note: str = ""


@dataclass(frozen=True)
class LogSide:
    """The values of the metric in a log. Figures are over its finite values.

    nonfinite: how many values are NaN or infinite, and nonfinite_steps the first of their steps. nulls: NaN that were written as
    null. rerun: steps that the log repeats. found: how often each metric occurs in the log (empty unless nothing could be
    compared).
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
    nulls: int = 0
    found: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LogComparison:
    """The result of `compare-logs`. verdict: aligned, different, nothing-in-common, unequal-steps or too-few-steps.

    reasons: why.
    first, mean, last: relative differences under the rule. common: number of common steps; exceeding: how many differ
    by the threshold or more; `worst`: the largest of those, largest first.
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
    exceeding: int = 0
    median_relative: float | None = None
    max_relative: float | None = None
    worst: tuple[Step, ...] = ()

    @property
    def good(self) -> bool:
        """Return whether the logs were compared and agree."""
        return self.verdict == ALIGNED


@dataclass(frozen=True)
class LogComparisons:
    """The result of `compare-logs` over more than two logs: each against the first, or all pairs."""

    verdict: str
    metric: str | None
    rule: str
    threshold: float
    comparisons: tuple[LogComparison, ...]

    @property
    def good(self) -> bool:
        """Return whether every pair was compared and agrees."""
        return all(pair.good for pair in self.comparisons)


def together(pairs: Sequence[LogComparison]) -> LogComparisons:
    """Combine pairs into a single result: different if any pair is, aligned if every pair is, else the first other verdict."""
    verdicts = [pair.verdict for pair in pairs if not pair.good]
    verdict = DIFFERENT if DIFFERENT in verdicts else next(iter(verdicts), ALIGNED)
    metric = next((pair.metric for pair in pairs if pair.metric), None)
    return LogComparisons(verdict, metric, pairs[0].rule, pairs[0].threshold, tuple(pairs))


def relative(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|); 0 if both are 0, NaN if either is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    return abs(a - b) / (max(abs(a), abs(b)) or 1.0)


def letters_of(paths: Iterable[str]) -> dict[str, str]:
    """Assign each log a letter, in order: A, B, ... Z, AA."""
    return {path: letter_of(at) for at, path in enumerate(dict.fromkeys(paths))}


def _preference(name: str) -> tuple[bool, int, str]:
    """Return the sort key of a metric: the trainer's losses in its order, then others by name, evaluation metrics last."""
    return "eval" in name.lower(), [*TRAINER.losses, name].index(name), name


def chosen_series(a: TrainLog, b: TrainLog, name: str) -> tuple[Series, Series]:
    """Return both logs' series of a metric: with equal step numbering if possible, preferring the best numbering."""
    ours, theirs = a.series[name], b.series[name]
    both = [kind for kind in KINDS if kind in ours and kind in theirs]
    first, second = (next(series[kind] for kind in both or KINDS if kind in series) for series in (ours, theirs))
    return first, second


def pair(a: Series, b: Series) -> Pairs:
    """Return the common steps of both series, ascending, each with both values."""
    return [(step, value, b.points[step]) for step, value in a.points.items() if step in b.points]


def compare_logs(
    a: TrainLog,
    b: TrainLog,
    *,
    metric: str | None = None,
    threshold: float = THRESHOLD,
    rule: str = FIRST_MEAN_LAST,
    limit: int = 10,
    letters: tuple[str, str] = ("A", "B"),
) -> LogComparison:
    """Compare a metric of two logs: `metric`, else the preferred loss that both have.

    `limit`: how many of the worst steps to name, 0 for all. `letters`: the names of the logs. Raises UsageError for a
    threshold that is not a positive number, and for an unknown rule.
    """
    if not threshold > 0 or not math.isfinite(threshold):
        raise UsageError(f"--threshold {threshold} is not a positive number", hint="use 0.05 to allow a difference of 5 %")
    if rule not in RULES:
        raise UsageError(f"unknown rule {rule!r:.40}", hint=f"use one of {listed(RULES)}")
    requested = None if metric is None else plain_name(metric)
    known = [{requested} & log.series.keys() if requested else set(filter(is_loss, log.series)) for log in (a, b)]
    name = min(known[0] & known[1], key=_preference, default=None)
    if name is None:
        lacking = [letter for letter, names in zip(letters, known, strict=True) if not names]
        wanted = requested or "loss"
        why = f"no {wanted} in {' and '.join(lacking)}" if lacking else "no loss that both logs have"
    else:
        ours, theirs = chosen_series(a, b, name)
        both = pair(ours, theirs)
        why = "" if both else f"both logs have {name}, but no step is in both"
    if name is None or why:
        first, second = (LogSide(path=log.path, found=dict(log.metrics)) for log in (a, b))
        return LogComparison(first, second, name or metric, rule, threshold, NOTHING, reasons=(why,))
    if ours.kind == ORDER and theirs.kind == ORDER:
        x, y = _finite(ours.points.values()), _finite(theirs.points.values())
    else:
        x, y = _finite(gap[1] for gap in both), _finite(gap[2] for gap in both)
    sides = _side(a, ours, name), _side(b, theirs, name)
    gaps = [(relative(x, y), step, x, y) for step, x, y in both]
    over = sorted((gap for gap in gaps if not gap[0] < threshold), key=lambda gap: (not math.isnan(gap[0]), -gap[0], gap[1]))
    finite = _finite(gap for gap, *_ in gaps)
    three: Three = (None, None, None)
    if x and y:
        three = relative(x[0], y[0]), relative(fmean(x), fmean(y)), relative(x[-1], y[-1])
    called = list(zip(letters, sides, strict=True))
    differs, wild = _apart(name, rule, threshold, three, len(over)), _wild(called)
    verdict, reasons = DIFFERENT if differs or wild else ALIGNED, differs + wild
    unequal = _unequal(ours, theirs, letters)
    if differs and unequal:  # a NaN is one whatever its step
        verdict = DIFFERENT if wild else UNEQUAL
        reasons = [*wild, f"{unequal}: other steps may have been held together"]
    if verdict == ALIGNED and len(both) < LEAST_COMMON:
        verdict = TOO_FEW_COMMON
        counted = "1 step is" if len(both) == 1 else f"{len(both):,} steps are"
        reasons = [f"{counted} in both logs, but at least {LEAST_COMMON} are needed"]
    worst = []
    for gap, step, *values in over[:limit] if limit else over:
        named = [f"{letter} is {value}" for letter, value in zip("AB", values, strict=True) if not math.isfinite(value)]
        left, right, apart = (value if math.isfinite(value) else None for value in (*values, gap))
        worst.append(Step(step, left, right, apart, listed(named)))
    return LogComparison(
        *sides, name, rule, threshold, verdict,
        reasons=tuple(reasons), notes=tuple(_notes(ours, theirs, len(both), called, unequal)),
        first=three[0], mean=three[1], last=three[2],
        common=len(both), exceeding=len(over),
        median_relative=median(finite) if finite else None,
        max_relative=max(finite, default=None),
        worst=tuple(worst),
    )  # fmt: skip


def compare_many(logs: Sequence[TrainLog], *, each: bool, metric: str | None, **given: Any) -> list[LogComparison]:
    """Compare every log with the first, or with `each` all pairs, by a single metric.

    Without `metric`, more than two logs are compared by the loss that most of them have. `given`: threshold, rule and limit of
    `compare_logs`.
    """
    if len(logs) == 2:
        return [compare_logs(*logs, metric=metric, **given)]
    if metric is None:
        names = {name for log in (logs if each else logs[:1]) for name in log.series if is_loss(name)}
        counts = {name: sum(name in log.series for log in logs) for name in names}
        metric = min(names, key=lambda name: (-counts[name], _preference(name)), default=None)
    letters = letters_of(log.path for log in logs)
    return [
        compare_logs(a, b, metric=metric, letters=(letters[a.path], letters[b.path]), **given)
        for a, b in combinations(logs, 2)
        if each or a is logs[0]
    ]


def _apart(name: str, rule: str, threshold: float, three: Three, over: int) -> list[str]:
    """List how the values of two logs differ; [] if they agree under the rule."""
    if rule == EVERY_STEP:
        counted = "1 step differs" if over == 1 else f"{over:,} steps differ"
        return [f"{counted} by {threshold:g} or more"] if over else []
    if three[0] is None:
        return [f"no value of {name} that the rule counts"]
    return [
        f"the {what} differs by {value:.4g}, which is not below {threshold:g}"
        for what, value in zip(("first value", "mean", "last value"), three, strict=True)
        if value is not None and not value < threshold
    ]


def _wild(sides: Sequence[tuple[str, LogSide]]) -> list[str]:
    """List the logs that have values which are not finite."""
    reasons = []
    for letter, side in sides:
        if side.nonfinite:
            count = f"1 value of {letter} is" if side.nonfinite == 1 else f"{side.nonfinite:,} values of {letter} are"
            steps = listed(side.nonfinite_steps[:5]) + (", ..." if side.nonfinite > 5 else "")
            reasons.append(f"{count} NaN or infinite (step {steps})")
    return reasons


_NUMBERED = {LINE: "the trainer's step", CALL: "W&B's calls", BAR: "its progress bar", ORDER: "counting lines"}


def _unequal(ours: Series, theirs: Series, letters: tuple[str, str]) -> str:
    """Say why equal numbers may not be equal steps; "" if they are."""
    a, b = letters
    if ours.kind != theirs.kind:
        return f"the logs number their steps differently: {a} by {_NUMBERED[ours.kind]}, {b} by {_NUMBERED[theirs.kind]}"
    if ours.kind == ORDER and len(ours.points) != len(theirs.points):
        return f"the lines have no step numbers, and {a} has {len(ours.points):,}, {b} {len(theirs.points):,}"
    if ours.totals and theirs.totals and ours.totals != theirs.totals:
        return f"a round has {_rounds(ours.totals)} steps in {a} and {_rounds(theirs.totals)} in {b}"
    return ""


def _rounds(totals: Sequence[int]) -> str:
    named = [f"{total:,}" for total in totals[:3]]
    return " or ".join([*named, "more"] if len(totals) > 3 else named)


def _notes(ours: Series, theirs: Series, both: int, sides: Sequence[tuple[str, LogSide]], unequal: str) -> list[str]:
    notes, (a, b) = [unequal] if unequal else [], (letter for letter, _ in sides)
    if ours.kind == theirs.kind == ORDER:
        notes.append("the lines have no step numbers: they are counted, from 1")
    if BAR in (ours.kind, theirs.kind):
        notes.append("progress bars print three digits: differences below 0.01 may be rounding")
    if len(ours.points) != len(theirs.points):
        notes.append(f"{a} has {len(ours.points):,} steps, {b} {len(theirs.points):,}; {both:,} are in both")
    for letter, side in sides:
        if side.nulls:
            notes.append(f"{letter} writes NaN as null, {plural(side.nulls, 'time')}")
        if side.rerun:
            notes.append(f"{letter} repeats {side.rerun:,} earlier steps (resumed?): the later values count")
    return notes


def _side(log: TrainLog, series: Series, name: str) -> LogSide:
    steps, values = list(series.points), _finite(series.points.values())
    wild = [step for step, value in series.points.items() if not math.isfinite(value)]
    side = LogSide(
        log.path, series.kind, len(steps), steps[0], steps[-1],
        trend=trend(values), nonfinite=len(wild), nonfinite_steps=tuple(wild[:_NAMED]), rerun=series.rerun,
        nulls=log.nulls.get(name, 0),
    )  # fmt: skip
    if not values:
        return side
    least, most = min(values), max(values)
    return replace(side, first=values[0], mean=fmean(values), last=values[-1], smallest=least, largest=most)


def _finite(values: Iterable[float]) -> list[float]:
    return list(filter(math.isfinite, values))
