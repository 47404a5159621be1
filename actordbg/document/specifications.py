"""Build small Vega-Lite specifications of charts, with their values inside.

A page draws them with vega: layers of point, line, bar, rect, rule and text; channels x, y, x2, y2, color, tooltip; scales that
are linear, log or symlog, or bands of names in the order of the values. Specifications compute nothing: bins, medians and ratios
are already values.
"""

import math
from collections.abc import Sequence
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
MOST_MARKS = 1500
"""Maximum number of marks in a layer; more are merged or omitted, and the chart's note says so."""
GOOD, PART, BAD, QUIET, ACCENT = "#2a9d6f", "#d99a1c", "#d1495b", "#8d99a6", "#3a7ca5"
"""Colors that are readable on light and dark backgrounds."""
Spec = dict[str, Any]


def layered(values: Sequence[dict[str, Any]], *layers: Spec, height: int = 240, **channels: Any) -> Spec:
    """Combine layers that share the channels; `values` is the data of layers that have none."""
    spec = {"$schema": SCHEMA, "width": "container", "height": height, "data": {"values": list(values)}}
    spec |= {"encoding": channels} if channels else {}
    return spec | {"layer": list(layers), "resolve": {"scale": {"color": "independent"}}}


def layer(mark: str, values: Sequence[dict[str, Any]] | None = None, look: Spec | None = None, **channels: Any) -> Spec:
    """Build a layer. look: properties of Vega-Lite's mark, like {"size": 30, "opacity": 0.6}."""
    made: Spec = {"mark": {"type": mark} | (look or {}), "encoding": channels}
    return made if values is None else {"data": {"values": list(values)}} | made


def quantity(name: str, title: str, *, zero: bool = True, **more: Any) -> Spec:
    """Build a channel of figures. `scale={"type": "log"}` or "symlog" replaces the linear scale."""
    scale = {"zero": zero} | more.pop("scale", {})
    if scale.get("type") == "log":
        scale.pop("zero")
    return {"field": name, "type": "quantitative", "title": title, "scale": scale} | more


def small(most: float) -> Spec:
    """Return the format of an axis or a legend whose figures are at most `most`: with an exponent for small figures."""
    return {"format": "~e"} if 0 < most < 1e-3 else {"format": "~r"}


def names(name: str, title: str | None, **more: Any) -> Spec:
    """Build a channel of names, in the order of the values."""
    return {"field": name, "type": "nominal", "title": title, "sort": None} | more


def coloured(name: str, colours: dict[str, str]) -> Spec:
    """Build a color channel that maps names to colors."""
    return names(name, None) | {"scale": {"domain": list(colours), "range": list(colours.values())}}


def whole(name: str, title: str) -> Spec:
    """Build a channel of whole numbers, such as steps, without ticks between them."""
    return quantity(name, title, zero=False, axis={"format": "d", "tickMinStep": 1})


def powers(values: Sequence[float]) -> Spec:
    """Build an axis with ticks at powers of ten only: a log scale would add ticks between them."""
    known = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    first, last = (math.floor(min(known)), math.ceil(max(known))) if known else (0, 1)
    return {"format": "~e", "values": [10.0**power for power in range(first, last + 1)]}


def rows_high(rows: int) -> int:
    """Return the height of a chart with so many rows, in pixels."""
    return max(60, min(640, 26 * rows))


def hints(*fields: tuple[str, str]) -> list[Spec]:
    """Build the tooltip of a mark from (field, heading) pairs."""
    return [{"field": name, "title": title, "type": "nominal"} for name, title in fields]


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]
