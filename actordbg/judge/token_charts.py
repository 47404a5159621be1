"""Draw the tokens of one dump, and one side's log-probs against the other's. Pure: arrays in, Charts out.

A dump is rows x positions; positions count from 0 over the padded row, prompt included. Each field of the heat map is prompt,
padding, or response; a response is colored by the difference between A and B. In a long row a field covers several positions: it
shows the worst, and the tooltip says where.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actordbg.base.units import plural
from actordbg.document.blocks import Chart, Grid, number
from actordbg.document.specifications import (
    ACCENT,
    PART,
    QUIET,
    Spec,
    coloured,
    hints,
    layer,
    layered,
    names,
    quantity,
    rows_high,
    small,
)
from actordbg.formats.encoding import Array
from actordbg.records.locate_record import Located

FIELDS, ROWS = 110, 24
"""The most fields per row, and rows, that a chart has."""
_WORST = 12
PROMPT, PADDING, RESPONSE, BETWEEN = "prompt", "padding", "response", "between turns"
_KINDS = {PROMPT: ACCENT, PADDING: QUIET, BETWEEN: PART}
Texts = Callable[[Sequence[int]], str]
"""Decodes token ids with a tokenizer."""


@dataclass(frozen=True)
class TokenPair:
    """A dump on both sides, row by row: log-probs of A and B in nats, and their mask (bool), all [B, A].

    ids: the dump's tokens [B, S]. real: which tokens are not padding. Both are None if the dump is gone. limit: the largest
    allowed difference, in nats.
    """

    dump_id: str
    a: Array
    b: Array
    mask: Array
    ids: Array | None = None
    real: Array | None = None
    limit: float | None = None

    @property
    def apart(self) -> Array:
        """A - B, [B, A], float64; 1e3 for unequal values that are not both finite."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        with np.errstate(invalid="ignore"):
            far = np.where(np.isfinite(a) & np.isfinite(b), a - b, 1e3)
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, far)


def _fitting(pair: TokenPair) -> TokenPair:
    """Drop `ids` and `real` if they do not fit the log-probs: the dump may have been replaced."""
    (rows, actions), ids, real = pair.mask.shape, pair.ids, pair.real
    if ids is not None and (ids.ndim != 2 or len(ids) < rows or ids.shape[1] < actions):
        ids = None
    if real is not None and real.shape != (rows, actions + 1 if ids is None else ids.shape[1]):
        real = None
    return replace(pair, ids=ids, real=real)


def tokens_chart(pair: TokenPair, texts: Texts | None = None) -> Chart | None:
    """Draw rows x positions of one dump; None if its mask selects no token."""
    chosen = pair.mask
    if not chosen.any():
        return None
    pair, actions = _fitting(pair), chosen.shape[1]
    length = actions + 1 if pair.ids is None else pair.ids.shape[1]
    before = ((0, 0), (length - actions, 0))  # log-probs are those of the last tokens
    real = np.ones((len(chosen), length)) if pair.real is None else pair.real
    acted = np.pad(chosen, before)
    kinds = np.where(acted, RESPONSE, np.where(real, np.where(acted.cumsum(1) > 0, BETWEEN, PROMPT), PADDING))
    apart = np.pad(np.where(chosen, pair.apart, 0.0), before)
    far, answers = np.abs(apart), np.argwhere(kinds == RESPONSE)
    order = np.argsort(-far.max(axis=1), kind="stable")[:ROWS]
    distances = far[tuple(answers.T)]
    ranked = answers[np.argsort(-distances, kind="stable")]
    row, position = ranked[0].tolist()
    width = max(1, math.ceil(length / FIELDS))

    def text_of(at: int, start: int, end: int, hidden: str = "") -> str:
        """Decode a row's tokens, without those of a hidden kind."""
        ids = [0] * length if pair.ids is None else pair.ids[at]
        shown = (column for column in range(max(0, start), min(end, length)) if kinds[at][column] != hidden)
        return texts([int(ids[column]) for column in shown]) if texts else ""

    fields: list[dict[str, Any]] = []
    for at in sorted(order.tolist()):
        for start in range(0, length, width):
            end = min(start + width, length)
            within = kinds[at][start:end].tolist()
            kind = RESPONSE if RESPONSE in within else max((PROMPT, BETWEEN, PADDING), key=within.count)
            field = {"a": start, "z": end, "r": f"row {at}", "k": kind, "t": _where(at, start, end - start)}
            if kind == RESPONSE:
                value = float(f"{far[at][start:end].max():.4g}")
                field |= {"v": value, "s": number(value, 3)}
            elif not texts and start and fields[-1]["k"] == kind:  # one mark for a run of prompt or padding
                first = fields.pop()["a"]
                field |= {"a": first, "t": _where(at, first, end - first)}
            fields.append(field | ({"w": text_of(at, start, end)[:90]} if texts else {}))
    spec = _drawn(fields, (float(far[row][position]), row, position), pair.limit or 0.0, rows_high(len(order)))
    lines = []
    for r, c in ranked[:_WORST].tolist():
        action = c - length + actions
        token = "-" if pair.ids is None else str(int(pair.ids[r][c]))
        line = (str(r), str(c), token, number(pair.a[r][action], 6), number(pair.b[r][action], 6), number(apart[r][c], 3))
        context = f"{text_of(r, c - 8, c, PADDING)}[{text_of(r, c, c + 1)}]{text_of(r, c + 1, c + 7, PADDING)}"
        lines.append((*line, context) if texts else line)
    columns = ["row", "position", "token", "A", "B", "A - B"]
    columns += ["text"] if texts else []
    within = pair.limit is not None and bool(far[row][position] <= pair.limit)
    circled = "Largest difference" if within else "Worst token"
    says = f"{pair.dump_id}: {plural(len(chosen), 'row')}. {circled} circled: {_where(row, position, 1)},"
    says += f" {number(far[row][position], 3)} nats"
    says += f", within the limit of {number(pair.limit, 3)}." if within else "."
    says += "" if width == 1 else f" Each field shows the worst of {width} positions."
    left = f"{ROWS} of {plural(len(chosen), 'row')} shown: those with the largest differences." if len(chosen) > ROWS else ""
    return Chart("Token map", says, spec, Grid(columns, lines, {"text"}), left)


