"""`actordbg adapters`: which other trainers can be recorded, and whether what is installed here is what their adapters expect."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, option

if TYPE_CHECKING:
    from actordbg.trainers.fitting import Fit


def adapters(
    ctx: typer.Context,
    named: list[str] | None = typer.Argument(None, metavar="[ADAPTER]...", help="Only these: names, or module:Class."),
    template: bool = option(False, "Print the beginning of an adapter of your own.", "--template"),
    as_json: Json = False,
) -> None:
    """List adapters for other trainers, and whether they fit here.

    The trainer that actordbg is made for needs none. An adapter fits if its trainer is installed, and the functions that it looks
    for are there and take the arguments that it reads; the trainer is not imported for that. Use one with `run --adapter NAME`.
    Exit code 1 if one that was asked for by name does not fit.

    Example: actordbg adapters my_adapter:MyTrainer
    """
    from actordbg.trainers import adapter_template
    from actordbg.trainers.fitting import fit_of, fits

    if template:
        for line in inspect.getsource(adapter_template).splitlines():
            output.say(line)
        return
    found = [fit_of(one) for one in named] if named else fits()
    output.emit(found, _render, as_json)
    if named and not all(one.fits for one in found):
        raise typer.Exit(1)


def _render(found: list[Fit]) -> None:
    output.table(
        ["adapter", "package", "installed", "tried", "fits"],
        [[one.name, one.package, one.version or "-", ", ".join(one.tried) or "-", one.answer] for one in found],
    )
    for one in found:
        for why in one.differs:
            output.note(f"{one.name}: {why}")
