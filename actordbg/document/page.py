"""Render a document as a self-contained HTML file: style, pictures and vega included, and a policy that forbids network requests.

The policy names the page's own style and scripts by their hashes. So foreign text could not run code even if it were not escaped,
and vega evaluates no code: its expressions are interpreted (`ast` in `page.js`). A page without a chart has no vega and is small.

Every string of a block goes through `_inline` or `in_html`, specifications through `in_script`. The markup is semantic, so that
screen readers, printers and browsers without JavaScript show everything: a chart is a figure with its table, which is open until
the page's script has drawn the picture, and a heat map is a table of buttons. No element has a style attribute: the policy
forbids it.

Example::

    Path("report.html").write_text(as_html(document(summary)))
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actordbg import __version__
from actordbg.base.errors import EnvironmentProblem
from actordbg.base.foreign_text import in_html, in_line, in_script
from actordbg.base.units import with_handles
from actordbg.document.blocks import (
    Block,
    Cell,
    Cells,
    Chart,
    Code,
    Grid,
    Heading,
    Items,
    Paragraph,
    Verdict,
    tone_of,
    verdict_in,
)
from actordbg.document.specifications import SCHEMA
from actordbg.formats.store_files import atomic_write
from actordbg.records.finding import unchecked_by_rule

VEGA = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
"""In loading order: each script needs the previous script."""
_ENDS = re.compile(r"</(?:script|style)|<!--", re.IGNORECASE)


def as_html(blocks: Iterable[Block], *, above: str = "", below: str = "", forms: bool = False) -> str:
    """Render a page. above, below: trusted HTML around the document (`actordbg ui`). forms: allow forms sent to its server."""
    document = list(blocks)
    heading = next((block for block in document if isinstance(block, Heading) and block.level == 1), Heading("actordbg", 1))
    verdict = verdict_in(document)
    style = asset("page.css")
    scripts = [*(asset(name) for name in VEGA if any(isinstance(block, Chart) for block in document)), asset("page.js")]
    title = f"{verdict.heading}: {heading.text}" if verdict and verdict.word else heading.text
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(style, scripts, forms)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f'<meta name="generator" content="actordbg {in_html(__version__)}"><title>{in_html(title)}</title>',
            f"<style>{style}</style></head><body>",
            '<a class="skip" href="#main">Skip to main</a>',
            f'{above}<main id="main">{as_body(document)}{below}</main>',
            f"<footer>actordbg {in_html(__version__)}</footer>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def as_fragment(blocks: Sequence[Block]) -> str:
    """Render blocks for a notebook's cell: the page's style, confined to them, and no script, so nothing is left to click."""
    style = re.sub(r"(?<![-\w.])(:root|html|body)(?=[,{])", "&", asset("page.css"))
    return f'<div class="actordbg"><style>.actordbg{{{style} .copy{{display:none}}}}</style>{as_body(blocks)}</div>'


def policy(style: str, scripts: Iterable[str], forms: bool = False) -> str:
    """Return the Content-Security-Policy: the page's own style and scripts, embedded pictures, and nothing else."""
    allowed = " ".join(_hashed(script) for script in scripts)
    inside = f"script-src {allowed}; style-src {_hashed(style)}; img-src data:"
    target = "'self'" if forms else "'none'"
    return f"default-src 'none'; {inside}; base-uri 'none'; form-action {target}"


@cache
def asset(name: str) -> str:
    """Read a file of `assets/`, and assert that it cannot end the element that will contain it."""
    text = files("actordbg.document").joinpath("assets").joinpath(name).read_text("utf-8")
    assert not _ENDS.search(text), f"{name} would end its own element"
    return text


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


WIDTH = 760
"""Width of a saved chart, in pixels."""


def check_place(path: Path | None) -> None:
    """Check that a file can be written, before work that may take minutes. Raises EnvironmentProblem if not."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise EnvironmentProblem(f"cannot write {path}: {path.parent} is not a folder", hint="create it, or name another folder")
    if path.is_dir():
        raise EnvironmentProblem(f"cannot write {path}: it is a folder", hint="name a file in it")
    replaced = path.is_file() or not path.exists()  # by a new file in its folder, see write_named
    if not os.access(path.resolve().parent if replaced else path, os.W_OK):
        raise EnvironmentProblem(f"cannot write {path}", hint="name a file in a folder that you can write to")


def write_named(path: Path, data: bytes) -> None:
    """Write data to a path that the user named: atomically to a file, following links, or directly to a device.

    Raises EnvironmentProblem if the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            atomic_write(path.resolve(), data, mode=0o644)
    except OSError as error:
        hint = "free some space, or name a file in a folder that you can write to"
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", hint=hint) from None


