"""Options that may be given with a value or without one: `--truth fp64`, and `--truth` alone for its usual value.

Typer has no such options. A command that is registered with `cls=optional_values(resume="last")` reads `--resume` as
`--resume=last` where no value follows: at the end of the line, or before another option. `--resume=ID` and `--resume ID`
stay as they are. The settings of a command bring their own (`bare_values`).

Example:
    app.command("replay", cls=optional_values(resume="last"))(replay)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand


def optional_values(**usual: str) -> type[TyperCommand]:
    """A command class in which these options (by parameter name) may be given without a value, and then have this one."""
    by_option = {"--" + name.replace("_", "-"): value for name, value in usual.items()}

    class WithOptionalValues(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            usual = by_option | {f"--{name}": value for name, value in getattr(self.callback, "bare_values", {}).items()}
            return super().parse_args(ctx, filled_in(args, usual))

    return WithOptionalValues


def filled_in(arguments: Sequence[str], usual: Mapping[str, str]) -> list[str]:
    """`arguments` with the usual value behind every option of `usual` that has none. What follows `--` is left alone."""
    filled: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return filled + list(arguments[index:])
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        bare = argument in usual and following.startswith("-")
        filled.append(f"{argument}={usual[argument]}" if bare else argument)
    return filled
