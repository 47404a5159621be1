"""How `actordbg matrix` answers: text with coloured words in a terminal, Markdown, JSON; and its progress while it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import typer

from actordbg.actor.signatures import explain
from actordbg.cli import output
from actordbg.cli.options import Format
from actordbg.formats.matrix_record import MatrixCell, MatrixRecord
from actordbg.matrix.matrix_document import MatrixContext, matrix_document
from actordbg.matrix.run_matrix import MatrixEvent
from actordbg.replay.live_catalog import LiveCatalog
from actordbg.report.renderings import as_markdown, as_text

_COLOURS = {
    "passed": "green", "WRONG": "red", "failed": "red", "REGRESSED": "red", "unavailable": "yellow", "not run": "yellow",
}  # fmt: skip
_WORD = re.compile(r"\b(" + "|".join(_COLOURS) + r")\b")


@dataclass
class MatrixAnswer:
    """A matrix and what it ran on; `good`: whether every cell that ran is good (see the exit code)."""

    matrix: MatrixRecord
    good: bool
    context: MatrixContext


def print_answer(answer: MatrixAnswer, how: Format) -> None:
    """Print it in one of the formats."""
    if how == "json":
        output.emit(answer, lambda _: None, True)
        return
    blocks = matrix_document(answer.matrix, answer.context, explain)
    if how == "md":
        output.say_lines(as_markdown(blocks))
    else:
        output.say_lines(as_text(blocks), _coloured)


def _coloured(text: str) -> str:
    """The words of the table in colour, in a terminal; the words say it without."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(_coloured_line(line) if line.startswith("  ") else line for line in text.split("\n"))


def _coloured_line(line: str) -> str:
    return _WORD.sub(lambda found: typer.style(found[0], fg=_COLOURS[found[0]]), line)


def follow(catalog: LiveCatalog, advance: Callable[..., None], cells: int) -> Callable[[MatrixEvent], None]:
    """What to do with a running matrix's news: catalog it, move the bar on, and say which cell it is."""

    def on_event(event: MatrixEvent) -> None:
        catalog.touch()
        name = f"#{event.cell.index} of {cells}: {event.cell.name}"
        if event.kind == "cell":
            advance(0, note=name)
        elif event.kind == "input":
            advance(1, note=name if event.text == "passed" else f"{name}: {event.text}")
        elif event.kind in ("truth", "truth input"):
            advance(0, note=f"#{event.cell.index}: comparing with the truth")
        elif event.kind == "load":
            advance(0, note=f"{name}: {event.text[:60]}")

    return on_event


@dataclass
class MatrixPlan:
    """`--dry-run`: the cells on so many dumps, and the indices of those that share a loaded Actor."""

    dumps: int
    cells: tuple[MatrixCell, ...]
    loads: tuple[tuple[int, ...], ...]


def print_plan(plan: MatrixPlan) -> None:
    """Print it in words."""
    output.say(f"{output.plural(len(plan.cells), 'cell')} on {output.plural(plan.dumps, 'dump')}:")
    for cell in plan.cells:
        told = f"{cell.status} ({cell.reason})" if cell.reason else "to be run"
        output.say(f"  #{cell.index} {cell.name}: {told}")
    for number, cells in enumerate(plan.loads, 1):
        output.say(f"  load {number}: {', '.join(f'#{index}' for index in cells)}")
