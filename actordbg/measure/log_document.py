"""Turn a step-by-step comparison of trainings into a document and charts, for `compare-logs` and `train-check`. Pure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from actordbg.base.units import plural
from actordbg.document.blocks import (
    UNCHECKED,
    WRONG,
    Block,
    Chart,
    Grid,
    Heading,
    Items,
    Paragraph,
    Verdict,
    number,
    section,
)
from actordbg.document.specifications import BAD, hints, layer, layered, names, powers, quantity, thinned, whole
from actordbg.measure.align_logs import (
    DIFFERENT,
    EVERY_STEP,
    FLAT,
    METHOD,
    NOTHING,
    LogComparison,
    LogSide,
    chosen_series,
    letters_of,
    pair,
    relative,
    together,
)
from actordbg.measure.log_lines import TrainLog, is_loss
from actordbg.records.finding import Finding, NotChecked, Rule

AGREE = Rule("logs agree", "two trainings log the same losses, step by step")
_MOST_NAMES = 30
"""Most metrics that are listed of a log that could not be compared."""


def logs_page(answers: Sequence[LogComparison], charts: Sequence[Chart] = ()) -> list[Block]:
    """Build the document of `compare-logs`: a line per log and per pair, then the reasons; the worst steps of a single pair.

    Logs that agree are NOT CHECKED: trainings that share a bug agree as well.
    """
    overall = together(answers)
    sides: dict[str, LogSide] = {}
    for side in (side for answer in answers for side in (answer.a, answer.b)):
        if side.path not in sides or not sides[side.path].steps:  # a pair with nothing in common has no figures of its logs
            sides[side.path] = side
    letters = letters_of(sides)
    pairs, reasons = [], []
    for answer in answers:
        name, gaps = _pair_name(letters, answer), (answer.first, answer.mean, answer.last, answer.max_relative)
        pairs.append((name, f"{answer.common:,}", *(number(value, 3) for value in gaps), answer.verdict))
        reasons += [f"{name}: {reason}" for reason in answer.reasons]
    largest = max((answer.max_relative for answer in answers if answer.max_relative is not None), default=None)
    figures = (
        ("largest difference", "-" if largest is None else f"{largest:.2%}"),
        ("common steps", f"{min(answer.common for answer in answers):,}"),
    )
    word = WRONG if overall.verdict == DIFFERENT else UNCHECKED
    what = "no common step differs by {:g} or more" if overall.rule == EVERY_STEP else _FIRST_MEAN_LAST
    all_reasons = "; ".join(dict.fromkeys(reason for answer in answers for reason in answer.reasons))
    agrees = f"{overall.metric} agrees: {what.format(overall.threshold)}"
    notes = [f"note: {note}" for answer in answers for note in answer.notes]
    left = [NotChecked(AGREE, "these trainings against the truth")] if overall.good else []
    different = [answer for answer in answers if answer.verdict == DIFFERENT]
    found = [Finding(AGREE, "; ".join(each.reasons), size=each.max_relative, limit=each.threshold) for each in different]
    metric = overall.metric or "nothing"
    return [
        Heading(f"{metric} by step, threshold {overall.threshold:g}, rule {overall.rule}", 1),
        Verdict(word, all_reasons or agrees, figures, left, findings=found),
        Items([f"{letters[path]}  {path}{_found_metrics(side)}" for path, side in sides.items()]),
        *charts,
        Grid(
            ("log", "steps", "first", "mean", "last", "least", "most", "trend"),
            [(letters[path], *_log_figures(side)) for path, side in sides.items()],
            {"log", "trend"},
        ),
        Grid(("pair", "common", "first", "mean", "last", "largest", "verdict"), pairs, {"pair", "verdict"}),
        *(_worst_steps(answers[0]) if len(answers) == 1 and answers[0].common else []),
        *section("", notes),
        *([Paragraph(_METRIC_HINT)] if overall.verdict == NOTHING else []),
        *section("", reasons),
    ]


_FIRST_MEAN_LAST = "first value, mean and last value differ by less than {:g}"
_METRIC_HINT = (
    "use --metric NAME to compare another metric than a loss; metrics are read from progress bars, from lines that name a step, "
    "from lines like `gpt_loss: 5.78`, and from exports (CSV, JSON, TensorBoard, trackio)"
)


def _pair_name(letters: Mapping[str, str], answer: LogComparison) -> str:
    return f"{letters[answer.a.path]} {letters[answer.b.path]}"


def _found_metrics(side: LogSide) -> str:
    """List the metrics of a log that could not be compared; "" if it could."""
    if side.steps:
        return ""
    metrics = sorted(side.found.items(), key=lambda item: (not is_loss(item[0]), -item[1], item[0]))
    shown = ", ".join(f"{name} ({count:,})" for name, count in metrics[:_MOST_NAMES]) or "no metrics"
    return f": {shown}" + (f", and {len(metrics) - _MOST_NAMES:,} more" if len(metrics) > _MOST_NAMES else "")


def _log_figures(side: LogSide) -> list[str]:
    """Return a log's table row: its steps, and figures over its finite values."""
    if not side.steps:
        return ["-"] * 7
    trend = "flat" if side.trend.word == FLAT else side.trend.word
    if side.trend.first is not None:
        trend += f", {number(side.trend.first, 3)} to {number(side.trend.last, 3)}"
    figures = map(number, (side.first, side.mean, side.last, side.smallest, side.largest))
    return [f"{side.first_step:,}-{side.last_step:,} ({side.steps:,})", *figures, trend]


