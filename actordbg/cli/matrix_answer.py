"""How `actordbg matrix` answers: text with coloured words in a terminal, Markdown, JSON; and its progress while it runs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from actordbg.actor.signatures import explain
from actordbg.cli import output
from actordbg.cli.options import Format
from actordbg.cli.page_file import write_page
from actordbg.formats.matrix_record import PASSED, MatrixCell, MatrixRecord
from actordbg.matrix.matrix_document import MatrixContext, matrix_document
from actordbg.matrix.run_matrix import MatrixEvent
from actordbg.replay.live_catalog import LiveCatalog
from actordbg.report.blocks import as_data
from actordbg.report.renderings import as_markdown, as_text

_COLOURS = {
    "passed": "green", "WRONG": "red", "failed": "red", "REGRESSED": "red", "unavailable": "yellow", "not run": "yellow",
    "NOT JUDGED": "yellow",
}  # fmt: skip
_WORD = re.compile(r"\b(" + "|".join(_COLOURS) + r")\b")


@dataclass
class MatrixAnswer:
    """A matrix and what it ran on; `good`: whether every cell that ran is good (see the exit code)."""

    matrix: MatrixRecord
    good: bool
    context: MatrixContext


def print_answer(answer: MatrixAnswer, how: Format, html: Path | None = None) -> None:
    """Print it in one of the formats, and write its page where one was asked for."""
    blocks = matrix_document(answer.matrix, answer.context, explain)
    write_page(html, blocks)
    if how == "text":
        brief = matrix_document(answer.matrix, answer.context, explain, explained=False)
        return output.say_lines(as_text(brief), _coloured)
    if how == "json":
        return output.emit(vars(answer) | as_data(blocks), lambda _: None, True)
    return output.say_lines(as_markdown(blocks))


def _coloured(text: str) -> str:
    """The words of the table in colour, in a terminal; the words say it without."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(_coloured_line(line) if line.startswith("  ") else line for line in text.split("\n"))


def _coloured_line(line: str) -> str:
    return _WORD.sub(lambda found: typer.style(found[0], fg=_COLOURS[found[0]]), line)


def steps_of(record: MatrixRecord) -> int:
    """Steps of a matrix's bar: the inputs of each cell that must still run, and its comparison with the truth."""
    return (len(record.dump_ids) + bool(record.options.get("oracle"))) * sum(cell.open for cell in record.cells)


def follow(catalog: LiveCatalog, advance: Callable[..., None], record: MatrixRecord) -> Callable[[MatrixEvent], None]:
    """What to do with a running matrix's news: catalog it, move the bar on, and say which cell it is and what it does."""
    inputs, truth = len(record.dump_ids), bool(record.options.get("oracle"))
    done: Counter[int] = Counter()

    def on_event(event: MatrixEvent) -> None:
        catalog.touch()
        cell = event.cell
        name = f"#{cell.index} {cell.name}"
        if event.kind == "input":
            done[cell.index] += 1
            advance(1, note=name if event.text == "passed" else f"{name}: {event.text}")
        elif event.kind == "done":  # what did not run and what is not compared is passed over
            advance(inputs - done[cell.index] + (truth and cell.status != PASSED), note=f"{name}: {cell.status}")
        elif event.kind == "judged":
            advance(1, note=f"{name}: {cell.verdict}")
        elif event.kind in ("truth", "truth input"):
            advance(0, note=f"#{cell.index}: comparing with the truth")
        else:
            advance(0, note=f"{name}: {event.text[:80]}" if event.text else name)

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
        output.say_wrapped(f"  #{cell.index} {cell.name}: {told}", "      ")
    for number, cells in enumerate(plan.loads, 1):
        output.say(f"  load {number}: {', '.join(f'#{index}' for index in cells)}")
