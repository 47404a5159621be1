"""A chart as SVG without JavaScript, drawn from the same Vega-Lite specification that vega draws in a page.

It knows what `specifications` can say and no more. Colours of meaning come from the specification; all others are
classes (`h0` to `h8` for heat, `c0` to `c9` for names), which the page's style gives for a light and for a dark ground.
Foreign text goes through `in_html`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actordbg.base.foreign_text import in_html

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 118, 14, 26, 44
LEGEND_LINE = 16
HEAT, COLOURS = 9, 10
Drawn = dict[str, Any]
Painter = Callable[[Drawn, bool], str]


@dataclass(frozen=True)
class _Layer:
    mark: Drawn
    values: list[Drawn]
    channels: Drawn

    def get(self, channel: str, value: Drawn) -> Any:
        """The figure or name that a value has in a channel; None where it has none."""
        said = self.channels.get(channel, {})
        return said["datum"] if "datum" in said else value.get(said.get("field"))

    def all(self, channel: str) -> list[Any]:
        """What its values have in a channel."""
        return [found for value in self.values if (found := self.get(channel, value)) is not None]


def as_svg(specification: Drawn, says: str) -> str:
    """The picture; `says` describes it to whoever does not see it."""
    shared, values = specification.get("encoding", {}), specification.get("data", {}).get("values", [])
    layers = [
        _Layer(each["mark"], each.get("data", {}).get("values", values) or [{}], shared | each.get("encoding", {}))
        for each in specification.get("layer", [])
    ]
    height = int(specification.get("height", 240))
    x = _scale("x", layers, LEFT, WIDTH - RIGHT)
    y = _scale("y", layers, TOP + height, TOP)
    legend = _legend(layers)
    parts = [
        *_axis_x(x, layers, height),
        *_axis_y(y, layers, height),
        *(mark for each in layers for mark in _marks(each, x, y)),
        *legend,
    ]
    above = LEGEND_LINE * max(0, len(legend) - 1)
    box = f"0 {-above} {WIDTH} {TOP + height + BOTTOM + above}"
    return f'<svg viewBox="{box}" role="img" aria-label="{in_html(says)}">{"".join(parts)}</svg>'


def _said(layers: Sequence[_Layer], channel: str, name: str) -> Any:
    """What the first layer that says it says of a channel; {} where none does."""
    return next((each.channels[channel][name] for each in layers if each.channels.get(channel, {}).get(name)), {})


def _scale(channel: str, layers: Sequence[_Layer], start: float, end: float) -> Scale:
    found = [value for each in layers for name in (channel, f"{channel}2") for value in each.all(name)]
    if _said(layers, channel, "type") in ("nominal", "ordinal"):
        return Bands(map(str, found), *((end, start) if channel == "y" else (start, end)))
    scale = _said(layers, channel, "scale")
    domain, kind = scale.get("domain"), scale.get("type", "linear")
    low, high = domain or _extent(found)
    if scale.get("zero", True) and not domain and kind != "log":
        low, high = min(low, 0.0), max(high, 0.0)
    return Numbers(low, high, start, end, kind)


def _extent(found: Sequence[Any]) -> tuple[float, float]:
    known = [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]
    return (min(known), max(known)) if known else (0.0, 1.0)


def _axis_x(x: Scale, layers: Sequence[_Layer], height: int) -> Iterable[str]:
    bottom = TOP + height
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    steps = "tickMinStep" in _said(layers, "x", "axis")
    for at, text in x.ticks(8):
        if not steps or "." not in text:
            yield f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{in_html(short(text, 16))}</text>'
    title = in_html(_said(layers, "x", "title") or "")
    yield f'<text class="title" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 34}" text-anchor="middle">{title}</text>'


def _axis_y(y: Scale, layers: Sequence[_Layer], height: int) -> Iterable[str]:
    for at, text in y.ticks(5):
        if isinstance(y, Numbers):
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{in_html(short(text, 17))}</text>'
    title, middle = in_html(_said(layers, "y", "title") or ""), TOP + height / 2
    yield f'<text class="title" transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{title}</text>'


def _marks(one: _Layer, x: Scale, y: Scale) -> Iterable[str]:
    painted, mark = _painter(one), one.mark["type"]
    places = [(value, _place(one, value, x, "x"), _place(one, value, y, "y")) for value in one.values]
    if mark == "line":
        groups: dict[Any, list[Any]] = {}
        for at in places:
            groups.setdefault(one.get("color", at[0]), []).append(at)
        for members in groups.values():
            points = " ".join(f"{left[0]:.1f},{top[0]:.1f}" for _, left, top in members if left is not None and top is not None)
            if points:  # a layer without values has no name either that a colour could be for
                yield f'<polyline points="{points}" {painted(members[0][0], True)}/>'
        return
    shapes = [(_shape(one, *at), at[0]) for at in places]
    if "field" not in one.channels.get("color", {}):  # the same look for all is said once
        yield f"<g {painted({}, mark == 'rule')}>{''.join(shape for shape, _ in shapes)}</g>"
    else:
        yield from (shape.replace("/>", f" {painted(value, mark == 'rule')}/>", 1) for shape, value in shapes if shape)


def _place(one: _Layer, value: Drawn, scale: Scale, channel: str) -> tuple[float, float] | None:
    """Where a mark begins and ends along a channel; None where it has no place."""
    found = (one.get(name, value) for name in (channel, f"{channel}2"))
    first, last = (None if each is None else scale.place(each) for each in found)
    if first is not None and last is not None:
        return first[0], last[0]
    grows = one.mark["type"] == "bar" and isinstance(scale, Numbers)
    return (scale.place(0)[0], first[0]) if first and grows else first


def _shape(one: _Layer, value: Drawn, x: tuple[float, float] | None, y: tuple[float, float] | None) -> str:
    """The element of a mark that is no line; "" where it has no place."""
    mark = one.mark["type"]
    if mark == "rule":
        x = x or (LEFT, WIDTH - RIGHT)
    if x is None or y is None:
        return ""
    if mark == "rule":
        ends = (x[0], x[1], sum(y) / 2, sum(y) / 2) if x[0] != x[1] and "x2" not in one.channels else (*x, *y)
        return '<line x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>'.format(*ends)
    if mark == "point":
        radius = math.sqrt(one.mark.get("size", 30) / math.pi)
        return f'<circle cx="{sum(x) / 2:.1f}" cy="{sum(y) / 2:.1f}" r="{radius:.1f}"/>'
    if mark == "text":
        said = one.channels.get("text", {})
        text = short(str(said.get("value", value.get(said.get("field"), ""))), 40)
        return f'<text x="{sum(x) / 2 + 4:.1f}" y="{sum(y) / 2 - 5:.1f}">{in_html(text)}</text>'
    left, width, top, height = min(x), abs(x[1] - x[0]), min(y), abs(y[1] - y[0])
    if mark == "bar":
        width = max(width, 1.0)
        if one.channels["y"].get("type") == "nominal":
            top, height = top + 0.12 * height, 0.76 * height
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width + 0.3:.1f}" height="{height:.1f}"/>'


def _painter(one: _Layer) -> Painter:
    """What gives a mark its colour: attributes, or a class of the page's style. stroked: its line has it, nothing is filled."""
    said = one.channels.get("color", {})
    scale, found = said.get("scale", {}), [one.get("color", value) for value in one.values]
    heat = said.get("type") == "quantitative"
    names = [] if heat else list(dict.fromkeys(map(str, scale.get("domain") or found)))
    low, high = scale.get("domain") or _extent(found) if heat else (0, 1)
    share_of = Numbers(low, high, 0, HEAT - 1, scale.get("type", "linear")).place
    more = f' opacity="{one.mark["opacity"]}"' if "opacity" in one.mark else ""
    dashes = ' stroke-dasharray="5 4"' if one.mark.get("strokeDash") else ""

    def paint(value: Drawn, stroked: bool) -> str:
        hollow = stroked or one.mark.get("filled") is False
        colour = said.get("value") or one.mark.get("color")
        if colour is None and heat:
            return f'class="h{min(HEAT - 1, max(0, round(share_of(one.get("color", value) or 0)[0])))}"{more}'
        if colour is None:
            at = names.index(str(one.get("color", value))) if said.get("field") else 0
            if not scale.get("range"):
                return f'class="{"s" if hollow else "c"}{at % COLOURS}"{more}{dashes}'
            colour = scale["range"][at % len(scale["range"])]
        attributes = f'fill="none" stroke="{in_html(colour)}" stroke-width="1.6"' if hollow else f'fill="{in_html(colour)}"'
        return attributes + more + dashes

    return paint