def _worst_steps(answer: LogComparison) -> list[Block]:
    """Report how many steps differ by the threshold or more, and the worst of them."""
    spread = f"median {number(answer.median_relative, 3)}, largest {number(answer.max_relative, 3)}"
    reach = f"{answer.exceeding:,} of {answer.common:,} common steps differ by {answer.threshold:g} or more"
    blocks: list[Block] = [Paragraph(f"{reach} ({spread}). Trend: {METHOD}.")]
    if answer.worst:
        rows = []
        for step in answer.worst:
            values = ("not finite" if value is None else number(value) for value in (step.a, step.b))
            rows.append((f"{step.step:,}", *values, step.note if step.relative is None else number(step.relative, 3)))
        blocks.append(Grid(("step", "A", "B", "difference"), rows))
        if more := answer.exceeding - len(rows):
            blocks.append(Paragraph(f"and {more:,} more (--limit 0 lists all)"))
    return blocks


def log_charts(answers: Sequence[LogComparison], read: Sequence[TrainLog]) -> list[Chart]:
    """Chart compared logs: their values, and their relative differences by step."""
    logs = {log.path: log for log in read}
    letters = letters_of(logs)
    values: dict[str, Curve] = {}
    gaps: dict[str, Curve] = {}
    for answer in answers:
        if answer.metric is None or not answer.common:
            continue
        paths = answer.a.path, answer.b.path
        both = chosen_series(logs[paths[0]], logs[paths[1]], answer.metric)
        for path, series in zip(paths, both, strict=True):
            values[f"{letters[path]}: {Path(path).name}"] = list(series.points.items())
        gaps[_pair_name(letters, answer)] = [(step, relative(a, b)) for step, a, b in pair(*both)]
    if not gaps:
        return []
    steps = {step for curve in gaps.values() for step, _ in curve}
    limits, what = [(step, answers[0].threshold) for step in (min(steps), max(steps))], answers[0].metric or ""
    charts = values_chart("The trainings", what, values), apart_chart("Relative difference", what, gaps, limits, "the other's")
    return [chart for chart in charts if chart]


Curve = Sequence[tuple[int, float]]
"""(step, value)."""
_MOST_POINTS = 400
"""Most points of a curve in a chart."""


def values_chart(title: str, what: str, curves: Mapping[str, Curve]) -> Chart | None:
    """Chart a value by step, a line per training; values that are not finite are skipped and counted. None without values.

    what: the value.
    """
    finite = {name: _finite(curve) for name, curve in curves.items()}
    if not any(finite.values()):
        return None
    rows, ends = [row for name, curve in finite.items() for row in _chart_rows(name, curve)], []
    for name, curve in finite.items():
        known = [point[1] for point in curve]
        figures = map(number, (known[0], fmean(known), max(known), known[-1]) if known else (None,) * 4)
        ends.append((name, str(len(curves[name])), *figures))
    shown = hints(("c", "training"), ("s", "step"), ("v", what))
    line = layer("line", look={"strokeWidth": 1.6}, tooltip=shown)
    spec = layered(rows, line, height=260, x=whole("s", "step"), y=quantity("v", what, zero=False), color=names("c", None))
    nonfinite = sum(len(curves[name]) - len(curve) for name, curve in finite.items())
    says = f"The {what} of {plural(len(curves), 'training')} by step."
    says += f" {plural(nonfinite, 'value')} NaN or infinite, not shown." if nonfinite else ""
    most = max(map(len, curves.values()))
    note = f"{_MOST_POINTS} of up to {most:,} values of each are shown, evenly sampled." if most > _MOST_POINTS else ""
    return Chart(
        title, says, spec, Grid(("training", "values", f"first {what}", "mean", "most", "last"), ends, {"training"}), note
    )


def apart_chart(title: str, what: str, curves: Mapping[str, Curve], limits: Curve, whose: str = "the baseline's") -> Chart | None:
    """Chart relative differences by step on a log scale, with their limits as a dashed line.

    whose: whose values the curves differ from.
    """
    floor = 1e-9  # a log scale has no zero
    drawn = {name: [(step, max(floor, value)) for step, value in curve] for name, curve in curves.items()}
    rows = [row for name, curve in drawn.items() for row in _chart_rows(name, curve)]
    if not rows:
        return None
    limit = _chart_rows("limit", [(step, max(floor, value)) for step, value in limits])
    axis = powers([row["v"] for row in (*rows, *limit)])
    x, y = whole("s", "step"), quantity("v", f"{what}, relative", scale={"type": "log"}, axis=axis)
    shown = hints(("c", "training"), ("s", "step"), ("v", what))
    line = layer("line", rows, x=x, y=y, color=names("c", None), tooltip=shown)
    spec = layered([], line, layer("line", limit, {"color": BAD, "strokeDash": [5, 4]}, x=x, y=y), height=220)
    says = f"Difference of {what} from {whose}; the dashed line is the limit. Equal values are shown at {floor:g}."
    largest = [(name, number(max((v for _, v in _finite(curve)), default=None), 3)) for name, curve in curves.items()]
    return Chart(title, says, spec, Grid(("training", "largest"), largest, {"training"}), half=True)


def _finite(curve: Curve) -> Curve:
    return [point for point in curve if math.isfinite(point[1])]


def _chart_rows(name: str, curve: Curve) -> list[dict[str, Any]]:
    """Return a curve as chart data: c, its name; s, the step; v, the value."""
    return [{"c": name, "s": step, "v": float(f"{value:.6g}")} for step, value in thinned(curve, _MOST_POINTS)]
