"""Trainings compared step by step as a document and as pictures, for `compare-logs` and `train-check`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actordbg.base.units import plural
from actordbg.document.blocks import (
    BAD_TONE,
    GOOD_TONE,
    NO_TONE,
    Banner,
    Block,
    Chart,
    Grid,
    Heading,
    Items,
    Paragraph,
    number,
)
from actordbg.document.specifications import BAD, hints, layer, layered, names, powers, quantity, thinned, whole
from actordbg.measure.align_logs import EVERY_STEP, chosen_series, letters_of, pair, relative
from actordbg.measure.log_answer import FLAT, NOTHING, LogComparison, LogSide, together
from actordbg.measure.log_lines import TrainLog, is_loss

_NAMES = 30


def logs_page(answers: Sequence[LogComparison], charts: Sequence[Chart] = ()) -> list[Block]:
    """The whole answer of `compare-logs`: a line for each log and each pair, then what decided; of one pair its worst steps."""
    whole, first = together(answers), answers[0]
    sides: dict[str, LogSide] = {}
    for side in (side for answer in answers for side in (answer.a, answer.b)):
        if side.path not in sides or not sides[side.path].steps:  # a pair with nothing in common has no figures of either
            sides[side.path] = side
    letters = letters_of(list(sides))
    called = [f"{letters[answer.a.path]} {letters[answer.b.path]}" for answer in answers]
    pairs = tuple(
        (name, f"{answer.common:,}", number(answer.first, 3), number(answer.mean, 3), number(answer.last, 3),
         number(answer.max_relative, 3), answer.verdict)
        for name, answer in zip(called, answers, strict=True)
    )  # fmt: skip
    reasons = [f"{name}: {reason}" for name, answer in zip(called, answers, strict=True) for reason in answer.reasons]
    unlike = "; ".join(dict.fromkeys(reason for answer in answers for reason in answer.reasons))
    largest = max((answer.max_relative for answer in answers if answer.max_relative is not None), default=None)
    figures = (
        ("common steps", f"{min(answer.common for answer in answers):,}"),
        ("largest difference", "-" if largest is None else f"{largest:.2%}"),
    )
    tone = GOOD_TONE if whole.good else NO_TONE if whole.verdict == NOTHING else BAD_TONE
    sentence = f"{unlike or f'{first.metric} agrees by the rule {first.rule}'}."
    blocks: list[Block] = [
        Heading(f"{whole.metric or 'nothing'} by step, threshold {whole.threshold:g}, rule {whole.rule}", 1),
        Banner(whole.verdict.upper().replace("-", " "), sentence, tone, figures),
        Items(tuple(f"{letters[path]}  {path}{_seen(side)}" for path, side in sides.items())),
        *charts,
        Grid(
            ("log", "steps", "first", "mean", "last", "least", "most", "trend"),
            tuple(_log(letters[path], side) for path, side in sides.items()),
            {"log", "trend"},
        ),
        Grid(("pair", "common", "first", "mean", "last", "largest", "verdict"), pairs, {"pair", "verdict"}),
    ]
    if len(answers) == 1 and first.common:
        blocks += _steps(first)
    notes = tuple(f"note: {note}" for answer in answers for note in answer.notes)
    blocks += [Items(notes)] if notes else []
    if whole.verdict == NOTHING:
        blocks.append(Paragraph(_ANOTHER))
    if not whole.good:
        return [*blocks, Items(tuple(reasons)), Paragraph(whole.verdict)]
    what = "no common step differs by" if whole.rule == EVERY_STEP else "first value, mean and last value differ by less than"
    return [*blocks, Paragraph(f"{whole.verdict} ({what} {whole.threshold:g}{' or more' * (whole.rule == EVERY_STEP)})")]


_ANOTHER = (
    "--metric NAME compares another figure than a loss; a metric is found in progress bars, in lines that name a step, and in "
    "lines like `gpt_loss: 5.78`"
)


def _seen(side: LogSide) -> str:
    """What a log has, where nothing of it could be compared."""
    if side.steps:
        return ""
    metrics = sorted(side.found.items(), key=lambda item: (not is_loss(item[0]), -item[1], item[0]))
    shown = ", ".join(f"{name} ({count:,})" for name, count in metrics[:_NAMES]) or "no figures at all"
    return f": {shown}" + (f", and {len(metrics) - _NAMES:,} more" if len(metrics) > _NAMES else "")


def _log(letter: str, side: LogSide) -> tuple[str, ...]:
    """A log's line: its steps, and figures over its finite values."""
    if not side.steps:
        return (letter, *["-"] * 7)
    trend = "flat" if side.trend.word == FLAT else side.trend.word
    if side.trend.first is not None:
        trend += f", {number(side.trend.first, 3)} to {number(side.trend.last, 3)}"
    steps = f"{side.first_step:,}-{side.last_step:,} ({side.steps:,})"
    return letter, steps, *map(number, (side.first, side.mean, side.last, side.smallest, side.largest)), trend