def save(charts: Sequence[Chart], path: Path) -> bool:
    """Write the charts to a picture, one below the other, and return True; without charts, write nothing and return False."""
    if not charts:
        return False
    import vl_convert

    parts = [{**_visible(chart.specification), "title": chart.title, "width": WIDTH} for chart in charts]
    picture = {"$schema": SCHEMA, "vconcat": parts, "background": "white"}
    drawn: str | bytes = getattr(vl_convert, f"vegalite_to_{path.suffix.lower()[1:]}")(picture)
    write_named(path, drawn.encode() if isinstance(drawn, str) else drawn)
    return True


_CODE = re.compile("`([^`\n]+)`")
_POWER = re.compile(r"\b\d[\d.]*e-\d+")
"""A number that a browser would break behind its hyphen."""
_LABEL = r"[A-Za-z][A-Za-z'|`()-]*(?: [A-Za-z'|`()-]+){0,2}"
_FACT = re.compile(rf"^({_LABEL}(?:, {_LABEL})*): +(?=\S)")
"""A label of at most three words, or several of them: what a sentence has before its colon is longer."""
_COMMANDS = ("command", "repeat")
"""Facts and columns whose text is a command."""
Folded = frozenset({"Logs", "Legend", "Rules not checked"})
"""Headings of sections that are collapsed at first."""


def as_body(blocks: Sequence[Block]) -> str:
    """Render all blocks in order, with links to the sections below the verdict, and rarely read sections collapsed."""
    parts: list[str] = []
    paired = False
    end_of_section = ""
    for number, block in enumerate(blocks):
        pair = isinstance(block, Chart) and block.half
        if pair != paired:
            parts.append('<div class="pair">' if pair else "</div>")
        paired = pair
        if isinstance(block, Heading):
            parts.append(end_of_section)
            heading, end_of_section = f'<h{block.level} id="part-{number}">{_inline(block.text)}</h{block.level}>', ""
            if block.level == 3 and block.text in Folded:
                heading, end_of_section = f"<details><summary>{_inline(block.text)}</summary>", "</details>"
            parts.append(heading)
        else:
            parts.append(_block(block, number, blocks))
    if paired:
        parts.append("</div>")
    return "\n".join(filter(None, [*parts, end_of_section]))


def contents(blocks: Sequence[Block]) -> str:
    """Render links to the sections of level 2, if there are at least three."""
    headings = [(number, block) for number, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 2]
    if len(headings) < 3:
        return ""
    links = "".join(f'<li><a href="#part-{number}">{in_html(block.text)}</a></li>' for number, block in headings)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _block(block: Block, number: int, blocks: Sequence[Block]) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Items(items):
            return f"<ul>{''.join(map(_item, items))}</ul>"
        case Code(text):
            return f'<pre tabindex="0">{in_html(text)}</pre>'
        case Grid():
            return _grid(block)
        case Verdict():
            return _verdict(block) + contents(blocks)
        case Cells():
            return _cells(block)
        case Chart():
            return _chart(block, number)
        case Heading():
            return ""  # rendered by `as_body`


def _inline(text: str) -> str:
    """Render inline text, with backticked parts as code, and dump ids as handles that show the id when hovered over."""
    whole = _POWER.sub(r'<span class="n">\g<0></span>', with_handles(in_html(text), '<span title="{0}">{1}</span>'))
    return _CODE.sub(r"<code>\1</code>", whole)


def _item(text: str) -> str:
    """Render a list item; a fact ("inputs: 3 dumps") gets a separate label, and a command a copy button."""
    fact = _FACT.match(text)
    if fact is None:
        return f"<li>{_inline(text)}</li>"
    value = _inline(text[fact.end() :])
    if fact[1] in _COMMANDS:
        value = _command(text[fact.end() :])
    return f'<li class="fact"><b>{_inline(fact[1])}</b><span>{value}</span></li>'