def _drawn(fields: Sequence[dict[str, Any]], worst: tuple[float, int, int], limit: float, height: int) -> Spec:
    """limit: what the darkest color stands for at least, so that rounding stays pale."""
    (apart, row, position), title = worst, "|A - B|, nats"
    darkest = max(apart, limit)
    colors = quantity("v", title, legend=small(darkest), scale={"domainMax": darkest})
    end, where = {"field": "z"}, ("t", "where")
    still = [field for field in fields if field["k"] != RESPONSE]
    kinds = coloured("k", {kind: color for kind, color in _KINDS.items() if any(field["k"] == kind for field in still)})
    text = [("w", "text")] if any("w" in field for field in fields) else []
    ground = layer("rect", still, {"opacity": 0.35}, x2=end, color=kinds, tooltip=hints(where, ("k", "is"), *text))
    compared = [field for field in fields if field["k"] == RESPONSE]
    shown = hints(where, ("s", title), *text)
    heat = layer("rect", compared, x2=end, color=colors, tooltip=shown)
    mark = {"a": position + 0.5, "r": f"row {row}", "t": _where(row, position, 1), "s": number(apart, 3)}
    look = {"size": 150, "filled": False, "strokeWidth": 2.5, "color": "#1e90ff"}
    ring = layer("point", [mark], look, tooltip=hints(("t", "the worst"), ("s", title)))
    return layered([], ground, heat, ring, height=height, x=quantity("a", "position in the row, tokens"), y=names("r", None))


def _where(row: int, position: int, count: int) -> str:
    return f"row {row}, position {position}" + (f" to {position + count - 1}" if count > 1 else "")


def heat_chart(located: Located) -> Chart | None:
    """Draw layers x tokens: the largest error of a token in each layer, in units of a healthy model's; None if none is wrong."""
    if not located.heat:
        return None
    fields: list[dict[str, Any]] = [
        {"a": at, "z": at + 1, "l": layer, "v": value, "c": max(value, 1.0), "w": _where(row, first, last - first + 1)}
        for layer, values in located.heat.items()
        for at, ((row, first, last), value) in enumerate(zip(located.fields, values, strict=True))
    ]
    worst = max(fields, key=lambda field: float(field["v"]))
    shown = hints(("l", "layer"), ("w", "tokens"), ("v", "times a healthy model's error"))
    colors = quantity("c", "times healthy", scale={"type": "log"})
    heat = layer("rect", fields, x2={"field": "z"}, color=colors, tooltip=shown)
    spec = layered(
        [], heat, height=rows_high(len(located.heat)), x=quantity("a", "field of tokens, row after row"), y=names("l", None)
    )
    says = f"Largest: {worst['l']}, {worst['w']}, {number(worst['v'], 3)} times the error of a healthy model."
    rows = [(name, number(max(values), 3)) for name, values in located.heat.items()]
    return Chart("Errors by layer and token", says, spec, Grid(("layer", "largest, times healthy"), rows, {"layer"}))
