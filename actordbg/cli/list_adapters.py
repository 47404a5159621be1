"""`actordbg adapters`: which other trainers can be recorded, and whether what is installed here is what their adapters expect."""

from __future__ import annotations

import typer

from actordbg.adapters.fitting import Fit, fits
from actordbg.cli import output
from actordbg.cli.options import Json


def adapters(ctx: typer.Context, as_json: Json = False) -> None:
    """List adapters for other trainers, and whether they fit here.

    The trainer that actordbg is made for needs none. An adapter fits if its trainer is installed, and the functions that it looks
    for are there and take the arguments that it reads; the trainer is not imported for that. Use one with `run --adapter NAME`.

    Example: actordbg adapters --json
    """
    output.emit(fits(), _render, as_json)


def _render(found: list[Fit]) -> None:
    output.table(
        ["adapter", "package", "installed", "tried", "fits"],
        [[one.name, one.package, one.version or "-", ", ".join(one.tried) or "-", _answer(one)] for one in found],
    )
    for one in found:
        for why in one.differs:
            output.note(f"{one.name}: {why}")


def _answer(one: Fit) -> str:
    if one.differs:
        return "no"
    return "not installed" if one.version is None else "yes"