def _command(text: str) -> str:
    """Render a command with a button that copies it."""
    return f'<code>{in_html(text)}</code> <button type="button" class="copy" data-copy="{in_html(text)}">copy</button>'


def _grid(grid: Grid) -> str:
    rows = [
        [_command(text) if name in _COMMANDS else toned(text.strip()) for name, text in zip(grid.columns, row, strict=True)]
        for row in grid.rows
    ]
    return table(grid.columns, rows, grid.left)


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], left: Collection[str], heads: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Render a table whose cells are HTML. left: left-aligned text columns; the others are right-aligned figures. heads: headings
    that are HTML, by column."""
    sides = [(name, ' class="left"' if name in left else "") for name in columns]
    titles = ((heads.get(name) or _inline(name.strip()), side) for name, side in sides)
    head = "".join(f'<th scope="col"{side}>{title}</th>' for title, side in titles)
    lines = ("".join(f"<td{side}>{cell}</td>" for cell, (_, side) in zip(row, sides, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="Table">{whole}</div>'


def toned(text: str) -> str:
    """Render a table cell, in the color of its verdict if it is or begins with a verdict word."""
    tone = tone_of(text)
    return f'<span class="tone {tone}">{_inline(text)}</span>' if tone else _inline(text)


def _verdict(verdict: Verdict) -> str:
    figures = "".join(f"<div><dt>{_inline(name)}</dt><dd>{_inline(value)}</dd></div>" for name, value in verdict.figures)
    left = "".join(f"<li>{_inline(text)}</li>" for text in unchecked_by_rule(verdict.not_checked))
    word = f"<strong>{in_html(verdict.heading)}</strong> " if verdict.word else ""
    parts = [f'<p class="verdict">{word}{_inline(verdict.brief)}</p>', *(f"<p>{_inline(line)}</p>" for line in verdict.details)]
    if figures:
        parts.append(f"<dl>{figures}</dl>")
    if left:
        parts.append(f'<div class="unchecked"><b>Not checked</b><ul>{left}</ul></div>')
    if verdict.next:
        parts.append(f'<p class="next"><b>next</b> {_command(verdict.next)}</p>')
    return f'<section class="banner {in_html(verdict.tone)}" aria-label="Verdict">{"".join(parts)}</section>'


def _chart(chart: Chart, number: int) -> str:
    note = f'<p class="note">{_inline(chart.note)}</p>' if chart.note else ""
    specification = in_script(
        json.dumps(_visible(chart.specification), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )
    return (
        f'<figure class="chart" id="chart-{number}"><figcaption><b>{in_html(chart.title)}</b> {_inline(chart.says)}</figcaption>'
        f'<div class="live" role="img" aria-label="{in_html(with_handles(chart.says))}" hidden></div>'
        f'<script type="application/json">{specification}</script>{note}'
        f"<details open><summary>Data as a table</summary>{_grid(chart.table)}</details></figure>"
    )


def _visible(value: Any) -> Any:
    """Return a specification as vega gets it: texts, which it draws unchanged, without invisible characters and with handles
    for dump ids; figures that are not finite, which JSON does not have, as null.
    """
    if isinstance(value, str):
        return in_line(with_handles(value))
    if isinstance(value, dict):
        return {name: _visible(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None  # vega leaves such a point out
    return [_visible(item) for item in value] if isinstance(value, list) else value


def _cells(heat: Cells) -> str:
    heads = "".join(f'<th scope="col">{in_html(name)}</th>' for name in heat.columns)
    rows = "".join(
        f'<tr><th scope="row">{in_html(name)}</th>{"".join(_cell(cell) for cell in cells)}</tr>'
        for name, cells in zip(heat.rows, heat.cells, strict=True)
    )
    return (
        f'<figure class="heat"><figcaption><b>{in_html(heat.title)}</b> {_inline(heat.says)}</figcaption>'
        f'<div class="wide"><table><thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="why" role="status"></p></figure>'
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    why = in_html(cell.why or cell.text)
    return (
        f'<td><button type="button" class="cell {in_html(cell.tone)}" data-copy="{in_html(cell.command)}" data-why="{why}" '
        f'title="{why}"><b>{in_html(cell.text)}</b><span>{in_html(cell.figure)}</span></button></td>'
    )
