"""How the command line shows a parameter of a function: what its name, type, default and docstring do not say."""

from __future__ import annotations

from typing import Any


class Option:
    """Marks a parameter: `count: Annotated[int, Option("-n", min=1)] = 1`. `cli/from_signature.py` reads it.

    names: besides `--count`, or all of them if one begins with `--`. kind: the type that the command line reads, if the function
    takes others as well. heading, rank: its place in the help (`cli.HelpPlace`). facts: more, by the names of typer.Option.
    """

    def __init__(
        self, *names: str, kind: Any = None, heading: str = "", rank: int | None = None, **facts: Any
    ) -> None:  # fmt: skip
        self.names, self.kind, self.heading, self.rank, self.facts = names, kind, heading, rank, facts
