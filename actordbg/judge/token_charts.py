"""The tokens of one dump as a picture, and one side's log-probs against the other's. Pure: lists of numbers in, Charts out.

A dump is rows x positions. Each field of the picture is prompt, padding, or response; a response's colour is how far A is from B
there. A long row has several positions in a field: the worst of them counts, and hovering says where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from actordbg.base.units import plural
from actordbg.document.blocks import Chart, Grid, number
from actordbg.document.specifications import (
    ACCENT,
    BAD,
    PART,
    QUIET,
    Spec,
    coloured,
    hints,
    histogram,
    layer,
    layered,
    names,
    quantity,
    small,
    thinned,
)

FIELDS, ROWS, POINTS = 110, 24, 1200
"""Fields of a row, rows, and points of a scatter that a picture has at most."""
_WORST = 12
_PASTED = 30
"""Characters of a dump's id that every command takes for it."""
PROMPT, PADDING, RESPONSE = "prompt", "padding", "response"
_KINDS = {PROMPT: ACCENT, PADDING: QUIET}
Texts = Callable[[Sequence[int]], str]
"""The text of token ids, by a tokenizer."""


Rows = list[list[float]]


@dataclass(frozen=True)
class TokenPair:
    """One dump on both sides, row by row: log-probs of A and B in nats, and which of them the mask selects, all [B, A].

    ids: the dump's tokens [B, S], and real: which are not padding; None where the dump is gone. limit: what its largest
    difference may be, nats.
    """

    dump_id: str
    a: Rows
    b: Rows
    mask: Rows
    ids: Rows | None = None
    real: Rows | None = None
    limit: float | None = None

    def compared(self) -> Iterator[tuple[int, int, float, float]]:
        """Yields row, action, and both log-probs of every token that the mask selects."""
        for row, (ours, theirs, mask) in enumerate(zip(self.a, self.b, self.mask, strict=True)):
            for action, (a, b, chosen) in enumerate(zip(ours, theirs, mask, strict=True)):
                if chosen:
                    yield row, action, a, b


@dataclass(frozen=True)
class _Place:
    kind: str
    token: int | None
    apart: float = 0.0
    a: float | None = None
    b: float | None = None


def tokens_chart(pair: TokenPair, texts: Texts | None = None) -> Chart | None:
    """Rows x positions of one dump; None where nothing was compared in it."""
    rows = [_row(pair, at) for at in range(len(pair.mask))]
    compared = [(abs(p.apart), r, c) for r, row in enumerate(rows) for c, p in enumerate(row) if p.kind == RESPONSE]
    if not compared:
        return None
    worst = max(compared)
    order = sorted(range(len(rows)), key=lambda at: -max((abs(p.apart) for p in rows[at]), default=0))[:ROWS]
    width = max(1, math.ceil(max(map(len, rows)) / FIELDS))
    fields = [field for at in sorted(order) for field in _fields(rows[at], at, width, texts)]
    spec = _drawn(fields, worst, height=max(70, min(520, 26 * len(order))))
    share = "" if width == 1 else f" A field is {width} positions, and shows the worst of them."
    left = f"{ROWS} of {plural(len(rows), 'row')}, those that are furthest apart." if len(rows) > ROWS else ""
    says = f"{pair.dump_id}: {plural(len(rows), 'row')}. The worst token is ringed: {_where(worst[1], worst[2], 1)},"
    says += f" {number(worst[0], 3)} nats.{share}"
    lines = []
    for _, r, c in sorted(compared, key=lambda token: -token[0])[:_WORST]:
        p = rows[r][c]
        token = "-" if p.token is None else str(p.token)
        line = (str(r), str(c), token, number(p.a, 6), number(p.b, 6), number(p.apart, 3))
        lines.append((*line, *([_around(rows[r], c, texts)] if texts else [])))
    columns = ("row", "position", "token", "A", "B", "A - B", *(("text",) if texts else ()))
    return Chart("A dump's tokens", says, spec, Grid(columns, tuple(lines), {"text"}), left)


def _drawn(fields: Sequence[dict[str, Any]], worst: tuple[float, int, int], height: int) -> Spec:
    apart, row, position = worst
    end, where = {"field": "z"}, ("t", "where")
    still = [one for one in fields if one["k"] != RESPONSE]
    kinds = coloured("k", None, _KINDS)
    ground = layer("rect", still, {"opacity": 0.35}, x2=end, color=kinds, tooltip=hints(where, ("k", "is"), ("w", "text")))
    compared = [one for one in fields if one["k"] == RESPONSE]
    shown = hints(where, ("s", "|A - B|, nats"), ("w", "text"))
    heat = layer("rect", compared, x2=end, color=quantity("v", "|A - B|, nats", legend=small(apart)), tooltip=shown)
    mark = {"a": position + 0.5, "r": f"row {row}", "t": _where(row, position, 1), "s": number(apart, 3)}
    look = {"size": 150, "filled": False, "strokeWidth": 2.5, "color": "#1e90ff"}
    ring = layer("point", [mark], look, tooltip=hints(("t", "the worst"), ("s", "|A - B|, nats")))
    return layered([], ground, heat, ring, height=height, x=quantity("a", "position"), y=names("r", None))


def _row(pair: TokenPair, at: int) -> list[_Place]:
    """A row's places by position. Log-probs [B, A] are those of the last A tokens."""
    mask, ids = pair.mask[at], pair.ids[at] if pair.ids else None
    length = len(ids) if ids else len(mask) + 1
    places = []
    for position in range(length):
        action = position - length + len(mask)
        token = int(ids[position]) if ids else None
        if action >= 0 and mask[action]:
            a, b = pair.a[at][action], pair.b[at][action]
            places.append(_Place(RESPONSE, token, _apart(a, b), a, b))
        else:
            real = pair.real is None or pair.real[at][position]
            places.append(_Place(PROMPT if real else PADDING, token))
    return places


