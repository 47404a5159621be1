"""Stops: one rank at a prompt, the others parked outside of any collective. In training code as in a replay's workers.

In comes a frame, out goes a word: continue, end this input, stop no more. Begin reading in `stops`; `meeting` has the sockets,
`prompt` is pdb behind one, `replay_stops` says where a replay's workers stop, `editor` lets VS Code in.

    from actordbg.debug import breakpoint
    breakpoint(rank=0)                  # `actordbg attach RUN`, from another terminal of this machine, gets the prompt

`PYTHONBREAKPOINT=actordbg.debug.breakpoint` does the same for Python's own `breakpoint()`; the workers of a replay have it, and
`actordbg run --break` sets it. Nothing is imported before a stop is reached.
"""

from __future__ import annotations

import sys
from types import FrameType


def breakpoint(rank: int | None = None, *, timeout: float = 300.0, frame: FrameType | None = None) -> None:
    """Park every rank that comes here; `rank` (0, or what --break-rank says) gets the prompt.

    In a live job ranks wait at most `timeout` seconds for each other, and as long for somebody to attach. Then all continue.
    frame: the one to look at; the caller's, if it is not given.
    """
    from actordbg.debug import stops

    here = frame or sys._getframe(1)
    if stops.in_replay is not None:
        stops.in_replay.reached(here, rank)
    else:
        stops.stop_job(here, rank or 0, timeout)
