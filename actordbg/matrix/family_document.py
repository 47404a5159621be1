"""Families as a document: a table with a line for each, then what is not right, why, and the command that shows it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from actordbg.actor.family_models import FAMILIES
from actordbg.base.units import plural
from actordbg.config.replay_config import AXES
from actordbg.formats.matrix_record import PASSED, UNAVAILABLE, MatrixCell
from actordbg.matrix.family_causes import CAUSES, Cause, cause_of
from actordbg.matrix.family_matrix import FamilyFinding, FamilyResult
from actordbg.matrix.matrix_document import verdict_word
from actordbg.report.blocks import Block, Code, Grid, Heading, Items, Paragraph

RIGHT = "right"
_SAID = ("transformers", "torch", "openrlhf", "deepspeed", "actordbg")
_LEGEND = (
    "right: no law is broken, and log-probs, entropies, loss and gradients are as near the truth (each row alone, unpadded, "
    "eager attention, fp32) as rounding in the cell's dtype lets them be. The models are small and random: their code is what "
    "is tried, and no checkpoint."
)


def families_document(results: Sequence[FamilyResult]) -> list[Block]:
    """The whole document, top to bottom."""
    good = sum(one.good for one in results)
    versions = next((one.versions for one in results if one.versions), {})
    ran_on = ", ".join(f"{name} {versions[name]}" for name in _SAID if name in versions)
    families = "1 family" if len(results) == 1 else f"{len(results)} families"
    if 1 < len(results) < len(FAMILIES) and all(one.name in FAMILIES for one in results):
        families = f"{len(results)} of the {len(FAMILIES)} families that the command knows"
    open_to = " that could run" if any(cell.status == UNAVAILABLE for one in results for cell in one.cells) else ""
    counted = f"{families}: {good} right in every cell{open_to}, {len(results) - good} not. {ran_on}."
    return [
        Heading("Families", 1),
        Paragraph(counted),
        _table(results),
        Paragraph(_LEGEND),
        *_causes(results),
    ]


def _table(results: Sequence[FamilyResult]) -> Grid:
    packings = list(dict.fromkeys(_packing(cell) for one in results for cell in one.cells)) or [""]
    columns = ("family", "models", *(packing or "result" for packing in packings))
    rows = [(one.name, one.known_as, *(_words(one, packing) for packing in packings)) for one in results]
    return Grid(columns, tuple(rows), frozenset(columns))


def _packing(cell: MatrixCell) -> str:
    """The column of a cell."""
    value = cell.settings.get("packing")
    return "" if value is None else AXES["packing"].in_words(value)


def _words(one: FamilyResult, packing: str) -> str:
    """What became of the cells of one column: a word for all, or each word with its cells."""
    if one.problem:
        return "not built"
    cells = [cell for cell in one.cells if _packing(cell) == packing]
    said: dict[str, list[MatrixCell]] = {}
    for cell in cells:
        said.setdefault(_word(cell), []).append(cell)
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{word} ({_short(members, cells)})" for word, members in said.items() if word != RIGHT)


def _word(cell: MatrixCell) -> str:
    word = verdict_word(cell)
    return RIGHT if word == PASSED else word


def _short(members: Sequence[MatrixCell], of: Sequence[MatrixCell]) -> str:
    """The settings that these cells have and the others of the column have not, in words."""
    fixed = _fixed(members)
    told = [AXES[name].in_words(value, brief=True) for name, value in fixed.items() if name != "packing" and _varies(name, of)]
    return ", ".join(told) or plural(len(members), "cell")


def _fixed(cells: Sequence[MatrixCell]) -> dict[str, Any]:
    """The settings that all of these cells have in common, in the order of the table of settings."""
    first = cells[0].settings
    alike = (name for name in AXES if name in first and all(cell.settings.get(name) == first[name] for cell in cells))
    return {name: first[name] for name in alike}


def _varies(name: str, cells: Sequence[MatrixCell]) -> bool:
    return len({cell.settings.get(name) for cell in cells}) > 1


def _causes(results: Sequence[FamilyResult]) -> list[Block]:
    """Each cause once, with the families that it is seen in and a command that shows it."""
    found = [(cause_of(one, finding), one, finding) for one in results for finding in one.findings]
    blocks: list[Block] = []
    order = [*CAUSES, None]
    for cause, members in groupby(sorted(found, key=lambda item: order.index(item[0])), key=lambda item: item[0]):
        blocks += _cause(cause, [(one, finding) for _, one, finding in members])
    problems = [f"{one.name}: {one.problem}" for one in results if one.problem]
    return blocks + ([Heading("Not built", 2), Items(tuple(problems))] if problems else [])


def _cause(cause: Cause | None, members: Sequence[tuple[FamilyResult, FamilyFinding]]) -> list[Block]:
    title = cause.title if cause else "Not explained yet"
    lines = tuple(f"{one.name}: {finding.word}, {_where(one, finding)}: {finding.words}" for one, finding in members)
    command = _command(*members[0])
    return [
        Heading(title, 2),
        *([Paragraph(cause.meaning)] if cause else []),
        Items(lines),
        Paragraph("See it:"),
        Code(command),
    ]


def _cells(one: FamilyResult, finding: FamilyFinding) -> list[MatrixCell]:
    return [cell for cell in one.cells if cell.name in finding.cells]


def _where(one: FamilyResult, finding: FamilyFinding) -> str:
    """In which cells: "packed", or "packed, bf16"; "all cells"."""
    cells = _cells(one, finding)
    if len(cells) == len(one.cells):
        return "every cell"
    fixed = [AXES[name].in_words(value, brief=True) for name, value in _fixed(cells).items() if _varies(name, one.cells)]
    return ", ".join(fixed) or ", ".join(f"[{name}]" for name in finding.cells)


def _command(one: FamilyResult, finding: FamilyFinding) -> str:
    """The first cell of a finding alone, as a command line."""
    settings = _fixed(_cells(one, finding)[:1])
    options = [f"{AXES[name].flag} {AXES[name].typed(value)}" for name, value in settings.items() if value is not None]
    return " ".join(["actordbg families", shlex.quote(one.typed), *options])
