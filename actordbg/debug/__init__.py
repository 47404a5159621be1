"""Breakpoints (stops): one rank at a prompt, the others paused outside of any collective, in training code and in a replay's
workers.

A stop gets a frame and returns a word: continue, end this input, or detach. Start reading in `stops`; `meeting` has the sockets,
`prompt` is pdb over a socket, `replay_stops` decides where a replay's workers stop, and `editor` connects VS Code.

    from actordbg.debug import breakpoint
    breakpoint(rank=0)                  # `actordbg attach RUN`, from another terminal of this machine, gets the prompt

`PYTHONBREAKPOINT=actordbg.debug.breakpoint` does the same for Python's `breakpoint()`; a replay's workers have it set, and
`actordbg run --break` sets it. Nothing is imported before a breakpoint is reached.
"""

import sys
from types import FrameType


def breakpoint(rank: int | None = None, *, timeout: float = 300.0, frame: FrameType | None = None) -> None:
    """Pause every rank that reaches this call; `rank` (default: --break-rank, else 0) gets the prompt.

    In a live job, ranks wait at most `timeout` seconds for each other, and as long for somebody to attach. Then all continue.
    frame: the frame to inspect; default: the caller's.
    """
    from actordbg.debug import stops

    here = frame or sys._getframe(1)
    if stops.in_replay is not None:
        stops.in_replay.reached(here, rank)
    else:
        stops.stop_job(here, rank or 0, timeout)
