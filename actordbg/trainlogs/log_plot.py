"""A comparison of logs as a picture: the curves above, their relative differences with the threshold below."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from actordbg.base import plotfile
from actordbg.trainlogs.align_logs import chosen_series, pair, relative
from actordbg.trainlogs.log_answer import LogComparison
from actordbg.trainlogs.log_lines import Series, TrainLog

_MOST_WILD = 500
MOST_POINTS = 5000
"""More steps than this are thinned out evenly for the picture."""


def plot(comparison: LogComparison, a: TrainLog, others: Sequence[TrainLog], path: Path, called: Mapping[str, str]) -> None:
    """Draw the metric of all logs into `path`, and how far each is from the first. called: their letters."""
    assert comparison.metric is not None
    figure = plotfile.new_figure(9, 6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    drawn = [chosen_series(a, other, comparison.metric) for other in others]
    curves = [(drawn[0][0], a, plotfile.COLOURS[5], 3.5)]  # broad and light, so that it shows where the others lie on it
    curves += [(theirs, log, _colour(index), 1.0) for index, ((_, theirs), log) in enumerate(zip(drawn, others, strict=True))]
    for series, log, colour, width in curves:
        letter, (steps, values) = called[log.path], _thin(series)
        top.plot(steps, values, color=colour, linewidth=width, label=f"{letter}: {_short(log.path)}")
        wild = [step for step, value in zip(series.steps, series.values, strict=True) if not math.isfinite(value)]
        for step in wild[:_MOST_WILD]:
            top.axvline(step, color=colour, linewidth=0.8, label=f"{letter}: NaN or infinite" if step == wild[0] else None)
    top.set_ylabel(comparison.metric)
    top.legend(frameon=False, fontsize=9)
    title = f"{comparison.metric}: {comparison.verdict} (rule {comparison.rule})" if len(others) == 1 else comparison.metric
    top.set_title(title, loc="left", fontsize=11)
    largest = [comparison.threshold, 1e-12]
    for index, (ours, theirs) in enumerate(drawn):
        both = pair(ours, theirs)
        differences = [relative(x, y) for x, y in zip(both.a, both.b, strict=True)]
        largest += [one for one in differences if one == one]
        steps, shown = _thin(Series("", both.steps, array("d", differences)))
        if len(drawn) == 1:
            bottom.fill_between(steps, shown, step="mid", color="#999999", alpha=0.35, linewidth=0)
        bottom.plot(steps, shown, color="#555555" if len(drawn) == 1 else _colour(index), linewidth=0.9)
        over = [(s, d) for s, d in zip(both.steps, differences, strict=True) if d >= comparison.threshold]
        if over:
            bottom.plot([s for s, _ in over], [d for _, d in over], ".", color=_colour(index), markersize=5)
    bottom.axhline(comparison.threshold, color=plotfile.COLOURS[1], linewidth=1, linestyle=":")
    bottom.annotate(
        f"threshold {comparison.threshold:g}", (1, comparison.threshold), xycoords=("axes fraction", "data"),
        xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=8, color=plotfile.COLOURS[1],
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )  # fmt: skip
    bottom.set_ylim(0, 1.25 * max(largest))
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        plotfile.tidy(axes)
    plotfile.save(figure, path)


def _colour(index: int) -> str:
    return plotfile.COLOURS[(1, 2, 3, 0, 4, 6)[index % 6]]


def _thin(series: Series) -> tuple[Sequence[int], Sequence[float]]:
    every = -(-len(series.steps) // MOST_POINTS)
    return list(series.steps[::every]), list(series.values[::every])


def _short(path: str) -> str:
    """The last part of a path, its folder where that is short: "run-7/sft.log"."""
    parts = Path(path).parts
    text = "/".join(parts[-2:])
    return text if len(text) <= 50 else f"...{text[-47:]}"
