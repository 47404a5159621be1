"""Compares one metric of two training logs, step by step.

One of three rules decides, and the answer names it. A relative difference is |a - b| / max(|a|, |b|), and 0 where both are 0.
"Below" is strictly below the threshold.

* `first-mean-last` (default): the first value, the mean and the last value of both differ by less than the threshold. Steps
  that say their number are compared where both logs have them; where lines have no numbers, all values count.
* `every-step`: no step that both have differs by the threshold or more.
* `compare-backends`: what the trainer's archived script `compare_backends.py` decides: first, mean and last of all values
  between 0 and 100 (both excluded), whatever their steps. It leaves the others out, and the answer says how many.

Under the first two, a NaN or an infinity makes the answer bad: it agrees with nothing. Fewer than LEAST_COMMON common steps are
`too-few-steps`: first, mean and last of one step are the same number. Two logs with nothing to compare give `nothing-in-common`.
All of these are bad.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from actordbg.base.errors import UsageError
from actordbg.measure.log_answer import ALIGNED, DIFFERENT, NOTHING, TOO_FEW_COMMON, LogComparison, LogSide, Step, trend
from actordbg.measure.log_lines import BAR, KINDS, ORDER, Series, TrainLog, is_loss, plain_name
from actordbg.trainers.trainer import TRAINER

FIRST_MEAN_LAST, EVERY_STEP, COMPARE_BACKENDS = "first-mean-last", "every-step", "compare-backends"
RULES = (FIRST_MEAN_LAST, EVERY_STEP, COMPARE_BACKENDS)
THRESHOLD = 0.05
LEAST_COMMON = 3
"""Common steps below which nothing is called aligned."""
_NAMED = 20
Letters = tuple[str, str]
Three = tuple[float | None, float | None, float | None]
"""Relative differences of first value, mean and last value; None where one side has no value."""
Pairs = list[tuple[int, float, float]]
"""Steps that both logs have, ascending, and both values of each."""


def relative(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|), 0 where both are 0; NaN where one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def choose(a: TrainLog, b: TrainLog, metric: str | None = None) -> str | None:
    """The metric to compare: the asked one, else the preferred loss that both have; None where they share none."""
    if metric is not None:
        name = plain_name(metric)
        return name if name in a.series and name in b.series else None
    shared = [name for name in a.series if name in b.series and is_loss(name)]
    return min(shared, key=_preference, default=None)


def choose_of_many(logs: Sequence[TrainLog], of: Sequence[TrainLog]) -> str | None:
    """The loss of one of `of` that most of the logs have, the preferred one of several; None if there is none."""
    names = dict.fromkeys(name for log in of for name in log.series if is_loss(name))
    return min(names, key=lambda name: (-sum(name in log.series for log in logs), _preference(name)), default=None)


def letters_of(paths: Sequence[str]) -> dict[str, str]:
    """What an answer calls each log, in their order: A, B, ... Z, then L27."""
    return {path: chr(ord("A") + at) if at < 26 else f"L{at + 1}" for at, path in enumerate(dict.fromkeys(paths))}


def _preference(name: str) -> tuple[int, int, str]:
    """The trainer's losses in its order, then the others by name, an evaluation's last."""
    place = TRAINER.losses.index(name) if name in TRAINER.losses else len(TRAINER.losses)
    return (int("eval" in name.lower()), place, name)


def chosen_series(a: TrainLog, b: TrainLog, name: str) -> tuple[Series, Series]:
    """Both logs' series of a metric: numbered alike where possible, the best numbering first."""
    ours, theirs = a.series[name], b.series[name]
    for kind in KINDS:
        if kind in ours and kind in theirs:
            return ours[kind], theirs[kind]
    first, second = (next(one[kind] for kind in KINDS if kind in one) for one in (ours, theirs))
    return first, second


def pair(a: Series, b: Series) -> Pairs:
    """The steps that both series have, ascending, and both values of each."""
    theirs = dict(zip(b.steps, b.values, strict=True))
    return [(step, value, theirs[step]) for step, value in zip(a.steps, a.values, strict=True) if step in theirs]