def _legend(layers: Sequence[_Layer]) -> list[str]:
    """Names and their colours, in lines above the picture, the lowest one next to it; a heat's ends."""
    at, seen, lines = float(LEFT), set(), [""]
    for one in layers:
        said = one.channels.get("color", {})
        if "field" not in said or said["field"] in seen or said.get("legend", True) is None:
            continue
        seen.add(said["field"])
        domain, found = said.get("scale", {}).get("domain"), one.all("color")
        if said.get("type") == "quantitative":
            low, high = domain or _extent(found)
            looks = {f"{said.get('title')}: {low:.4g}": 'class="h0"', f"{high:.4g}": f'class="h{HEAT - 1}"'}
        else:
            painted = _painter(one)
            shown = (domain or list(dict.fromkeys(map(str, found))))[:16]
            looks = {name: painted({said["field"]: name}, False) for name in shown}
        for name, look in looks.items():
            wide = 28 + 6.2 * min(len(name), 40)
            if at + wide > WIDTH and at > LEFT:
                at, lines = float(LEFT), [*lines, ""]
            lines[-1] += f'<rect x="{at:.0f}" y="6" width="10" height="10" {look}/>'
            lines[-1] += f'<text x="{at + 14:.0f}" y="15">{in_html(short(name, 40))}</text>'
            at += wide
    last = len(lines) - 1
    return [f'<g transform="translate(0 {LEGEND_LINE * (index - last)})">{line}</g>' for index, line in enumerate(lines)]


