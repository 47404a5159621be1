"""What a document consists of before anyone decides how it looks: blocks, and figures written as words.

Reports, comparisons, matrices and curves are lists of blocks. Cells of a table are strings already, in the units that their
heading names, so a renderer (`actordbg.report.renderings`) only lays them out. "-" stands for what nobody measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heading:
    """A title; level 1 for the report, 2 for a replay, 3 for its parts."""

    text: str
    level: int


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list; an item may hold several lines (an excerpt of a log), which stay lines."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """Text whose line breaks matter: the end of a log."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table; columns whose heading is in `left` are text, all others figures.

    links: for each row the path of its log ("" for none), which Markdown has as a last column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[str] = frozenset()
    links: tuple[str, ...] = ()


Block = Heading | Paragraph | Items | Code | Grid


def number(value: float | None, digits: int = 4) -> str:
    """A figure with `digits` significant digits, and an exponent only below 0.0001 and from ten million on."""
    if value is None:
        return "-"
    short = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in short and 1 <= abs(value) < 1e7 else short


def seconds(value: float | None) -> str:
    """Seconds with three significant digits, zeros kept: 2.00, 0.950, 123."""
    if value is None or value >= 1000 or 0 < value < 0.001:
        return number(value, 3)
    return f"{value:#.3g}".rstrip(".") if value else "0"


def rate(value: float | None) -> str:
    """A rate, whole from 100 on."""
    return f"{value:,.0f}" if value is not None and value >= 100 else number(value, 3)


def ratio(value: float | None) -> str:
    """A ratio with two decimals."""
    return "-" if value is None else f"{value:.2f}"


def setting(value: Any) -> str:
    """A setting's value: on and off for switches, commas in large numbers."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10**4 else str(value)
