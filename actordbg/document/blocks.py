"""The blocks of a document, independent of its format, and the formatting of figures.

Reports, comparisons, matrices and curves are lists of blocks. Table cells are already strings, in the units that the heading
names, so a renderer (`actordbg.document.renderings`) only lays them out. "-" means not measured.

Banner, Chart and Cells are for pages (`page`). Text and Markdown skip them, because the blocks beside them have the same content.
JSON has them as data: `as_data`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
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
    """A list; an item may hold several lines (an excerpt of a log), whose line breaks are kept."""

    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Text whose line breaks matter: the end of a log."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table; columns whose heading is in `left` are text, all others figures.

    links: for each row the path of its log ("" for none), shown as a last column in Markdown and HTML.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    links: Sequence[str] = ()


GOOD_TONE, BAD_TONE, PART_TONE, NO_TONE = "good", "bad", "part", "none"
"""Colors of a verdict: right, wrong, partial or not checked, nothing ran."""


@dataclass(frozen=True)
class Banner:
    """The verdict: a word, a sentence, a few named figures, and what was not checked."""

    word: str
    sentence: str
    tone: str
    figures: Sequence[tuple[str, str]] = ()
    unjudged: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A picture as data: a Vega-Lite specification with its values inside, and a table of the same figures.

    says: what the picture shows, in a sentence or two (also its text for screen readers). note: what was omitted or merged.
    half: two such charts are placed side by side if there is room.
    """

    title: str
    says: str
    specification: dict[str, Any]
    table: Grid
    note: str = ""
    half: bool = False


@dataclass(frozen=True)
class Cell:
    """A field of a heat map: its text, the reason, and the command that shows more."""

    text: str
    figure: str = ""
    tone: str = NO_TONE
    why: str = ""
    command: str = ""


@dataclass(frozen=True)
class Cells:
    """A heat map whose fields can be hovered over, reached by keyboard and clicked. None: no such combination."""

    title: str
    says: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    specification: dict[str, Any]


Picture = Banner | Chart | Cells
Block = Heading | Paragraph | Items | Code | Grid | Picture


def as_data(blocks: Iterable[Block]) -> dict[str, Any]:
    """Return the parts of a document that are added to its JSON: the verdict, and the charts as Vega-Lite specifications."""
    banner, charts = None, []
    for block in blocks:
        if isinstance(block, Banner):
            banner = banner or asdict(block)
        elif isinstance(block, Chart | Cells):
            charts.append({"title": block.title, "says": block.says, "specification": block.specification})
    return {"banner": banner, "charts": charts}


def number(value: float | None, digits: int = 4) -> str:
    """Format a figure with `digits` significant digits; with an exponent only below 0.0001 or above ten million."""
    if value is None:
        return "-"
    short = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in short and 1 <= abs(value) < 1e7 else short


def seconds(value: float | None) -> str:
    """Format seconds with three significant digits, keeping zeros: 2.00, 0.950, 123."""
    if value is None or value >= 1000 or 0 < value < 0.001:
        return number(value, 3)
    return f"{value:#.3g}".rstrip(".") if value else "0"


def rate(value: float | None) -> str:
    """Format a rate; without decimals from 100 up."""
    return f"{value:,.0f}" if value is not None and value >= 100 else number(value, 3)


def setting(value: Any) -> str:
    """Format a setting's value: on or off for booleans, commas in large numbers."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10**4 else str(value)
