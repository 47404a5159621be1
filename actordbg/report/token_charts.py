"""The tokens of one dump as a picture, and one side's log-probs against the other's. Pure: lists of numbers in, Charts out.

A dump is rows x positions. Each field of the picture is prompt, padding, or response; a response's colour is how far A is from B
there. A long row has several positions in a field: the worst of them counts, and hovering says where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actordbg.base.units import plural
from actordbg.report.blocks import Chart, Grid, number
from actordbg.report.kept_values import KeptRows, TokenRows
from actordbg.report.specifications import (
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
_PASTED = 30
"""Characters of a dump's id that every command takes for it."""
PROMPT, PADDING, RESPONSE = "prompt", "padding", "response"
_KINDS = {PROMPT: ACCENT, PADDING: QUIET}
Texts = Callable[[Sequence[int]], str]
"""The text of token ids, by a tokenizer."""


@dataclass(frozen=True)
class TokenPair:
    """One dump on both sides. `tokens`: None where the dump is gone; limit: what its largest difference may be, nats."""

    dump_id: str
    a: KeptRows
    b: KeptRows
    tokens: TokenRows | None = None
    limit: float | None = None


@dataclass(frozen=True)
class _Place:
    kind: str
    apart: float | None
    a: float | None = None
    b: float | None = None
    token: int | None = None


def tokens_chart(pair: TokenPair, texts: Texts | None = None) -> Chart | None:
    """Rows x positions of one dump; None where nothing was compared in it."""
    rows = [_row(pair, at) for at in range(len(pair.a.mask))]
    worst = max(
        ((abs(p.apart or 0), r, c) for r, row in enumerate(rows) for c, p in enumerate(row) if p.kind == RESPONSE), default=None
    )
    if worst is None:
        return None
    order = sorted(range(len(rows)), key=lambda at: -max((abs(p.apart or 0) for p in rows[at]), default=0))[:ROWS]
    width = max(1, math.ceil(max(map(len, rows)) / FIELDS))
    fields = [one for at in sorted(order) for one in _fields(rows[at], at, width, texts)]
    spec = _drawn(fields, worst, height=max(70, min(520, 26 * len(order))))
    share = "" if width == 1 else f" A field is {width} positions, and shows the worst of them."
    left = f"{ROWS} of {plural(len(rows), 'row')}, those that are furthest apart." if len(rows) > ROWS else ""
    says = f"{pair.dump_id}: {plural(len(rows), 'row')}. The worst token is ringed: {_where(worst[1], worst[2], 1)},"
    says += f" {number(worst[0], 3)} nats.{share}"
    return Chart("A dump's tokens", says, spec, _worst_tokens(rows, texts), left)


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
    a, b, mask = pair.a.log_probs[at], pair.b.log_probs[at], pair.a.mask[at]
    tokens = pair.tokens
    length = len(tokens.ids[at]) if tokens else len(mask) + 1
    before = length - len(mask)
    places = [_Place(_outside(tokens, at, position), None, token=_id(tokens, at, position)) for position in range(before)]
    for index, (ours, theirs, chosen) in enumerate(zip(a, b, mask, strict=True)):
        position = before + index
        token = _id(tokens, at, position)
        kind = RESPONSE if chosen else _outside(tokens, at, position)
        places.append(_Place(kind, _apart(ours, theirs) if chosen else None, ours, theirs, token))
    return places


def _outside(tokens: TokenRows | None, row: int, position: int) -> str:
    real = tokens is None or tokens.real is None or tokens.real[row][position]
    return PROMPT if real else PADDING


def _id(tokens: TokenRows | None, row: int, position: int) -> int | None:
    return None if tokens is None else int(tokens.ids[row][position])