def compare_logs(
    a: TrainLog,
    b: TrainLog,
    *,
    metric: str | None = None,
    threshold: float = THRESHOLD,
    rule: str = FIRST_MEAN_LAST,
    limit: int = 10,
    letters: Letters = ("A", "B"),
) -> LogComparison:
    """Compare one metric of two logs. `limit`: how many of the worst steps to name, 0 for all. `letters`: what they are called.

    Raises UsageError for a threshold that is not a positive number, and for an unknown rule.
    """
    if not threshold > 0 or not math.isfinite(threshold):
        raise UsageError(f"--threshold {threshold} is not a positive number", hint="0.05 allows 5 % of difference")
    if rule not in RULES:
        raise UsageError(f"there is no rule {rule!r:.40}", hint=f"one of {', '.join(RULES)}")
    name = choose(a, b, metric)
    if name is None:
        wanted = plain_name(metric) if metric is not None else None
        lacking = [
            letter for letter, log in zip(letters, (a, b), strict=True)
            if not (any(map(is_loss, log.series)) if wanted is None else wanted in log.series)
        ]  # fmt: skip
        why = f"no {wanted or 'loss'} in {' and '.join(lacking)}" if lacking else "no loss that both logs have"
        return _nothing(a, b, metric, rule, threshold, why)
    ours, theirs = chosen_series(a, b, name)
    both = pair(ours, theirs)
    if not both and rule != COMPARE_BACKENDS:
        return _nothing(a, b, name, rule, threshold, f"both logs have {name}, but no step is in both")
    numbers = _deciding(ours, theirs, both, rule)
    sides = (_side(a, ours, rule, numbers[0]), _side(b, theirs, rule, numbers[1]))
    gaps = [(relative(x, y), step, x, y) for step, x, y in both]
    over = sorted((gap for gap in gaps if not gap[0] < threshold), key=lambda gap: (not math.isnan(gap[0]), -gap[0], gap[1]))
    known = sorted(gap for gap, _, _, _ in gaps if not math.isnan(gap))
    three: Three = (None, None, None)
    if all(numbers):
        first, mean, last = zip(*((values[0], math.fsum(values) / len(values), values[-1]) for values in numbers), strict=True)
        three = relative(*first), relative(*mean), relative(*last)
    reasons = _reasons(name, rule, threshold, three, len(over), list(zip(letters, sides, strict=True)))
    verdict = DIFFERENT if reasons else ALIGNED
    if verdict == ALIGNED and rule != COMPARE_BACKENDS and len(both) < LEAST_COMMON:
        verdict = TOO_FEW_COMMON
        counted = "1 step is" if len(both) == 1 else f"{len(both):,} steps are"
        reasons = [f"{counted} in both, and fewer than {LEAST_COMMON} say nothing about a training"]
    return LogComparison(
        *sides, name, rule, threshold, verdict, tuple(reasons), tuple(_notes(ours, theirs, len(both), sides, letters)), *three,
        common=len(both), only_a=len(ours.steps) - len(both), only_b=len(theirs.steps) - len(both),
        exceeding=len(over),
        median_relative=median(known) if known else None,
        max_relative=known[-1] if known else None,
        worst=tuple(_step(*gap) for gap in (over[:limit] if limit else over)),
    )  # fmt: skip


def compare_many(
    logs: Sequence[TrainLog], *, each: bool = False, metric: str | None = None, threshold: float = THRESHOLD,
    rule: str = FIRST_MEAN_LAST, limit: int = 10,
) -> list[LogComparison]:  # fmt: skip
    """Every log against the first, or with `each` every one against every other; all pairs by the same metric."""
    pairs = combinations(logs, 2) if each else ((logs[0], other) for other in logs[1:])
    if metric is None and len(logs) > 2:
        metric = choose_of_many(logs, logs if each else logs[:1])
    called = letters_of([log.path for log in logs])
    return [
        compare_logs(
            a, b, metric=metric, threshold=threshold, rule=rule, limit=limit,
            letters=(called[a.path], called[b.path]) if len(logs) > 2 else ("A", "B"),
        )
        for a, b in pairs
    ]  # fmt: skip


def _deciding(ours: Series, theirs: Series, both: Pairs, rule: str) -> tuple[list[float], list[float]]:
    """The values that first, mean and last are taken of."""
    if rule == COMPARE_BACKENDS:
        return [v for v in ours.values if 0 < v < 100], [v for v in theirs.values if 0 < v < 100]
    if ours.kind == ORDER and theirs.kind == ORDER:
        return _finite(ours.values), _finite(theirs.values)
    return _finite(a for _, a, _ in both), _finite(b for _, _, b in both)


