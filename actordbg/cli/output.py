"""How commands speak: one answer on standard output, as text or JSON; progress and notes on standard error.

A command builds its answer (a dataclass, or a list of them), and calls `emit(answer, render, as_json)`. With `--json`
the answer's own fields are printed, so every command's JSON is its output type; otherwise `render(answer)` prints text.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import typer

from actordbg.base.units import human_bytes as human_bytes
from actordbg.base.units import plural as plural

T = TypeVar("T")
PIPE_WIDTH = 200
"""Columns that a table may take when standard output is not a terminal."""
CELL_WIDTH = 1000
"""Characters of a value that a table shows; folding a longer one takes seconds, and nobody reads it there."""


def emit(answer: T, render: Callable[[T], None], as_json: bool, *, err: bool = False) -> None:
    """Print `answer` as JSON (with `err` on standard error), or hand it to `render`."""
    if as_json:
        typer.echo(json.dumps(answer, default=_plain, indent=2, ensure_ascii=False, allow_nan=False), err=err)
    else:
        render(answer)


def say(text: str = "") -> None:
    """A line of the answer."""
    typer.echo(text)


def note(text: str) -> None:
    """A line about the answer, on standard error, so that a pipe gets only the answer."""
    typer.echo(text, err=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None, *, tight: bool = False) -> None:
    """Print rows under headings; numbers are aligned to the right. Wide, not cut, when piped. `tight`: one space between."""
    from actordbg.report.blocks import Grid
    from actordbg.report.renderings import grid

    figures = [all(isinstance(row[index], int | float) or row[index] is None for row in rows) for index in range(len(columns))]
    left = frozenset(name for name, numeric in zip(columns, figures, strict=True) if not (rows and numeric))
    told = Grid(tuple(columns), tuple(tuple(cell(value) for value in row) for row in rows), left)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    say(f"{title}\n" * bool(title) + grid(told, width, tight=tight, fold=True, indent=""))


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error while the block runs; yields `advance(n=1, note="", total=None)`, where a
    total that is given replaces the one that the bar began with. A no-op with `quiet`."""
    if quiet:
        yield lambda n=1, note="", total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"), console=Console(stderr=True, highlight=False),
    )  # fmt: skip
    with bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda n=1, note="", total=None: bar.update(task, advance=n, total=total, **({"note": note} if note else {}))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
