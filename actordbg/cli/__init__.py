"""The command line: each command's options, text output, JSON and exit code.

Begin with `app`, the table of contents; then read any command (`replay`, `dump_ls`), whose module is imported when it is called.
`options` declares shared options, `output` prints everything (the result on standard output, notes on standard error), and
`terminal` opens the store as `actordbg.api` has it: a command that replays or judges parses options, calls a method, and returns
its answer, which `options.takes_outputs` prints. A command's imports are inside its function, so that `--help` is quick.
"""

from typing import NamedTuple

HELP_ALL, OUTPUT = "help_all", "Output"
"""The parameter of --help-all, and the heading of the output options."""


class HelpPlace(NamedTuple):
    """Where help shows an option (typer's `rich_help_panel`): `--help` the fifteen of lowest rank, `--help-all` by heading."""

    heading: str = ""
    rank: int = 14
