"""`actordbg families`: check which model families are right with this trainer and these libraries, on small random models."""

from __future__ import annotations

from pathlib import Path

import typer

from actordbg.cli.options import option
from actordbg.cli.output import say_answer
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("families")
def families(
    ctx: typer.Context,
    names: list[str] | None = typer.Argument(
        None, metavar="NAME|DIR", help="Families, or folders with a config.json (default: all known families)."
    ),
    settings: Given = NONE,
    keep: Path | None = option(
        None, "Work in DIR and keep it, continuing an earlier run there (default: a temporary folder).", metavar="DIR"
    ),
    list_: bool = option(False, "List the known families and run nothing."),
) -> None:
    """Test a small model of each family against laws and truth.

    Builds a small random model of each family, without network access, and runs a matrix on small synthetic inputs: fp32 and
    bf16, sdpa and eager, packed and not. Checks the laws in every cell and compares it with the truth. A folder's config.json
    gives a small model of that configuration, with your own windows, scalings and flags; its weights are not read.

    With --keep, an interrupted run continues, and a list can be run in parts: results in DIR with the same options and versions
    are reused.

    Takes seconds per family.

    Exit code: 1 if a family is wrong or fails.

    Example: actordbg families qwen3_5 mixtral --packing on
    """
    from actordbg.api.family_checks import known_families
    from actordbg.cli.terminal import conclude, opened

    if list_:
        return say_answer(known_families())
    store = opened(ctx)
    return conclude(store, store.families(*(names or ()), keep=keep, **settings))