def _steps(answer: LogComparison) -> list[Block]:
    """How many steps are too far apart, and the worst of them."""
    spread = f"median {number(answer.median_relative, 3)}, largest {number(answer.max_relative, 3)}"
    reach = f"{answer.exceeding:,} of {answer.common:,} common steps differ by {answer.threshold:g} or more"
    blocks: list[Block] = [Paragraph(f"{reach} ({spread}). Trend: {answer.trend_method}.")]
    if answer.worst:
        rows = tuple(
            (f"{step.step:,}", *("not finite" if value is None else number(value) for value in (step.a, step.b)),
             step.note if step.relative is None else number(step.relative, 3))
            for step in answer.worst
        )  # fmt: skip
        blocks.append(Grid(("step", "A", "B", "difference"), rows))
    more = answer.exceeding - len(answer.worst)
    return [*blocks, *([Paragraph(f"and {more:,} more (--limit 0 names all)")] if answer.worst and more else [])]


def log_charts(answers: Sequence[LogComparison], read: Sequence[TrainLog]) -> list[Chart]:
    """Returns the charts of compared logs: their values, and their relative differences by step."""
    logs, first = {log.path: log for log in read}, answers[0]
    letters = letters_of(list(logs))
    values: dict[str, Curve] = {}
    apart: dict[str, Curve] = {}
    for answer in answers:
        if answer.metric is None or not answer.common:
            continue
        ours, theirs = chosen_series(logs[answer.a.path], logs[answer.b.path], answer.metric)
        for path, series in ((answer.a.path, ours), (answer.b.path, theirs)):
            values[f"{letters[path]}: {Path(path).name}"] = list(zip(series.steps, series.values, strict=True))
        gaps = [(step, relative(a, b)) for step, a, b in pair(ours, theirs)]
        apart[f"{letters[answer.a.path]} {letters[answer.b.path]}"] = gaps
    steps = sorted({step for curve in apart.values() for step, _ in curve})
    limits = [(step, first.threshold) for step in (steps[0], steps[-1])] if steps else []
    charts = (
        values_chart("The trainings", first.metric or "", values),
        apart_chart("How far apart", first.metric or "", apart, limits, "the other's"),
    )
    return [chart for chart in charts if chart is not None]


Curve = Sequence[tuple[int, float]]
"""(step, value) pairs."""
_MOST = 400


def values_chart(title: str, what: str, curves: Mapping[str, Curve]) -> Chart | None:
    """A value by step, a line for each training; steps without a finite value are left out and counted."""
    rows = [row for name, curve in curves.items() for row in _rows(name, curve)]
    if not rows:
        return None
    odd = sum(not math.isfinite(value) for curve in curves.values() for _, value in curve)
    shown = hints(("c", "training"), ("s", "step"), ("v", what))
    line = layer("line", look={"strokeWidth": 1.6}, tooltip=shown)
    spec = layered(rows, line, height=260, x=whole("s", "step"), y=quantity("v", what, zero=False), color=names("c", None))
    says = f"The {what} of {plural(len(curves), 'training')} by step." + (
        f" {plural(odd, 'value')} NaN or infinite, not drawn." if odd else ""
    )
    return Chart(title, says, spec, _ends(curves, what), _thin_note(curves))


def apart_chart(title: str, what: str, curves: Mapping[str, Curve], limits: Curve, whose: str = "the baseline's") -> Chart | None:
    """Relative differences by step on a log scale, with what they may be as a dashed line. whose: of whom they are apart."""
    floor = 1e-9  # what is equal has no place on a log scale
    raised = {name: [(step, max(floor, value)) for step, value in curve] for name, curve in curves.items()}
    rows = [row for name, curve in raised.items() for row in _rows(name, curve)]
    if not rows:
        return None
    axis = powers([*(one["v"] for one in rows), *(max(floor, value) for _, value in limits)])
    x, y = whole("s", "step"), quantity("v", f"{what}, relative", scale={"type": "log"}, axis=axis)
    line = layer("line", rows, x=x, y=y, color=names("c", None), tooltip=hints(("c", "training"), ("s", "step"), ("v", what)))
    limit = layer(
        "line", _rows("limit", [(step, max(floor, v)) for step, v in limits]), {"color": BAD, "strokeDash": [5, 4]}, x=x, y=y
    )
    spec = layered([], line, limit, height=220)
    says = f"How far {what} is from {whose}; the dashed line is how far it may be. What is equal is drawn at {floor:g}."
    largest = tuple(
        (name, number(max((v for _, v in curve if math.isfinite(v)), default=None), 3)) for name, curve in curves.items()
    )
    return Chart(title, says, spec, Grid(("training", "largest"), largest, {"training"}), half=True)


def _rows(name: str, curve: Curve) -> list[dict[str, Any]]:
    known = [(step, value) for step, value in curve if math.isfinite(value)]
    return [{"c": name, "s": step, "v": float(f"{value:.6g}")} for step, value in thinned(known, _MOST)]


def _ends(curves: Mapping[str, Curve], what: str) -> Grid:
    rows = []
    for name, curve in curves.items():
        known = [value for _, value in curve if math.isfinite(value)]
        mean = sum(known) / len(known) if known else None
        rows.append(
            (name, str(len(curve)), number(known[0] if known else None), number(mean), number(known[-1] if known else None))
        )
    return Grid(("training", "steps", f"first {what}", "mean", "last"), tuple(rows), {"training"})


def _thin_note(curves: Mapping[str, Curve]) -> str:
    most = max((len(curve) for curve in curves.values()), default=0)
    return f"{_MOST} of up to {most:,} steps of each are drawn, spread evenly." if most > _MOST else ""
