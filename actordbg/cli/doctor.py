"""`actordbg doctor`: checks whether this machine and this trainer will work."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actordbg.cli.options import Json, option, store_of
from actordbg.cli.output import emit, progress, say, say_lines

if TYPE_CHECKING:
    from actordbg.doctor.check import Check


WIDTH = 80
_NAME = 19


def render(check: Check) -> str:
    """One check in at most 80 columns (a path longer than that stays whole), its remedy below it."""
    from actordbg.trainers.trainer import TRAINER

    name = check.name.removeprefix(f"import {TRAINER.package}.")  # the line says "imported"
    head = f"{check.status.value:<4}  {name.ljust(_NAME)}  "
    lines = _wrapped(check.detail, head)
    if check.remedy and check.status.value != "ok":
        lines += "\n" + _wrapped(check.remedy, " " * (len(head) - 3) + "-> ")
    return lines


def doctor(
    ctx: typer.Context,
    python: Path | None = option(None, "Examine this interpreter's environment (default: this one).", metavar="EXE"),
    quick: bool = option(False, "Skip what takes seconds: imports and the launcher.", "--quick"),
    timeout: float = option(180.0, "Seconds that one module may take to import.", min=1),
    as_json: Json = False,
) -> None:
    """Check whether this machine and the trainer will work.

    Looks at versions, imports, the deepspeed launcher, the C++ compiler, GPU, flash-attn, disk, store, catalog and patch, and
    names the remedy for each fault. A warning concerns a part that you may not need, or a version that nobody tested.
    Exit code 4 if a check fails.

    Example: actordbg doctor --python /opt/train/bin/python
    """
    from actordbg.doctor.checkup import examine, exit_code

    checks: list[Check] = []
    executable = str(python) if python is not None else sys.executable
    with progress("examining", None, quiet=as_json or not sys.stderr.isatty()) as advance:
        for check in examine(store_of(ctx), executable, quick=quick, timeout=timeout):
            checks.append(check)
            advance(1, note=check.name)
    emit(checks, _render_all, as_json)
    raise typer.Exit(exit_code(checks))


def _render_all(checks: list[Check]) -> None:
    """How many are bad, then these, the warnings, one command for all that is missing, and last what is all right."""
    from actordbg.doctor.missing import install_command, missing_packages

    levels = ("bad", "warn", "ok")
    say(", ".join(f"{sum(one.status.value == level for one in checks)} {level}" for level in levels))
    missing, others = missing_packages(checks)
    for level in levels:
        for group in missing:
            if group.level == level:
                say_lines(_wrapped(f"not installed: {', '.join(group.names)}; {group.why}", f"{level:<4}  "))
        for check in others:
            if check.status.value == level:
                say_lines(render(check))
        if level == "warn" and missing:
            say_lines(f"to install what is missing:\n  {install_command(missing)}")


def _wrapped(text: str, head: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
