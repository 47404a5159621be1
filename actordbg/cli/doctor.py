"""`actordbg doctor`: checks whether this machine and this trainer will work."""

from __future__ import annotations

import inspect
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import Json, option, require_good, store_of
from actordbg.cli.output import emit, note, progress, say, say_lines, table

if TYPE_CHECKING:
    from actordbg.doctor.python_environment import Check
    from actordbg.trainers.fitting import Fit


_NAME = 19


def render(check: Check) -> str:
    """One check in at most 80 columns (a path longer than that stays whole), its remedy below it."""
    from actordbg.document.renderings import wrap
    from actordbg.trainers.trainer import TRAINER

    name = check.name.removeprefix(f"import {TRAINER.package}.")  # the line says "imported"
    head = f"{check.status:<4}  {name.ljust(_NAME)}  "
    blank = " " * len(head)
    lines = wrap(" ".join(check.detail.split()), head, blank)
    if check.remedy and check.status != "ok":
        lines += "\n" + wrap(" ".join(check.remedy.split()), f"{blank[3:]}-> ", blank)
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
    from actordbg.doctor.checkup import install_command, missing_packages
    from actordbg.document.renderings import wrap

    levels = ("bad", "warn", "ok")
    say(", ".join(f"{sum(check.status == level for check in checks)} {level}" for level in levels))
    missing, others = missing_packages(checks)
    for level in levels:
        for (missed_as, why), packages in missing.items():
            if missed_as == level:
                say_lines(wrap(f"not installed: {', '.join(packages)}; {why}", f"{level:<4}  ", " " * 6))
        for check in others:
            if check.status == level:
                say_lines(render(check))
        if level == "warn" and missing:
            say_lines(f"to install what is missing:\n  {install_command(missing)}")


def adapters(
    ctx: typer.Context,
    named: list[str] | None = typer.Argument(None, metavar="[ADAPTER]...", help="Only these: names, or module:Class."),
    template: bool = option(False, "Print the beginning of an adapter of your own.", "--template"),
    as_json: Json = False,
) -> None:
    """List adapters for other trainers, and whether they fit here.

    The trainer that actordbg is made for needs none. An adapter fits if its trainer is installed, and the functions that it looks
    for are there and take the arguments that it reads; the trainer is not imported for that. Use one with `run --adapter NAME`.
    Exit code 1 if one that was asked for by name does not fit.

    Example: actordbg adapters my_adapter:MyTrainer
    """
    from actordbg.trainers import adapter_template
    from actordbg.trainers.fitting import fit_of, fits

    if template:
        for line in inspect.getsource(adapter_template).splitlines():
            say(line)
        return
    known = [fit_of(name) for name in named] if named else fits()
    emit(known, _render, as_json)
    require_good(not named or all(fit.fits for fit in known))


def _render(known: list[Fit]) -> None:
    table(
        ["adapter", "package", "installed", "tried", "fits"],
        [[fit.name, fit.package, fit.version or "-", ", ".join(fit.tried) or "-", fit.answer] for fit in known],
    )
    for fit in known:
        for why in fit.differs:
            note(f"{fit.name}: {why}")


def demo(
    trainer: Literal["ppo", "sft"] = option(
        "ppo", "ppo: train_ppo_ray under Ray. sft: train_sft under deepspeed, in half the time."
    ),
    keep: Path | None = option(None, "Work in DIR (new or empty) and keep it; otherwise all is removed.", metavar="DIR"),
) -> None:
    """Record and replay a real training of a tiny model.

    Patches a private copy of the installed trainer, trains, switches dumping on while it trains, indexes, replays twice,
    reports and unpatches. Each step prints the command that you would type. Takes two to four minutes on two cores, without a
    GPU.

    Example: actordbg demo --trainer sft --keep /tmp/demo
    """
    from actordbg.base.foreign_text import in_shell
    from actordbg.demo.demo_steps import Demo

    signal.signal(signal.SIGTERM, _interrupt)
    directory = _directory(keep)
    try:
        Demo(trainer, directory, say_lines).run()
    finally:
        if keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    if keep is not None:
        note(f"kept: {directory}  (next: actordbg --store {in_shell(str(directory / 'store'))} dump ls)")


def _directory(keep: Path | None) -> Path:
    import tempfile

    if keep is None:
        return Path(tempfile.mkdtemp(prefix="actordbg-demo-"))
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"{keep} is not empty", hint="name a new folder: the demo writes only where nothing is")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Being asked to end is an interruption: the training's processes and the files go first."""
    raise KeyboardInterrupt
