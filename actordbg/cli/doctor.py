"""`actordbg doctor`: checks whether this machine and this trainer will work."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from actordbg.cli.options import Json, store_of
from actordbg.cli.output import emit, note, say_lines
from actordbg.doctor.check import Check
from actordbg.doctor.checkup import examine, exit_code
from actordbg.host.trainer import TRAINER

WIDTH = 80
_NAME = 19


def render(check: Check) -> str:
    """One check in at most 80 columns (a path longer than that stays whole), its remedy below it."""
    name = check.name.removeprefix(f"import {TRAINER.package}.")  # the line says "imported"
    head = f"{check.status.value:<4}  {name.ljust(_NAME)}  "
    lines = _wrapped(check.detail, head)
    if check.remedy and check.status.value != "ok":
        lines += "\n" + _wrapped(check.remedy, " " * (len(head) - 3) + "-> ")
    return lines


def doctor(
    ctx: typer.Context,
    python: Annotated[
        Path | None, typer.Option("--python", metavar="EXE", help="Examine this interpreter's environment (default: this one).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip what takes seconds: imports and the launcher.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one module may take to import.")] = 180.0,
    as_json: Json = False,
) -> None:
    """Check whether this machine and the trainer will work.

    Looks at versions, imports, the deepspeed launcher, the C++ compiler, GPU, flash-attn, disk, store, catalog and patch, and
    names the remedy for each fault. A warning concerns a part that you may not need, or a version that nobody tested.
    Exit code 4 if a check fails.

    Example: actordbg doctor --python /opt/train/bin/python
    """
    checks: list[Check] = []
    executable = str(python) if python is not None else sys.executable
    for check in examine(store_of(ctx), executable, quick=quick, timeout=timeout):
        checks.append(check)
        if not as_json:
            say_lines(render(check))
    if as_json:
        emit(checks, lambda _: None, as_json)
    else:
        counts = {level: sum(one.status.value == level for one in checks) for level in ("ok", "warn", "bad")}
        note(", ".join(f"{count} {level}" for level, count in counts.items()))
    raise typer.Exit(exit_code(checks))


def _wrapped(text: str, head: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
