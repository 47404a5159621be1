"""`actordbg doctor`: will this machine and this OpenRLHF work?"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.cli.options import Json, store_of
from actordbg.cli.output import emit, note, say

if TYPE_CHECKING:
    from actordbg.doctor.check_result import Finding

WIDTH = 80
_NAME = 19

Python = Annotated[
    Path | None,
    typer.Option("--python", metavar="EXE", help="Examine this interpreter's environment (default: this one)."),
]
QuickChecks = Annotated[bool, typer.Option("--quick", help="Skip what takes seconds: imports and the launcher.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one module may take to import.")]


def render(finding: Finding) -> str:
    """One finding in at most 80 columns (a path longer than that stays whole), its remedy below it."""
    head = f"{finding.status.value:<4}  {_short(finding.name)}  "
    lines = _wrapped(finding.detail, head)
    if finding.remedy and finding.status.value != "ok":
        lines += "\n" + _wrapped(finding.remedy, " " * (len(head) - 3) + "-> ")
    return lines


def doctor(
    ctx: typer.Context,
    python: Python = None,
    quick: QuickChecks = False,
    timeout: Timeout = 180.0,
    as_json: Json = False,
) -> None:
    """Check whether this machine and this OpenRLHF will work.

    Looks at versions, imports, the deepspeed launcher, the C++ compiler, GPU, flash-attn, disk, store, catalog and patch, and
    names the remedy for each fault. A warning concerns a part that you may not need, or a version that nobody tested.
    Exit code 4 if a check fails.

    Example: actordbg doctor --python /opt/train/bin/python
    """
    from actordbg.doctor.checkup import examine, exit_code

    findings: list[Finding] = []
    executable = str(python) if python is not None else sys.executable
    for finding in examine(store_of(ctx), executable, quick=quick, timeout=timeout):
        findings.append(finding)
        if not as_json:
            say(render(finding))
    if as_json:
        emit(findings, lambda _: None, as_json)
    else:
        note(_verdict(findings))
    raise typer.Exit(exit_code(findings))


def _verdict(findings: list[Finding]) -> str:
    counts = {level: sum(one.status.value == level for one in findings) for level in ("ok", "warn", "bad")}
    return ", ".join(f"{count} {level}" for level, count in counts.items())


def _short(name: str) -> str:
    """`import openrlhf.cli.train_sft` as `cli.train_sft`: the line says "imported"."""
    return name.removeprefix("import openrlhf.").ljust(_NAME)


def _wrapped(text: str, head: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=head, subsequent_indent=" " * len(head),
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
