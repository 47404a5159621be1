"""`actordbg curve memory|time`: what a length needs under each configuration, and the longest length that fits a budget."""

from __future__ import annotations

from typing import Literal

import typer

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_seconds, parse_size
from actordbg.cli.curve_options import Question
from actordbg.cli.options import option, takes
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes("asked", Question)
@takes_settings("curve")
def memory(
    ctx: typer.Context,
    budget: str | None = option(None, "The longest length that fits, e.g. 80GB, 75GiB.", metavar="SIZE"),
    asked: Question = Question(),
    settings: Given = NONE,
) -> None:
    """Show peak memory by length, and the longest that fits.

    One curve for each configuration that was replayed; --budget asks for the longest length that fits.
    Measured lengths are told from extrapolated ones; a length that ran out of memory is never said to fit.
    Exit code 1 if nothing was measured, if an --at length is not sure to fit --budget under every configuration shown, or if
    the answer would be more than four times the longest measured length.

    Example: actordbg curve memory --budget 80GB --at 16384 --at 32768
    """
    from actordbg.cli.curve_work import answer_question

    if budget is not None and budget.strip().replace(".", "", 1).isdecimal():
        raise UsageError(f"--budget {budget} has no unit", hint=f"write --budget {budget}GB, or {budget}B if bytes are meant")
    most = None if budget is None else float(parse_size("--budget", budget))
    if most == 0:
        raise UsageError(f"--budget {budget} holds nothing", hint="write it like 500MB, 10GB or 5GiB")
    answer_question(ctx, asked, settings, "memory", most)


@takes("asked", Question)
@takes_settings("curve")
def time(
    ctx: typer.Context,
    budget: str | None = option(None, "The longest length that fits, e.g. 2s, 500ms.", metavar="TIME"),
    of: Literal["both", "forward", "backward"] = option("both", "Which time the curve and the budget are about."),
    asked: Question = Question(),
    settings: Given = NONE,
) -> None:
    """Show time by length, and the longest that fits.

    One curve of forward and backward for each configuration that was replayed; --budget asks for the longest that fits.
    Warm-up and compiling inputs are left out. Measured lengths are told from extrapolated ones.
    Exit code 1 if nothing was measured, if an --at length is not sure to fit --budget under every configuration shown, or if
    the answer would be more than four times the longest measured length.

    Example: actordbg curve time last --budget 2s --by tokens
    """
    from actordbg.cli.curve_work import answer_question

    most = None if budget is None else parse_seconds("--budget", budget)
    answer_question(ctx, asked, settings, "time", most, of)
