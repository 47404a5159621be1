"""Render a document as plain text of at most 80 columns, or as GitHub Markdown. `actordbg.document.page` renders HTML.

Text has no colors and no boxes, so it looks the same in a terminal, a pipe and an issue. A table that is too wide first gets
narrower gaps; then its text columns are cut in the middle, never its figures.

Both clean foreign text (an error, a path, a dump id) with `actordbg.base.foreign_text`. New code here must do so as well: a
block's strings reach the output only through `in_lines`, `in_line`, or that module's functions for Markdown.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from actordbg.base.foreign_text import fenced, in_csv, in_line, in_lines, in_markdown
from actordbg.document.blocks import Block, Code, Grid, Heading, Items, Paragraph, Picture

WIDTH = 80


def as_text(blocks: Iterable[Block]) -> str:
    """Render a document as text that ends with a line break."""
    return "\n".join(_text_block(block) for block in _written(blocks)).strip("\n") + "\n"


Written = Heading | Paragraph | Items | Code | Grid
"""Blocks that text and Markdown show."""


def _written(blocks: Iterable[Block]) -> Iterable[Written]:
    return (block for block in blocks if not isinstance(block, Picture))


def _text_block(block: Written) -> str:
    match block:
        case Heading(title, level):
            text = _running(title)
            rule = f"{('=' if level == 1 else '-') * min(len(text), WIDTH)}\n" if level < 3 else ""
            return f"{text}\n{rule}"
        case Paragraph(text):
            return wrap(text) + "\n"
        case Code(text):
            return "\n".join(f"    | {line[: WIDTH - 6]}" for line in in_lines(text).split("\n")) + "\n"
        case Items(items):  # the next command stays on one line, so that it can be pasted
            lines = (f"  {in_lines(item)}" if item.startswith("next: ") else wrap(item, "  ", "      ") for item in items)
            return "\n".join(lines) + "\n"
        case Grid():
            return grid(block) + "\n"


def _running(text: str) -> str:
    """Replace line breaks and tabs in `text` by spaces."""
    return in_line(re.sub(r"[\r\n\t]+", " ", text))


def wrap(text: str, first: str = "", rest: str = "") -> str:
    """Wrap `text` to 80 columns; a longer word (a path) is not broken."""
    return textwrap.fill(
        in_lines(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def grid(table: Grid, width: int = WIDTH, *, tight: bool = False, fold: bool = False, indent: str = "  ") -> str:
    """Render a table of at most `width` columns, with its heading underlined.

    To fit, gaps narrow to one space, dump ids are cut to a prefix (which every command accepts), then text columns are cut in the
    middle, or with `fold` wrapped. `tight`: narrow gaps, and no underline.
    """
    lines = [tuple(in_line(text) for text in line) for line in (table.columns, *table.rows)]
    for beginning in _BEGINNINGS:
        if sum(max(len(line[i].strip()) for line in lines) + 1 for i in range(len(table.columns))) > width - len(indent):
            lines = _with_short_ids(lines, beginning)
    widths = [max(len(line[i].strip()) for line in lines) for i in range(len(table.columns))]
    room = width - len(indent)
    gap = 1 if tight or sum(widths) + 2 * (len(widths) - 1) > room else 2
    excess = sum(widths) + gap * (len(widths) - 1) - room
    least = [12] * len(table.columns)
    for i, cells in enumerate(zip(*lines[1:], strict=True)):
        if not fold and all(_ONLY_TIME.fullmatch(cell.strip()) for cell in cells):
            least[i] = widths[i]  # short ids are not cut further, so that they can be pasted
    while excess > 0 and (wide := [i for i, name in enumerate(table.columns) if name in table.left and widths[i] > least[i]]):
        first = max(wide, key=lambda i: widths[i]) if fold else wide[0]
        cut = 1 if fold else min(excess, widths[first] - least[first])
        widths[first] -= cut
        excess -= cut
    rule = [] if tight else ["-" * (sum(widths) + gap * (len(widths) - 1))]
    head, *rows = (_line(line, table, widths, gap, fold) for line in lines)
    return "\n".join(f"{indent}{text}".rstrip() for text in (*head, *rule, *(text for row in rows for text in row)))


_CALL, _TIME = re.compile(r"(\d{8}T\d{6}\.\d{6}Z-\d{6})-[\w-]+\Z"), re.compile(r"(\d{8}T\d{6}\.\d{6})Z-\d{6}(-[\w-]+)?\Z")
"""Prefixes of a dump id that may be shown: time and number of the call; only the time."""
_BEGINNINGS = (_CALL, _TIME)
_ONLY_TIME = re.compile(r"\d{8}T\d{6}\.\d{6}")
_DOTTED = re.compile(r"[A-Za-z]\w*(\.\w+){3,}")
"""A parameter's name."""


