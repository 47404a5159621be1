"""A report as Markdown (GitHub's), for an issue, a pull request or a folder of results.

What comes from outside (an error, a path, a dump id) is escaped, so it cannot turn into a link, a heading or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from actordbg.report.replay_document import Block, Code, Grid, Heading, Items, Paragraph, document
from actordbg.report.report_model import Summary

_SPECIAL = re.compile(r"([\\`*\[\]<|~&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_LEADING = re.compile(r"^(\s*)([-+>#=])")


def render(summary: Summary) -> str:
    """The report as Markdown that ends with a line break."""
    return of_blocks(document(summary))


def of_blocks(blocks: Iterable[Block]) -> str:
    """A document as Markdown that ends with a line break."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {escape(block.text)}"
    if isinstance(block, Paragraph):
        return escape(block.text)
    if isinstance(block, Items):
        return "\n".join(f"- {escape(' '.join(item.split()))}" for item in block.items)
    if isinstance(block, Code):
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", block.text)), default=0))
        return f"{fence}text\n{block.text}\n{fence}"
    return _grid(block)


def _grid(table: Grid) -> str:
    rule = [":---" if name in table.left else "---:" for name in table.columns]
    heads = [inline(name.strip()) or " " for name in table.columns]
    rows = [[inline(text) for text in row] for row in table.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def escape(text: str) -> str:
    """`text` as the beginning of a block, so that Markdown shows it as it is."""
    return _LEADING.sub(r"\1\\\2", inline(text))


def inline(text: str) -> str:
    """`text` inside a line or a table's cell, so that Markdown shows it as it is."""
    return _SPECIAL.sub(r"\\\1", text)
