"""Render a document as plain text of at most 80 columns, or as GitHub Markdown. `actordbg.document.page` renders HTML.

Text has no colors and no boxes, so it looks the same in a terminal, a pipe and an issue. A table that is too wide first gets
narrower gaps; then its text columns are cut in the middle, never its figures.

Both clean foreign text (an error, a path, a dump id) with `actordbg.base.foreign_text`. New code here must do so as well: a
block's strings reach the output only through `in_lines`, `in_line`, or that module's functions for Markdown. Dump ids are shown
as handles.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from actordbg.base.foreign_text import fenced, in_csv, in_line, in_lines, in_markdown
from actordbg.base.units import with_handles
from actordbg.document.blocks import Block, Code, Grid, Heading, Items, Paragraph, Picture, Verdict, section, verdict_in

WIDTH = 80
_COMMAND = re.compile(r"^(\s*)(::|##\[)", re.MULTILINE)
"""How a line begins that GitHub's runner takes as a command: foreign text that was wrapped may."""


def as_text(blocks: Sequence[Block]) -> str:
    """Render a document as text that ends with a line break.

    The first line is the verdict in a few words, not wrapped; the last is the command to run next.
    """
    verdict = verdict_in(blocks)
    texts = [_text_block(block) for block in blocks if not isinstance(block, Verdict | Picture)]
    if verdict is not None:
        width = max((len(name) for name, _ in verdict.figures), default=0)
        lines = [
            _running(verdict.headline),
            *(wrap(line, "  ", "    ") for line in [*verdict.details, verdict.left] if line),
            *(f"  {_running(name):<{width}}  {_running(value)}" for name, value in verdict.figures),
        ]
        texts = ["\n".join(lines) + "\n", *texts]
        texts += [f"next: {in_line(verdict.next)}"] if verdict.next else []
    return _COMMAND.sub(r"\1\\\2", "\n".join(texts).strip("\n") + "\n")


def _text_block(block: Block) -> str:
    match block:
        case Heading(title, level):
            text = wrap(_running(title))
            if level >= 3:
                return f"{text}\n"
            line = "=" if level == 1 else "-"
            return f"{text}\n{line * min(len(text), WIDTH)}\n"
        case Paragraph(text):
            return wrap(text) + "\n"
        case Code(text):
            return "\n".join(f"    | {line[: WIDTH - 6]}" for line in in_lines(text).split("\n")) + "\n"
        case Items(items):
            return "\n".join(wrap(item, "  ", "      ") for item in items) + "\n"
        case Grid():
            return grid(block, fold=block.wraps) + "\n"
    raise TypeError(f"{type(block).__name__} has no text")


def _running(text: str) -> str:
    """Replace line breaks and tabs in `text` by spaces, and dump ids by handles."""
    return in_line(with_handles(re.sub(r"[\r\n\t]+", " ", text)))


def wrap(text: str, first: str = "", rest: str = "") -> str:
    """Wrap `text` to 80 columns; a longer word (a path) is not broken."""
    return textwrap.fill(
        in_lines(with_handles(text)),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def grid(table: Grid, width: int = WIDTH, *, tight: bool = False, fold: bool = False, indent: str = "  ") -> str:
    """Render a table of at most `width` columns, with its heading underlined.

    To fit, headings take several lines, then gaps narrow to one space, then text columns are cut in the middle, or with `fold`
    wrapped. `tight`: narrow gaps, no underline.
    """
    lines = [tuple(in_line(with_handles(text)) for text in line) for line in (table.columns, *table.rows)]
    sizes = [[len(text.strip()) for text in line] for line in lines]
    widths, room, gaps = [*map(max, zip(*sizes, strict=True))], width - len(indent), len(table.columns) - 1
    sizes[0] = [max(map(len, text.split()), default=0) for text in lines[0]]
    folded = [*map(max, zip(*sizes, strict=True))]
    while sum(widths) + 2 * gaps > room and widths != folded:
        first = max(range(len(widths)), key=lambda i: widths[i] - folded[i])
        widths[first] = folded[first]
    gap = 1 if tight or sum(widths) + 2 * gaps > room else 2
    excess = sum(widths) + gap * gaps - room
    least = [max(_LEAST, heading) for heading in sizes[0]]
    words = [max(map(len, " ".join(column).split()), default=0) for column in zip(*lines, strict=True)]
    while excess > 0 and (wide := [i for i, name in enumerate(table.columns) if name in table.left and widths[i] > least[i]]):
        breakable = [i for i in wide if widths[i] > words[i]] or wide  # an id is broken if nothing else can be
        first = max(breakable, key=lambda i: widths[i]) if fold else wide[0]
        cut = 1 if fold else min(excess, widths[first] - least[first])
        widths[first] -= cut
        excess -= cut
    rule = [] if tight else ["-" * (sum(widths) + gap * gaps)]
    head, *rows = (_line(line, table, widths, gap, fold or line is lines[0]) for line in lines)
    return "\n".join(f"{indent}{text}".rstrip() for text in (*head, *rule, *(text for row in rows for text in row)))


_LEAST = 12
"""The least width that a text column is cut to: a handle is shorter. No word of its heading is cut."""
_DOTTED = re.compile(r"[A-Za-z]\w*(\.\w+){3,}")
"""A parameter's name."""


def _line(line: tuple[str, ...], table: Grid, widths: list[int], gap: int, fold: bool) -> list[str]:
    texts = [text.strip() for text in line]
    cells = [
        (textwrap.wrap(text, max(width, 1), break_on_hyphens=False) or [""]) if fold else [shorten(text, width)]
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


def as_markdown(blocks: Sequence[Block]) -> str:
    """Render a document as Markdown that ends with a line break; the verdict first, its next command last."""
    verdict = verdict_in(blocks)
    texts = [_markdown_block(block) for block in blocks if not isinstance(block, Verdict | Picture)]
    if verdict is not None:
        word = f"**{_flowing(verdict.heading)}:** " if verdict.word else ""
        lines = section(
            "",
            [line for line in [*verdict.details, verdict.left, *(f"{name}: {value}" for name, value in verdict.figures)] if line],
        )
        texts = [word + _flowing(verdict.brief), *map(_markdown_block, lines), *texts]
        texts += [_flowing(f"next: {verdict.next}")] if verdict.next else []
    return "\n\n".join(texts) + "\n"


def _markdown_block(block: Block) -> str:
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
    raise TypeError(f"{type(block).__name__} has no Markdown")


def _markdown_grid(table: Grid) -> str:
    rule = [":---" if name in table.left else "---:" for name in table.columns]
    heads = [in_markdown(name.strip()) or " " for name in table.columns]
    rows = [[in_markdown(with_handles(text)) for text in row] for row in table.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def _flowing(text: str) -> str:
    return in_markdown(_running(text), leading=True)
