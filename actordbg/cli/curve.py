"""`actordbg curve memory|time`: memory or time by length under each configuration, and the longest length that fits a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import typer

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_seconds, parse_size
from actordbg.cli.options import ConfirmOption, Where, option, option_field, stored
from actordbg.cli.setting_options import NONE, Given, takes_settings


@dataclass(frozen=True)
class Question:
    """The options of both commands."""

    rank: ClassVar[int] = 2

    replays: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REPLAY",
            help="Replays by id, name, @1, last or all (default: all).",
            autocompletion=stored("replay"),
        ),
    ] = None
    where: Where = None
    at: list[int] | None = option_field(
        None, "Estimate this length, and whether it fits; repeatable.", metavar="LEN", min=1, max=2**53
    )
    by: Literal["seq_len", "tokens"] = option_field("seq_len", "Length unit: seq_len (one curve per batch size) or real tokens.")
    measure: str | None = option_field(
        None,
        "First replay synthetic inputs of these lengths under each REPLAY's configuration, changed by the given options.",
        metavar="LEN,LEN,...",
    )
    batch_size: int | None = option_field(None, "Rows of the --measure inputs (default: as in REPLAY).", min=1)
    yes: ConfirmOption = False


@takes_settings("curve")
def memory(
    ctx: typer.Context,
    budget: str | None = option(None, "Find the longest length that fits this memory, e.g. 80GB, 75GiB.", metavar="SIZE", rank=1),
    question: Question = Question(),
    settings: Given = NONE,
) -> object:
    """Show peak memory by length, and the longest that fits.

    Prints one curve per replayed configuration; --budget finds the longest length that fits. Marks lengths as measured or
    extrapolated. A length that ran out of memory never counts as fitting.

    Exit code: 1 if nothing was measured, if an --at length is not sure to fit --budget under every configuration shown, or if
    the result would be more than four times the longest measured length.

    Example: actordbg curve memory --budget 80GB --at 16384 --at 32768
    """
    if budget is not None and budget.strip().replace(".", "", 1).isdecimal():
        raise UsageError(f"--budget {budget} has no unit", hint=f"write --budget {budget}GB, or {budget}B if bytes are meant")
    most = None if budget is None else float(parse_size("--budget", budget))
    if most == 0:
        raise UsageError(f"--budget {budget} is zero", hint="for example 500MB, 10GB or 5GiB")
    return _curves(ctx, question, settings, "memory", most)


@takes_settings("curve")
def time(
    ctx: typer.Context,
    budget: str | None = option(None, "Find the longest length that fits this time, e.g. 2s, 500ms.", metavar="TIME", rank=1),
    of: Literal["both", "forward", "backward"] = option("both", "Which time to model and to compare with --budget.", rank=2),
    question: Question = Question(),
    settings: Given = NONE,
) -> object:
    """Show time by length, and the longest that fits.

    Prints one curve of forward and backward per replayed configuration; --budget finds the longest length that fits. Leaves out
    warm-up and compiling inputs. Marks lengths as measured or extrapolated.

    Exit code: 1 if nothing was measured, if an --at length is not sure to fit --budget under every configuration shown, or if
    the result would be more than four times the longest measured length.

    Example: actordbg curve time last --budget 2s --by tokens
    """
    most = None if budget is None else parse_seconds("--budget", budget)
    return _curves(ctx, question, settings, "time", most, of)


def _curves(
    ctx: typer.Context, question: Question, settings: Given, quantity: str, budget: float | None, passes: str = "both"
) -> object:
    """Return the curves of memory (`budget` in bytes) or of time (`budget` in seconds, over the `passes`)."""
    from actordbg.cli.terminal import opened

    store = opened(ctx, yes=question.yes)
    about: dict[str, Any] = {name: getattr(question, name) for name in ("where", "by", "measure", "batch_size")}
    names, lengths = question.replays or (), question.at or ()
    return store.curve(quantity, *names, budget=budget, of=passes, at=lengths, **about, **settings)
