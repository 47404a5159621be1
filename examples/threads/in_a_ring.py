"""What two demonstrations share: OpenRLHF's own Actor in a ring of two processes, whose workers import the fault as a plugin."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

COMMAND = ("check", "--backend", "fsdp2", "--nproc", "2", "--ring", "2", "--packing", "--backward", "--no-laws")


def trainers_module(name: str) -> ModuleType:
    """A module of OpenRLHF, as a worker imports it."""
    import importlib

    from actordbg.trainers.trainer import TRAINER

    TRAINER.prepare_process()
    return importlib.import_module(name)


def answer(folder: Path, plugin: str) -> tuple[Any, ...]:
    """The check with the plugin, and without it."""
    from run import actordbg, in_words

    made = ("dump", "create", "--batch-size", "3", "--seq-len", "24", "--count", "1", "--quiet")
    actordbg(folder, *made)
    planted = actordbg(folder, *COMMAND, "--dist-plugin", plugin)
    return in_words((*COMMAND, "--dist-plugin", plugin)), planted, actordbg(folder, *COMMAND), "WRONG"
