"""`actordbg dump columns`: what `--where` can ask for."""

from __future__ import annotations

from dataclasses import dataclass

from actordbg.cli import output
from actordbg.cli.options import Json


@dataclass(frozen=True)
class ColumnAnswer:
    """A column of `--where`: its kind ("number", "text", "time", "yes/no"), its heading in `dump ls`, and what it means."""

    name: str
    kind: str
    heading: str | None
    meaning: str


def columns(as_json: Json = False) -> None:
    """List the columns, functions and operators of --where.

    Only like kinds compare. What is no SQL but plain (4k, 10MB, last 2h, 'yesterday', &&) is understood too.

    Example: actordbg dump columns
    """
    from actordbg.catalog.columns import COLUMNS, HEADINGS

    headings = {name: heading for heading, name in HEADINGS.items()}
    answer = [ColumnAnswer(one.name, one.kind, headings.get(one.name), one.doc) for one in COLUMNS.values()]
    output.emit(answer, _render, as_json)


def _render(answer: list[ColumnAnswer]) -> None:
    from actordbg.catalog.columns import FUNCTIONS, OPERATORS

    output.table(("column", "kind", "meaning"), [(one.name, one.kind, one.meaning) for one in answer], tight=True)
    output.say()
    output.say(f"operators: {OPERATORS}")
    for form in FUNCTIONS.values():
        output.say(form)