# Where a value lies in a static picture: numbers along a line, names in bands; and the ticks that an axis shows.


class Numbers:
    """A linear, log or symlog scale from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float, kind: str = "linear") -> None:
        self.low, self.high, self.start, self.end, self.kind = low, high if high > low else low + 1.0, start, end, kind
        self.unit = max(abs(low), abs(high), 1e-30) * 1e-3
        if kind == "log":
            self.low = max(low, 1e-30)
            self.high = max(self.high, self.low * 1.0001)

    def place(self, value: Any) -> tuple[float, float]:
        """Where it is drawn; the same twice, since a number has no width."""
        low, high = self._bent(self.low), self._bent(self.high)
        share = (self._bent(float(value)) - low) / (high - low)
        at = self.start + (self.end - self.start) * share
        return at, at

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """(place, text) of a few round values."""
        if self.kind == "log":
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = (10.0**power for power in range(first, last + 1, max(1, (last - first) // 6)))
            values = [power for power in powers if self.low <= power <= self.high]
        else:
            values = round_values(self.low, self.high, most)
        texts = [f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}" for value in values]
        if len(set(texts)) < len(texts):  # the values differ behind the fourth figure
            texts = [f"{value:.{1 - math.floor(math.log10(values[1] - values[0]))}f}" for value in values]
        return [(self.place(value)[0], text) for value, text in zip(values, texts, strict=True)]

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, self.low))
        if self.kind == "symlog":
            return math.copysign(math.log1p(abs(value) / self.unit), value)
        return value


class Bands:
    """Names, each with a band of the same width between `start` and `end`."""

    def __init__(self, known: Iterable[str], start: float, end: float) -> None:
        self._at = {name: place for place, name in enumerate(dict.fromkeys(known))}
        self.start, self.width = start, (end - start) / max(1, len(self._at))

    def place(self, value: Any) -> tuple[float, float]:
        """The ends of its band."""
        first = self.start + self.width * self._at.get(str(value), 0)
        return first, first + self.width

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """(place, name) of every band, or of some where there are many."""
        every = max(1, math.ceil(len(self._at) / 24))
        return [(sum(self.place(name)) / 2, name) for name in list(self._at)[::every]]


Scale = Numbers | Bands


def round_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def short(text: str, width: int) -> str:
    """`text` cut in its middle."""
    if len(text) <= width:
        return text
    return f"{text[: width - width // 2 - 1]}…{text[len(text) - width // 2 :]}"
