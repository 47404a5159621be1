"""Files that a user named: whatever an answer is written to, and charts as pictures.

Pictures (.svg, .png or .pdf) are drawn from the charts' Vega-Lite specifications by vl-convert (the extra `plot`).

Example::

    check("--plot", path)                      # before the work that the picture shows
    save(train_charts(record), path)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, UsageError, require_package
from actordbg.document.blocks import Chart
from actordbg.document.specifications import SCHEMA
from actordbg.formats.store_files import atomic_write

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