def _apart(a: float, b: float) -> float:
    """A - B; a value that is not finite on one side only is as far as a picture can show."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return a - b if math.isfinite(a) and math.isfinite(b) else 1e3


def _fields(row: Sequence[_Place], at: int, width: int, texts: Texts | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for start in range(0, len(row), width):
        some = row[start : start + width]
        compared = [abs(one.apart) for one in some if one.apart is not None]
        kind = RESPONSE if compared else max((PROMPT, PADDING), key=[one.kind for one in some].count)
        value = float(f"{max(compared):.4g}") if compared else 0.0
        told: dict[str, Any] = {
            "a": start,
            "z": start + len(some),
            "r": f"row {at}",
            "k": kind,
            "t": _where(at, start, len(some)),
        }
        told |= {"v": value, "s": number(value, 3)} if compared else {}
        same = not texts and found and found[-1]["k"] == kind != RESPONSE
        if same:  # one mark for a run of prompt or padding
            first = found[-1]["a"]
            found[-1] |= {"z": told["z"], "t": _where(at, first, told["z"] - first)}
        else:
            found.append(told | ({"w": texts([one.token or 0 for one in some])[:90]} if texts else {}))
    return found


def _where(row: int, position: int, count: int) -> str:
    return f"row {row}, position {position}" + (f" to {position + count - 1}" if count > 1 else "")


def _worst_tokens(rows: Sequence[Sequence[_Place]], texts: Texts | None, most: int = 12) -> Grid:
    found = [(abs(p.apart or 0), r, c, p) for r, row in enumerate(rows) for c, p in enumerate(row) if p.kind == RESPONSE]
    found.sort(key=lambda one: -one[0])
    lines = []
    for _, r, c, p in found[:most]:
        line = [str(r), str(c), "-" if p.token is None else str(p.token), number(p.a, 6), number(p.b, 6), number(p.apart, 3)]
        lines.append((*line, *([_around(rows[r], c, texts)] if texts else [])))
    columns = ("row", "position", "token", "A", "B", "A - B", *(("text",) if texts else ()))
    return Grid(columns, tuple(lines), frozenset({"text"}))


def _around(row: Sequence[_Place], at: int, texts: Texts) -> str:
    """The token in its text: "the cat [sat] on the"."""

    def said(some: Sequence[_Place]) -> str:
        return texts([one.token or 0 for one in some if one.kind != PADDING])

    return f"{said(row[max(0, at - 8) : at])}[{said(row[at : at + 1])}]{said(row[at + 1 : at + 7])}"


def scatter_chart(pairs: Sequence[TokenPair], limit: float | None, floor: float | None = None) -> Chart | None:
    """How far A is from B at each token, by how likely B finds it; the limit and the noise floor as bands."""
    points = [
        {"b": float(f"{b:.5g}"), "d": float(f"{_apart(a, b):.4g}"), "i": pair.dump_id[:_PASTED], "t": f"row {row}, action {at}"}
        for pair in pairs
        for row, mask in enumerate(pair.a.mask)
        for at, (a, b, chosen) in enumerate(zip(pair.a.log_probs[row], pair.b.log_probs[row], mask, strict=True))
        if chosen and math.isfinite(b)
    ]
    if not points:
        return None
    points.sort(key=lambda one: -abs(float(str(one["d"]))))
    most = abs(float(str(points[0]["d"])))
    kept = points[:200] + thinned(points[200:], POINTS - 200)
    shown = hints(("i", "dump"), ("t", "token"), ("b", "B, nats"), ("d", "A - B, nats"))
    dots = layer(
        "point", kept, {"size": 16, "opacity": 0.55, "filled": True, "color": ACCENT}, tooltip=shown,
        x=quantity("b", "log-prob of B, nats", zero=False), y=quantity("d", "A - B, nats", axis=small(most)),
    )  # fmt: skip
    lines = [_both(value, colour) for value, colour in ((limit, BAD), (floor, PART)) if value and value <= 6 * most]
    spec = layered([], dots, *lines, height=260)
    said = "".join(
        f" The {name} is {number(value, 3)} nats{'' if value <= 6 * most else ', outside of this picture'}."
        for name, value in (("limit", limit), ("noise floor", floor)) if value
    )  # fmt: skip
    says = (
        f"{plural(len(points), 'token')} of {plural(len(pairs), 'dump')}; the largest difference is {number(most, 3)} nats.{said}"
    )
    note = (
        f"{len(kept):,} of {len(points):,} tokens are drawn: the 200 furthest apart, and the others spread evenly."
        if len(kept) < len(points)
        else ""
    )
    return Chart("A against B, token by token", says, spec, _quantiles(points), note, half=True)


def _both(value: float, colour: str) -> Spec:
    """A dashed line at the value, above and below zero."""
    look = {"color": colour, "strokeDash": [5, 4]}
    return layer("rule", [{"d": value}, {"d": -value}], look, y={"field": "d", "type": "quantitative"})


def _quantiles(points: Sequence[dict[str, Any]]) -> Grid:
    """How many tokens are how far apart."""
    found = sorted(abs(one["d"]) for one in points)
    shares = (0.5, 0.9, 0.99, 0.999, 1.0)
    rows = tuple(
        (f"{share:.1%}", number(found[min(len(found) - 1, max(0, math.ceil(share * len(found)) - 1))], 3)) for share in shares
    )
    return Grid(("tokens", "|A - B| at most, nats"), rows)


def histogram_chart(pairs: Sequence[TokenPair]) -> Chart | None:
    """How many tokens are how far apart, with their sign: rounding is even on both sides of zero."""
    values = [
        _apart(a, b) for pair in pairs for row, mask in enumerate(pair.a.mask)
        for a, b, chosen in zip(pair.a.log_probs[row], pair.b.log_probs[row], mask, strict=True) if chosen
    ]  # fmt: skip
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
