"""A document as one HTML file: style, pictures and vega inside, no request to any network, and a policy that allows none.

The policy names the page's own style and scripts by their hashes. So text that came from outside runs nothing even if it were not
escaped, and vega evaluates no code: its expressions are interpreted (`ast` in `page.js`). A page without a chart has no vega and
is small. Without JavaScript there are the tables.

Example::

    Path("report.html").write_text(as_html(document(summary)))
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from actordbg import __version__
from actordbg.base.errors import EnvironmentProblem, UsageError, require_package
from actordbg.base.foreign_text import in_html
from actordbg.document.blocks import Banner, Block, Chart, Heading
from actordbg.document.html_blocks import as_body, contents
from actordbg.document.specifications import SCHEMA
from actordbg.formats.store_files import atomic_write

VEGA = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
"""In this order: each needs the one before."""
_SELF, _NONE = "'self'", "'none'"
_ENDS = re.compile(r"</(?:script|style)|<!--", re.IGNORECASE)
_ICONS = {"good": "2a9d6f", "bad": "d1495b", "part": "d99a1c", "none": "8d99a6"}


def as_html(blocks: Iterable[Block], *, above: str = "", below: str = "", forms: bool = False) -> str:
    """The page. above, below: HTML of our own around the document (`actordbg ui`). forms: may be sent to its own server."""
    found = list(blocks)
    heading = next((one for one in found if isinstance(one, Heading)), Heading("actordbg", 1))
    banner = next((one for one in found if isinstance(one, Banner)), None)
    style = asset("page.css")
    scripts = [*(asset(name) for name in VEGA if any(isinstance(block, Chart) for block in found)), asset("page.js")]
    title = f"{banner.word}: {heading.text}" if banner else heading.text
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(style, scripts, forms)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f'<meta name="generator" content="actordbg {in_html(__version__)}"><title>{in_html(title)}</title>',
            f'<link rel="icon" href="{_icon(banner.tone if banner else "none")}">',
            f"<style>{style}</style></head><body>",
            '<a class="skip" href="#main">To the content</a>',
            f'{above}<main id="main">{contents(found)}{as_body(found)}{below}</main>',
            f"<footer>actordbg {in_html(__version__)}</footer>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def policy(style: str, scripts: Iterable[str], forms: bool = False) -> str:
    """What a page may do: its own style and scripts, pictures inside of it, and nothing else."""
    allowed = " ".join(_hashed(script) for script in scripts)
    inside = f"script-src {allowed}; style-src {_hashed(style)}; img-src data:"
    return f"default-src 'none'; {inside}; base-uri 'none'; form-action {_SELF if forms else _NONE}"


@cache
def asset(name: str) -> str:
    """A file of `assets/`, without what would end the element that it stands in."""
    text = files("actordbg.document").joinpath("assets").joinpath(name).read_text("utf-8")
    assert not _ENDS.search(text), f"{name} would end its own element"
    return text


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _icon(tone: str) -> str:
    circle = f"<circle cx='4' cy='4' r='4' fill='#{_ICONS.get(tone, _ICONS['none'])}'/>"
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'>{circle}</svg>"
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.encode()).decode()


SUFFIXES = (".svg", ".png", ".pdf")
WIDTH = 760
"""Width of each chart in pixels."""


def check(option: str, path: Path | None) -> None:
    """Raises UsageError for another suffix, and EnvironmentProblem for a folder that cannot be written or without vl-convert."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{option} {path}: no picture has the suffix {path.suffix!r}",
            hint=f"name a file that ends with {', '.join(SUFFIXES)}",
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise EnvironmentProblem(f"cannot write {path}", hint="name a file in a folder that exists and is writable")
    require_package(option, "vl_convert", "vl-convert-python")


def write_named(path: Path, data: bytes) -> None:
    """Writes what a user asked for where they said: a file whole or not at all, behind a link too; a device as it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        atomic_write(path.resolve(), data, mode=0o644)


def save(charts: Sequence[Chart], path: Path) -> bool:
    """Writes the charts one below the other and returns True; writes nothing and returns False without any.

    Raises EnvironmentProblem if the disk refuses the file.
    """
    if not charts:
        return False
    import vl_convert

    parts = [{**chart.specification, "title": chart.title, "width": WIDTH} for chart in charts]
    picture = {"$schema": SCHEMA, "vconcat": parts, "background": "white"}
    drawn: str | bytes = getattr(vl_convert, f"vegalite_to_{path.suffix.lower()[1:]}")(picture)
    try:
        write_named(path, drawn.encode() if isinstance(drawn, str) else drawn)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", hint="free some space, or name another file") from None
    return True
