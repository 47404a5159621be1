"""Ray's distributed debugger learns of a rank that waits for an editor.

It lists Ray's workers that have paused threads, and connects to the port that Ray knows for one (debugpy speaks with it). A rank
is a process beside Ray's. So its host says that it is paused itself, at the rank's port: on the same address, in the same way
that `ray.util.debugpy` does. Where Ray has other functions for that, nothing is listed, and the address in the command's terminal
works all the same.
"""

from __future__ import annotations

import contextlib
from typing import Any


class PausedRanks:
    """The ranks of a host that wait for an editor. Ray knows one port for a host: that of the last one."""

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}
        self._told = contextlib.ExitStack()

    def pause(self, rank: int, address: str) -> None:
        """A rank waits at HOST:PORT."""
        self._ports.pop(rank, None)
        self._ports[rank] = int(address.rpartition(":")[2])
        self._tell()

    def go_on(self, rank: int) -> None:
        """A rank waits no more."""
        if self._ports.pop(rank, None) is not None:
            self._tell()

    def _tell(self) -> None:
        self._told.close()
        if not self._ports:
            return
        with contextlib.suppress(AttributeError):
            worker: Any = _ray_worker()
            worker.set_debugger_port(list(self._ports.values())[-1])
            self._told.enter_context(worker.worker_paused_by_debugger())
            self._told.enter_context(worker.task_paused_by_debugger())


def _ray_worker() -> Any:
    import ray

    return ray._private.worker.global_worker
