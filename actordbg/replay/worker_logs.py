"""What workers and launchers print, read as evidence. Workers answer SIGUSR1, and SIGTERM, with the stacks of their threads."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from actordbg.formats.journal import rank_log
from actordbg.replay.processes import ALIVE, describe_status, state_of
from actordbg.replay.stacks import is_complete

LAUNCHER_LOG = "launcher.log"
_LAUNCHERS_WORD = re.compile(r"exits with return code = (-?\d+)|failed \(exitcode: (-?\d+)\) local_rank: ")
STACKS_S = 2.0
"""How long to wait for the stacks."""


def size_of(path: Path) -> int:
    """Bytes of a log; 0 for one that is not there yet."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_of(path: Path, start: int = 0, limit: int = 65536) -> str:
    """The text of a log from byte `start` to its end, at most the last `limit` bytes of it; "" where there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - limit))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def last_words(launcher: Path, folder: Path, ranks: tuple[int, ...], each: int = 1500) -> str:
    """The ends of the launcher's log and of the workers', under their names."""
    paths = [launcher, *(rank_log(folder, rank) for rank in ranks)]
    texts = ((path.name, tail_of(path)[-each:].strip()) for path in paths)
    return "\n".join(f"--- {name}\n{text}" for name, text in texts if text)


def was_told_to_end(log: str) -> bool:
    """Whether SIGTERM ended the process: it left its stacks, without a fatal error before."""
    return "(most recent call first)" in log and "Fatal Python error" not in log


def reported_by_launcher(launcher: Path) -> str:
    """How the log of the deepspeed launcher, or torchrun, says that a worker ended. torchrun names the one that failed first."""
    codes = _LAUNCHERS_WORD.findall(tail_of(launcher))
    if not codes:
        return describe_status(None)
    code = int(next(filter(None, codes[-1])))
    return describe_status(-code if code < 0 else code << 8)


def take_stacks(folder: Path, processes: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Ask these workers (rank: pid and start time) for their stacks, and wait a moment for the answers, by rank."""
    before: dict[int, int] = {}
    stacks: dict[int, str] = {}
    for rank, identity in processes.items():
        if state_of(*identity)[0] == ALIVE:
            before[rank] = size_of(rank_log(folder, rank))
            with contextlib.suppress(ProcessLookupError):  # it died since
                os.kill(identity[0], signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_S
    while stacks.keys() < before.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
        texts = {rank: tail_of(rank_log(folder, rank), start) for rank, start in before.items()}
        stacks = {rank: text for rank, text in texts.items() if is_complete(text)}
    return stacks


def before_stacks(log: str) -> str:
    """What a worker printed itself: its log up to the first stack that it was asked for."""
    return log[: log.find("(most recent call first)")].rpartition("\n")[0] if "(most recent call first)" in log else log
