"""How charts are said: small Vega-Lite specifications with their values inside, of a few kinds of marks.

A page draws them with vega: layers of point, line, bar, rect, rule and text; channels x, y, x2, y2, color, tooltip; scales that
are linear, log or symlog, or bands of names in the order of the values. Nothing is computed in a specification: bins, medians
and ratios are values already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
MOST_MARKS = 1500
"""Marks of one layer; what would be more is put together or left out, and the chart's note says so."""
GOOD, PART, BAD, QUIET, ACCENT = "#2a9d6f", "#d99a1c", "#d1495b", "#8d99a6", "#3a7ca5"
"""Colors that read on a light and on a dark ground."""
Spec = dict[str, Any]


def layered(values: Sequence[dict[str, Any]], *layers: Spec, height: int = 240, **channels: Any) -> Spec:
    """A specification of layers that share the channels; `values` are those of layers without data of their own."""
    spec = {"$schema": SCHEMA, "width": "container", "height": height, "data": {"values": list(values)}}
    spec |= {"encoding": channels} if channels else {}
    return spec | {"layer": list(layers), "resolve": {"scale": {"color": "independent"}}}


def layer(mark: str, values: Sequence[dict[str, Any]] | None = None, look: Spec | None = None, **channels: Any) -> Spec:
    """One layer. look: what Vega-Lite's mark takes, as {"size": 30, "opacity": 0.6}."""
    made: Spec = {"mark": {"type": mark} | (look or {}), "encoding": channels}
    return made if values is None else {"data": {"values": list(values)}} | made


def quantity(name: str, title: str, *, zero: bool = True, **more: Any) -> Spec:
    """A channel of figures. kind: "log" or "symlog" for another scale than a linear one."""
    scale = {"zero": zero} | more.pop("scale", {})
    if scale.get("type") == "log":
        scale.pop("zero")
    return {"field": name, "type": "quantitative", "title": title, "scale": scale} | more


def small(most: float) -> Spec:
    """How an axis or a legend writes figures that are at most so large: with an exponent where zeros would be counted."""
    return {"format": "~e"} if 0 < most < 1e-3 else {"format": "~g"}


def names(name: str, title: str | None, **more: Any) -> Spec:
    """A channel of names, in the order of the values."""
    return {"field": name, "type": "nominal", "title": title, "sort": None} | more


def coloured(name: str, colours: dict[str, str]) -> Spec:
    """A color for each of a few names."""
    return names(name, None) | {"scale": {"domain": list(colours), "range": list(colours.values())}}


def whole(name: str, title: str) -> Spec:
    """A channel of whole numbers, such as steps: no ticks between them."""
    return quantity(name, title, zero=False, axis={"format": "d", "tickMinStep": 1})


def powers(values: Sequence[float]) -> Spec:
    """An axis in powers of ten, a tick for each: a log scale draws nine lines between two of them."""
    known = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    first, last = (math.floor(min(known)), math.ceil(max(known))) if known else (0, 1)
    return {"format": "~e", "values": [10.0**power for power in range(first, last + 1)]}


def hints(*fields: tuple[str, str]) -> list[Spec]:
    """What pointing at a mark shows: (field, heading) pairs."""
    return [{"field": name, "title": title, "type": "nominal"} for name, title in fields]


def thinned(values: Sequence[Any], most: int = MOST_MARKS) -> list[Any]:
    """At most so many of the values, spread evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]
