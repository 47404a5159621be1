"""`breakpoint()` in somebody's training code: its ranks on this machine park, and `actordbg attach RUN` gets the prompt.

Nothing here may harm the run. Ranks wait for each other, and for somebody to attach, only as long as the call says; then they go
on.
After a stop to which nobody came, later ones wait for a second only, unless an `attach` is waiting already. `quit` and a closed
terminal end no training: they mean `detach` and `continue`. Processes of the same job meet by MASTER_PORT, in a folder named
after the run, which only this user can enter. Standard library only.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from actordbg.debug.meeting import DETACH
from actordbg.debug.prompt import StoppedByUser
from actordbg.debug.stops import Site, Stop, hold

FOLDER = "ACTORDBG_STOP_DIR"
"""The variable that says where live jobs meet, instead of shared memory."""
SHORT_S = 1.0
_off, _missed, _alone = False, False, False
"""No more stops; ranks did not come to the last one; nobody attached to it."""


def root() -> Path:
    """The folder below which live jobs of this user meet."""
    named = os.environ.get(FOLDER)
    memory = "/dev/shm"
    base = named or (memory if os.access(memory, os.W_OK) else tempfile.gettempdir())
    return Path(base) / f"actordbg-stops-{os.getuid()}"


def run_name() -> str:
    """The run's name, or one after the job's port."""
    name = os.environ.get("ACTORDBG_RUN") or f"job-{os.environ.get('MASTER_PORT') or os.getpid()}"
    return re.sub(r"[^\w.-]", "_", name)


def expect(run: str) -> None:
    """Make the folder where a run's ranks will meet, so that `actordbg attach` can wait there before the first stop."""
    _private(root() / re.sub(r"[^\w.-]", "_", run))


def stop(frame: FrameType, leader: int, timeout_s: float) -> None:
    """Stop here with the other ranks; whatever goes wrong, go on."""
    global _off, _missed, _alone
    if _off:
        return
    rank, world, here = _place()
    if here < world:
        return _say(
            rank, f"breakpoint() is passed: {world} ranks run on several machines, and one can park only those of its own"
        )
    try:
        folder = _private(root() / run_name() / (os.environ.get("MASTER_PORT") or str(os.getpid())))
    except OSError as error:
        return _say(rank, f"breakpoint() is passed: {error}")
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    attach_s = SHORT_S if _alone and not _awaited() else timeout_s
    came, left_out, word = False, False, ""

    def opened(where: str, missing: list[int], _editor: str) -> None:
        nonlocal left_out
        left_out = bool(missing)
        without = f" without {', '.join(f'rank {one}' for one in missing)}, which did not come" if missing else ""
        _say(rank, f"stops {where}{without}; for {attach_s:.0f} s: actordbg attach {run_name()}")

    def attached() -> None:
        nonlocal came
        came = True

    def ended(how: str, _layer: str) -> None:
        nonlocal word
        word = how

    arrival_s = SHORT_S if _missed else timeout_s
    site = Site(folder, rank, tuple(range(world)), min(leader, world - 1), arrival_s, attach_s, opened, ended, attached)
    names: dict[str, Any] = {"rank": rank, "world_size": world}
    said = Stop(f"at {place}", frame, names, banner=f", in {frame.f_code.co_name}", quits="the same as detach")
    try:
        hold(said, site)
    except StoppedByUser as error:
        _off = "terminal" not in str(error)
    except OSError as error:
        _say(rank, f"breakpoint() is passed: {error}")
    _off = _off or word == DETACH
    _missed, _alone = left_out, not came
    _say(rank, "goes on" + (" and stops no more" if _off else ""))
    return None


def _place() -> tuple[int, int, int]:
    """(rank, world size, how many ranks of it are on this machine as far as is known)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank, world, int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _private(folder: Path) -> Path:
    """Make the folder; OSError where another user made a part of it before us."""
    for one in [root(), *(part for part in (folder.parent, folder) if part.is_relative_to(root()) and part != root())]:
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(one)
        if state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode) or state.st_mode & 0o077:
            raise PermissionError(f"{one} is not a folder of this user alone")
    return folder


def _awaited() -> bool:
    """Whether an `actordbg attach` waits for a stop of this run."""
    return (root() / run_name() / "attach").exists()


def _say(rank: int, text: str) -> None:
    print(f"actordbg: rank {rank} {text}", file=sys.stderr, flush=True)  # noqa: T201 - the job's own standard error
