"""The command line: each command's options, text output, JSON and exit code.

Begin with `app`, the table of contents; then read any command (`replay`, `dump_ls`), whose module is imported when it is called.
`from_signature` makes options out of its signature, and their help out of its docstring; `options` has those that commands share.
`output` prints everything (the result on standard output, notes on standard error), and `terminal` opens the store as
`actordbg.api` has it. A command that needs no more than a method of the store is that method (`api.plain_commands`): what it
returns is printed by `options.takes_outputs`. A command's imports are inside its function, so that `--help` is quick.
"""

from typing import Any, NamedTuple

HELP_ALL, OUTPUT = "help_all", "Output"
"""The parameter of --help-all, and the heading of the output options."""


class HelpPlace(NamedTuple):
    """Where help shows an option (typer's `rich_help_panel`): `--help` the fifteen of lowest rank, `--help-all` by heading."""

    heading: str = ""
    rank: int = 14


def place_of(option: Any) -> HelpPlace:
    """Return where help shows this option of a built command."""
    return getattr(option, "rich_help_panel", None) or HelpPlace()
