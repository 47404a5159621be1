"""A report as plain text of at most 80 columns, the same in a terminal, a pipe and a file.

No colour and no box: what is printed is what is pasted into an issue. A table that would be wider gets narrower gaps, and
after that its text columns are cut in the middle, never its figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from actordbg.report.replay_document import Block, Code, Grid, Heading, Items, Paragraph, document
from actordbg.report.report_model import Summary

WIDTH = 80


def render(summary: Summary) -> str:
    """The report as text that ends with a line break."""
    return of_blocks(document(summary))


def of_blocks(blocks: Iterable[Block]) -> str:
    """A document as text that ends with a line break."""
    return "\n".join(_block(block) for block in blocks).strip("\n") + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return _heading(block)
    if isinstance(block, Paragraph):
        return wrap(block.text) + "\n"
    if isinstance(block, Code):
        return "\n".join(f"    | {line[: WIDTH - 6]}" for line in block.text.splitlines()) + "\n"
    if isinstance(block, Items):
        return "\n".join(wrap(item, "  ", "      ") for item in block.items) + "\n"
    return grid(block) + "\n"


def _heading(heading: Heading) -> str:
    if heading.level == 3:
        return f"{heading.text}\n"
    return f"{heading.text}\n{('=' if heading.level == 1 else '-') * min(len(heading.text), WIDTH)}\n"


def wrap(text: str, first: str = "", rest: str = "") -> str:
    """`text` in lines of at most 80 columns; a word longer than that (a path) stays whole on its own line."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def grid(table: Grid) -> str:
    """The table with its heading underlined, at most 80 columns wide."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i].strip()) for line in lines) for i in range(len(table.columns))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) + 2 <= WIDTH else 1
    excess = sum(widths) + gap * (len(widths) - 1) + 2 - WIDTH
    for index, name in enumerate(table.columns):
        if excess > 0 and name in table.left:
            cut = min(excess, max(0, widths[index] - 12))
            widths[index] -= cut
            excess -= cut
    rule = "-" * (sum(widths) + gap * (len(widths) - 1))
    printed = [_line(line, table, widths, gap) for line in lines]
    return "\n".join(f"  {text}".rstrip() for text in (printed[0], rule, *printed[1:]))


def _line(line: tuple[str, ...], table: Grid, widths: list[int], gap: int) -> str:
    cells = []
    for name, text, width in zip(table.columns, line, widths, strict=True):
        short = shorten(text.strip(), width)
        cells.append(short.ljust(width) if name in table.left else short.rjust(width))
    return (" " * gap).join(cells)


def shorten(text: str, width: int) -> str:
    """`text` cut in its middle to `width` columns."""
    if len(text) <= width:
        return text
    keep = width - 2
    return f"{text[: keep - keep // 2]}..{text[len(text) - keep // 2 :]}"