def _reasons(
    name: str,
    rule: str,
    threshold: float,
    three: Three,
    over: int,
    sides: Sequence[tuple[str, LogSide]],
) -> list[str]:
    """What makes the answer bad; nothing where it is good."""
    reasons = []
    if rule == EVERY_STEP:
        if over:
            reasons.append(f"{over:,} {'step differs' if over == 1 else 'steps differ'} by {threshold:g} or more")
    elif three[0] is None:
        reasons.append(f"no value of {name} that the rule counts")
    else:
        for what, value in zip(("first value", "mean", "last value"), three, strict=True):
            if value is not None and not value < threshold:
                reasons.append(f"the {what} differs by {value:.4g}, which is not below {threshold:g}")
    if rule != COMPARE_BACKENDS:
        for letter, side in sides:
            if side.nonfinite:
                what = "value of {} is" if side.nonfinite == 1 else "values of {} are"
                steps = ", ".join(map(str, side.nonfinite_steps[:5])) + (", ..." if side.nonfinite > 5 else "")
                reasons.append(f"{side.nonfinite:,} {what.format(letter)} NaN or infinite (step {steps})")
    return reasons


def _notes(ours: Series, theirs: Series, both: int, sides: tuple[LogSide, LogSide], letters: Letters) -> list[str]:
    notes, (a, b) = [], letters
    if ours.kind != theirs.kind:
        notes.append(f"the logs number their steps differently: {a} by {_KIND[ours.kind]}, {b} by {_KIND[theirs.kind]}")
    elif ours.kind == ORDER:
        notes.append("nothing in the lines says which step they are: they are counted, from 1")
    if BAR in (ours.kind, theirs.kind):
        notes.append("progress bars print three digits: differences below 0.01 may be rounding")
    if ours.totals and theirs.totals and ours.totals != theirs.totals:
        rounds = f"{_list(ours.totals)} steps in {a} and {_list(theirs.totals)} in {b}"
        notes.append(f"a round has {rounds}: equal numbers may not be equal steps")
    if len(ours.steps) != len(theirs.steps):
        notes.append(f"{a} has {len(ours.steps):,} steps, {b} {len(theirs.steps):,}; {both:,} are in both")
    for letter, side in zip(letters, sides, strict=True):
        if side.rerun:
            notes.append(f"{letter} came back to {side.rerun:,} earlier steps (resumed?): the later values count")
        if side.left_out:
            notes.append(f"{side.left_out:,} values of {letter} are left out: not between 0 and 100, or not finite")
    return notes


_KIND = {"line": "what its lines say", "bar": "its progress bar", "order": "counting its lines"}


def _list(values: Sequence[int]) -> str:
    return " or ".join(f"{value:,}" for value in values[:3]) + (" or more" if len(values) > 3 else "")


def _step(gap: float, step: int, a: float, b: float) -> Step:
    wild = [f"{letter} is {value}" for letter, value in (("A", a), ("B", b)) if not math.isfinite(value)]
    first, second, apart = (value if math.isfinite(value) else None for value in (a, b, gap))
    return Step(step, first, second, apart, ", ".join(wild))


def _side(log: TrainLog, series: Series, rule: str, counted: Sequence[float]) -> LogSide:
    values = _finite(series.values)
    wild = [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
    return LogSide(
        path=log.path, numbered_by=series.kind, steps=len(series.steps),
        first_step=series.steps[0], last_step=series.steps[-1],
        first=values[0] if values else None,
        mean=math.fsum(values) / len(values) if values else None,
        last=values[-1] if values else None,
        smallest=min(values, default=None), largest=max(values, default=None),
        trend=trend(values), nonfinite=len(wild), nonfinite_steps=tuple(wild[:_NAMED]), rerun=series.rerun,
        left_out=len(series.values) - len(counted) if rule == COMPARE_BACKENDS else 0,
        round_lengths=series.totals,
    )  # fmt: skip


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _nothing(a: TrainLog, b: TrainLog, metric: str | None, rule: str, threshold: float, why: str) -> LogComparison:
    sides = [LogSide(path=log.path, found=dict(log.metrics)) for log in (a, b)]
    return LogComparison(sides[0], sides[1], metric, rule, threshold, NOTHING, reasons=(why,))
