"""A matrix at one look: the verdict in a sentence, and the cells as a heat map with reasons and commands. Pure.

The last axes are the columns, as many as stay readable; the others are the rows. A colour only repeats the word in the cell.
Cells are buttons in a table rather than marks in a drawing, so that a keyboard reaches them and a screen reader names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from actordbg.base.foreign_text import in_shell
from actordbg.base.units import plural
from actordbg.config.as_ran import complete, repeat_options
from actordbg.config.replay_config import AXES, SETTINGS, TINY
from actordbg.document.blocks import BAD_TONE, GOOD_TONE, NO_TONE, PART_TONE, Banner, Cell, Cells, number, seconds
from actordbg.document.specifications import BAD, GOOD, PART, QUIET, coloured, hints, layer, layered, names
from actordbg.records.matrix_record import FAILED, PASSED, MatrixCell, MatrixRecord

MOST_COLUMNS = 6
"""Columns of a heat map that a phone can still scroll through."""
Word = Callable[[MatrixCell], str]
_COLOURS = {GOOD_TONE: GOOD, PART_TONE: PART, BAD_TONE: BAD, NO_TONE: QUIET}


def matrix_banner(record: MatrixRecord, counted: str) -> Banner:
    """Say the verdict over all cells. counted: how many cells came out how, in words."""
    ran = [cell for cell in record.cells if cell.status in (PASSED, FAILED)]
    judged = [cell for cell in ran if cell.verdict is not None and not cell.unjudged]
    toy = all(str(cell.config.get("model", TINY)) == TINY for cell in record.cells)
    left = ["your model: this ran the embedded toy model `tiny`"] if toy else []
    if unjudged := len(ran) - len(judged):
        left.append(f"the numbers of {plural(unjudged, 'cell')}, which nothing was compared with")
    if others := len(record.cells) - len(ran):
        left.append(f"{plural(others, 'cell')} that did not run")
    figures = [("cells that are right", f"{sum(cell.good for cell in judged)} / {len(record.cells)}")]
    if good := [cell for cell in ran if cell.good and cell.forward_s]:
        fastest = min(good, key=lambda cell: cell.forward_s or 0)
        figures.append((f"fastest forward{' (toy model)' * toy}: {fastest.name}", f"{seconds(fastest.forward_s)} s"))
    word, tone = _verdict(record, ran, not unjudged)
    wrong, failed = [cell for cell in ran if cell.wrong], [cell for cell in ran if cell.status == FAILED]
    first = f" {'WRONG' if wrong else 'Failed'}: {(wrong or failed)[0].name}." if wrong or failed else ""
    return Banner(word, f"{counted}.{first}", tone, tuple(figures), tuple(left))


def _verdict(record: MatrixRecord, ran: Sequence[MatrixCell], all_judged: bool) -> tuple[str, str]:
    if not ran:
        return "NOTHING RAN", NO_TONE
    if any(cell.wrong for cell in ran):
        return "WRONG", BAD_TONE
    if any(cell.status == FAILED for cell in ran):
        return "FAILED", BAD_TONE
    if any(cell.regressed for cell in record.cells):
        return "REGRESSED", BAD_TONE
    if any(cell.open or record.waits(cell) for cell in record.cells):
        return "NOT COMPLETE", PART_TONE
    return ("RIGHT", GOOD_TONE) if all_judged else ("NOT JUDGED", PART_TONE)


def heat_map(record: MatrixRecord, word: Word) -> Cells | None:
    """Lay out the cells by their settings; None where nothing varies."""
    down = [name for name in AXES if len(record.axes.get(name, ())) > 1]
    if not down:
        return None
    across: list[str] = []
    while down and (not across or len(_values(record, [down[-1], *across])) <= MOST_COLUMNS):
        across.insert(0, down.pop())
    by_settings = {tuple(str(cell.settings.get(name)) for name in (*down, *across)): cell for cell in record.cells}
    rows, columns = _values(record, down), _values(record, across)
    found = [[by_settings.get((*map(str, row), *map(str, column))) for column in columns] for row in rows]
    cells = tuple(tuple(None if cell is None else _cell(cell, record, word(cell)) for cell in line) for line in found)
    heads = tuple(_named(down, row) or "all" for row in rows), tuple(_named(across, column) for column in columns)
    says = "Each field is a replay under those settings: its word, and how far it is from the truth. Point at one for the reason;"
    marks = [
        {"row": row, "column": column, "verdict": cell.text, "tone": cell.tone, "figure": cell.figure, "why": cell.why}
        for row, line in zip(heads[0], cells, strict=True)
        for column, cell in zip(heads[1], line, strict=True)
        if cell is not None
    ]
    shown = hints(("verdict", "verdict"), ("figure", "figures"), ("why", "why"))
    field = layer("rect", tooltip=shown, color=coloured("tone", None, _COLOURS))
    drawn = layered(marks, field, height=44 * len(rows), x=names("column", None), y=names("row", None))
    return Cells("The cells", f"{says} a click copies the command that repeats it.", *heads, cells, drawn)


def _values(record: MatrixRecord, axes: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(product(*(record.axes[name] for name in axes)))


def _named(axes: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(SETTINGS[name].in_words(value) or f"{name} {value}" for name, value in zip(axes, values, strict=True))


def _cell(cell: MatrixCell, record: MatrixRecord, told: str) -> Cell:
    off_by = [f"off by {number(cell.max_abs, 2)}"] if cell.max_abs is not None else []
    forward = [f"{seconds(cell.forward_s)} s"] if cell.forward_s is not None else []
    why = [*cell.violations[:2], *filter(None, (cell.reason, cell.error)), *cell.regressed]
    said = f"cell {cell.index}, {cell.name}: {told}" + (f". {'; '.join(why)[:400]}" if why else "")
    tone = GOOD_TONE if told == PASSED and cell.verdict is not None else PART_TONE
    if cell.wrong or cell.status == FAILED or cell.regressed:
        tone = BAD_TONE
    elif cell.status != PASSED or cell.unjudged:
        tone = NO_TONE
    where = ["--where", record.selection] if record.selection else []
    words = ["actordbg", "replay", *where, "--max-inputs", str(len(record.dump_ids)), *repeat_options(complete(cell.config))]
    return Cell(told, ", ".join(off_by + forward), tone, said, " ".join(map(in_shell, words)))
