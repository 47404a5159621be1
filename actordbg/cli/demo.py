"""`actordbg demo`: a real training on this machine, recorded, replayed and reported, step by step."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Literal

from actordbg.base.errors import UsageError
from actordbg.cli.options import option
from actordbg.cli.output import note, say_lines


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
