"""The curves of a page: what was measured as points, the curve through them, and beyond them dashes and the budget. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actordbg.base.units import plural
from actordbg.document.blocks import BAD_TONE, GOOD_TONE, NO_TONE, PART_TONE, Banner, Chart, Grid
from actordbg.document.specifications import BAD, MOST_MARKS, hints, layer, layered, names, quantity, thinned
from actordbg.measure.curve_document import shown_value, title
from actordbg.measure.curves import FURTHEST, MEMORY, CurveAnswer, CurvesAnswer
from actordbg.measure.measurements import BY

_STEPS = 60


def curve_banner(answer: CurvesAnswer) -> Banner:
    """What was asked, answered in a sentence: does it fit, or how long may it be."""
    measured = [one for one in answer.curves if one.values]
    if not measured:
        return Banner("NOTHING", "was measured.", NO_TONE)
    asked = [(one, at) for one in answer.curves for at in one.at if at.fits is not None]
    if bad := [f"{at.n:,} under {one.label}" for one, at in asked if at.fits != "yes"]:
        said = f"{plural(len(asked), 'length')} asked for; not sure: {', '.join(bad[:4])}."
        return Banner("NOT SURE TO FIT", said, BAD_TONE)
    if asked:
        return Banner("FITS", f"{plural(len(asked), 'length')} asked for; all fit.", GOOD_TONE)
    figures = []
    for one, found in ((one, one.longest) for one in answer.curves[:4] if one.longest is not None):
        how = found.how if found.by_curve else "as far as it ran"
        figures.append((f"longest that fits, {one.label} ({how})", f"{found.by_curve or found.measured or 0:,}"))
    said = f"{plural(len(measured), 'configuration')}, {plural(answer.replays, 'replay')}."
    return Banner("MEASURED", said, PART_TONE, tuple(figures))


def curve_chart(answer: CurvesAnswer) -> Chart | None:
    """Draw every configuration that has points: measured, extrapolated, and the budget as a line."""
    drawn = [one for one in answer.curves if one.values]
    if not drawn:
        return None
    memory = answer.quantity == MEMORY
    scale, unit = (2.0**30, "GiB") if memory else (1.0, "s")
    end = drawn_until(answer)
    every: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    for one in drawn:
        inputs = {point.n: point.inputs for point in one.measurements.points}
        every += [
            _mark(one, n, value, scale) | {"s": shown_value(value, answer.quantity), "i": inputs[n]} for n, value in one.values
        ]
        lines += _line(one, end, scale)
    points = thinned(every, MOST_MARKS)
    shared = {
        "x": quantity("n", BY[answer.by].partition(",")[0]),
        "y": quantity("v", f"peak memory, {unit}" if memory else f"{answer.passes}, {unit}"),
    }
    coloured = shared | {"color": names("c", None)}
    shown = hints(("c", "configuration"), ("n", "length"), ("s", "measured"), ("i", "inputs"))
    layers = [
        layer("line", [row for row in lines if row["p"] == "inside"], {"strokeWidth": 1.8}, **coloured),
        layer("line", [row for row in lines if row["p"] != "inside"], {"strokeDash": [5, 4]}, **coloured),
        layer("point", points, {"size": 45, "filled": True}, **coloured, tooltip=shown),
    ]
    if answer.budget is not None:
        budget = {"v": answer.budget / scale, "n": 0, "t": f"budget {shown_value(answer.budget, answer.quantity)}"}
        layers.append(layer("rule", [budget], {"color": BAD, "strokeDash": [2, 3]}, y=shared["y"]))
        layers.append(layer("text", [budget], {"align": "left", "dx": 6, "dy": -6}, **shared, text={"field": "t"}))
    failed = [{"n": n, "c": title(one), "t": "out of memory"} for one in drawn for n in one.measurements.out_of_memory[:1]]
    if failed:
        told = hints(("c", "out of memory"), ("n", "length"))
        layers.append(layer("rule", failed, {"color": BAD, "strokeDash": [6, 3]}, x=shared["x"], tooltip=told))
    spec = layered([], *layers, height=300) | {"resolve": {"scale": {"color": "shared"}}}
    says = "Points are measured, lines are fitted, dashes are extrapolated beyond what ran."
    rows = tuple((point["c"], f"{point['n']:,}", point["s"]) for point in points[:200])
    table = Grid(("configuration", "length", "measured"), rows, frozenset({"configuration"}))
    return Chart("Memory by length" if memory else "Time by length", says, spec, table)


def drawn_until(answer: CurvesAnswer) -> float:
    """Returns the length up to which to draw: past all that was measured or asked for, and to where the budget is reached."""
    most = max((n for one in answer.curves for n, _ in one.values), default=1)
    wanted = [at.n for one in answer.curves for at in one.at]
    wanted += [one.longest.by_curve for one in answer.curves if one.longest and one.longest.by_curve]
    failed = [n for one in answer.curves for n in one.measurements.out_of_memory[:1]]
    return float(max(most, *failed, min(FURTHEST * most, max(wanted, default=0)), 1))


def _mark(one: CurveAnswer, n: float, value: float, scale: float) -> dict[str, Any]:
    return {"c": title(one), "n": n, "v": float(f"{value / scale:.5g}")}


def _line(one: CurveAnswer, end: float, scale: float) -> Iterator[dict[str, Any]]:
    """Yield points of the curve between the measured lengths, and beyond them up to where memory ran out."""
    if one.curve is None:
        return
    least, most = one.values[0][0], one.values[-1][0]
    furthest = max(most, min([end, *one.measurements.out_of_memory[:1]]))
    for part, first, last in (("inside", least, most), ("beyond", most, furthest)):
        for step in range(_STEPS + 1):
            n = first + (last - first) * step / _STEPS
            yield _mark(one, round(n, 1), one.curve.at(n), scale) | {"p": part}