def _apart(a: float, b: float) -> float:
    """A - B; a value that is not finite on one side only is as far as a picture can show."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return a - b if math.isfinite(a) and math.isfinite(b) else 1e3


def _fields(row: Sequence[_Place], at: int, width: int, texts: Texts | None) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = []
    for start in range(0, len(row), width):
        places = row[start : start + width]
        end, compared = start + len(places), [abs(p.apart) for p in places if p.kind == RESPONSE]
        kind = RESPONSE if compared else max((PROMPT, PADDING), key=[p.kind for p in places].count)
        if not texts and fields and fields[-1]["k"] == kind != RESPONSE:  # one mark for a run of prompt or padding
            start = fields.pop()["a"]
        field = {"a": start, "z": end, "r": f"row {at}", "k": kind, "t": _where(at, start, end - start)}
        if compared:
            value = float(f"{max(compared):.4g}")
            field |= {"v": value, "s": number(value, 3)}
        fields.append(field | ({"w": texts([p.token or 0 for p in places])[:90]} if texts else {}))
    return fields


def _where(row: int, position: int, count: int) -> str:
    return f"row {row}, position {position}" + (f" to {position + count - 1}" if count > 1 else "")


def _around(row: Sequence[_Place], at: int, texts: Texts) -> str:
    """The token in its text: "the cat [sat] on the"."""

    def said(places: Sequence[_Place]) -> str:
        return texts([p.token or 0 for p in places if p.kind != PADDING])

    return f"{said(row[max(0, at - 8) : at])}[{said(row[at : at + 1])}]{said(row[at + 1 : at + 7])}"


def scatter_chart(pairs: Sequence[TokenPair], limit: float | None, floor: float | None = None) -> Chart | None:
    """How far A is from B at each token, by how likely B finds it; the limit and the noise floor as bands."""
    points: list[dict[str, Any]] = [
        {"b": float(f"{b:.5g}"), "d": float(f"{_apart(a, b):.4g}"), "i": pair.dump_id[:_PASTED], "t": f"row {row}, action {at}"}
        for pair in pairs
        for row, at, a, b in pair.compared()
        if math.isfinite(b)
    ]
    if not points:
        return None
    points.sort(key=lambda point: -abs(point["d"]))
    most = abs(points[0]["d"])
    kept = points[:200] + thinned(points[200:], POINTS - 200)
    shown = hints(("i", "dump"), ("t", "token"), ("b", "B, nats"), ("d", "A - B, nats"))
    dots = layer(
        "point", kept, {"size": 16, "opacity": 0.55, "filled": True, "color": ACCENT}, tooltip=shown,
        x=quantity("b", "log-prob of B, nats", zero=False), y=quantity("d", "A - B, nats", axis=small(most)),
    )  # fmt: skip
    lines, said = [], ""
    for name, value, colour in (("limit", limit, BAD), ("noise floor", floor, PART)):
        if value:
            inside = value <= 6 * most
            said += f" The {name} is {number(value, 3)} nats{'' if inside else ', outside of this picture'}."
            look = {"color": colour, "strokeDash": [5, 4]}
            ends = [{"d": value}, {"d": -value}]
            lines += [layer("rule", ends, look, y={"field": "d", "type": "quantitative"})] * inside
    says = f"{plural(len(points), 'token')} of {plural(len(pairs), 'dump')}; the largest difference is {number(most, 3)} nats."
    note = f"{len(kept):,} of {len(points):,} tokens are drawn: the 200 furthest apart, and the others spread evenly."
    apart = [abs(point["d"]) for point in reversed(points)]
    shares = [(share, apart[math.ceil(share * len(apart)) - 1]) for share in (0.5, 0.9, 0.99, 0.999, 1.0)]
    table = Grid(("tokens", "|A - B| at most, nats"), tuple((f"{share:.1%}", number(value, 3)) for share, value in shares))
    spec = layered([], dots, *lines, height=260)
    return Chart("A against B, token by token", says + said, spec, table, note * (len(kept) < len(points)), half=True)


def histogram_chart(pairs: Sequence[TokenPair]) -> Chart | None:
    """How many tokens are how far apart, with their sign: rounding is even on both sides of zero."""
    values = [_apart(a, b) for pair in pairs for _, _, a, b in pair.compared()]
    bins = histogram(values, 41)
    if len(bins) < 2:
        return None
    rows = [{"a": float(f"{one['from']:.4g}"), "z": float(f"{one['to']:.4g}"), "c": one["count"]} for one in bins]
    bars = layer(
        "bar", look={"color": ACCENT, "binSpacing": 0}, tooltip=hints(("a", "from, nats"), ("z", "to, nats"), ("c", "tokens"))
    )
    x = quantity("a", "A - B, nats", zero=False, axis=small(max(map(abs, values))))
    counts = quantity("c", "tokens", scale={"type": "symlog"}, axis={"format": "~s", "tickCount": 5})
    spec = layered(rows, bars, x=x, x2={"field": "z"}, y=counts, y2={"datum": 0}, height=260)
    middle = sum(values) / len(values)
    says = (
        f"Mean {middle:+.2g} nats over {plural(len(values), 'token')}; {sum(v > 0 for v in values) / len(values):.0%} above zero."
    )
    table = Grid(
        ("from, nats", "to, nats", "tokens"),
        tuple((number(o["a"], 3), number(o["z"], 3), f"{o['c']:,.0f}") for o in rows if o["c"]),
    )
    return Chart("Differences, counted", says, spec, table, half=True)
