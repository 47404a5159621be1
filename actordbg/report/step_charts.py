"""Trainings step by step as pictures, for `compare-logs` and `train-check`: their values, and how far they are apart. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from actordbg.base.units import plural
from actordbg.report.blocks import Chart, Grid, number
from actordbg.report.specifications import BAD, hints, layer, layered, names, powers, quantity, thinned, whole

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
    return Chart(title, says, spec, Grid(("training", "largest"), largest, frozenset({"training"})), half=True)


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
    return Grid(("training", "steps", f"first {what}", "mean", "last"), tuple(rows), frozenset({"training"}))


def _thin_note(curves: Mapping[str, Curve]) -> str:
    most = max((len(curve) for curve in curves.values()), default=0)
    return f"{_MOST} of up to {most:,} steps of each are drawn, spread evenly." if most > _MOST else ""
