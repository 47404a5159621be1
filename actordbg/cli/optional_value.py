"""Options that may be given with a value or without one: `--oracle fp64`, and `--oracle` alone for its usual value.

Typer has no such options. A command that is registered with `cls=optional_values(oracle="fp32")` reads `--oracle` as
`--oracle=fp32` where no value follows: at the end of the line, or before another option. `--oracle=fp64` and `--oracle fp64`
stay as they are.

Example:
    app.command("replay", cls=optional_values(oracle="fp32", resume="last"))(replay)
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
            return super().parse_args(ctx, filled_in(args, by_option))

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