def _with_short_ids(lines: list[tuple[str, ...]], beginning: re.Pattern[str]) -> list[tuple[str, ...]]:
    """Cut dump ids to a prefix that can be pasted, in columns where the prefixes still differ."""
    columns = [list(column) for column in zip(*lines, strict=True)]
    for column in columns:
        short = {text: match[1] for text in column if (match := beginning.match(text.strip()))}
        if len(set(short.values())) == len(short):
            column[:] = [short.get(text, text) for text in column]
    return list(zip(*columns, strict=True))


def _line(line: tuple[str, ...], table: Grid, widths: list[int], gap: int, fold: bool) -> list[str]:
    texts = [text.strip() for text in line]
    cells = [
        (textwrap.wrap(text, width, break_on_hyphens=False) or [""]) if fold else [shorten(text, width)]
        for text, width in zip(texts, widths, strict=True)
    ]
    sides = [str.ljust if name in table.left else str.rjust for name in table.columns]
    return [
        (" " * gap).join(side(text, width) for side, text, width in zip(sides, parts, widths, strict=True))
        for parts in zip_longest(*cells, fillvalue="")
    ]


def shorten(text: str, width: int) -> str:
    """Cut `text` in the middle to `width` columns; a parameter's name at the start, because its layer and matrix come last."""
    if len(text) <= width:
        return text
    if _DOTTED.fullmatch(text) and (rest := text.find(".", len(text) - width + 1)) >= 0:
        return f".{text[rest:]}"  # complete parts only: part of a layer's number would name another layer
    keep = width - 2
    return f"{text[: keep - keep // 2]}..{text[len(text) - keep // 2 :]}"


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Render these columns of rows as CSV under their heading: True as `true`, text escaped, numbers unchanged."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        values = (row[name] for name in columns)
        writer.writerow(
            in_csv(value) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else value
            for value in values
        )
    return out.getvalue()


def as_markdown(blocks: Iterable[Block]) -> str:
    """Render a document as Markdown that ends with a line break."""
    return "\n\n".join(_markdown_block(block) for block in _written(blocks)) + "\n"


def _markdown_block(block: Written) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_flowing(text)}"
        case Paragraph(text):
            return _flowing(text)
        case Items(items):
            return "\n".join(f"- {_flowing(item)}" for item in items)
        case Code(text):
            return fenced(text)
        case Grid():
            return _markdown_grid(block)


def _markdown_grid(table: Grid) -> str:
    rule = [":---" if name in table.left else "---:" for name in table.columns]
    heads = [in_markdown(name.strip()) or " " for name in table.columns]
    rows = [[in_markdown(text) for text in row] for row in table.rows]
    if any(table.links):
        heads, rule = [*heads, "log"], [*rule, ":---"]
        rows = [[*row, f"[log]({quote(path)})" if path else " "] for row, path in zip(rows, table.links, strict=True)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def _flowing(text: str) -> str:
    return in_markdown(_running(text), leading=True)
