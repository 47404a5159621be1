"""An editor at a stop: debugpy in the rank's process, to which VS Code connects, and what knows Ray's distributed debugger.

    address = listening(0)              # "127.0.0.1:41234"; HOST says another address than this machine's own
    look_here(trace, wait_s=None)       # until the editor goes on

A process listens once. An editor may leave and come back at the next stop. Whoever reaches the port can run code as this user,
so it is this machine's own, unless the rank runs on a node of a cluster.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

HOST = "ACTORDBG_STOP_HOST"
"""The variable with a node's address: stops say where they are, and an editor connects there."""
_address = ""


def listening(port: int) -> str:
    """HOST:PORT where this process listens, from the first call on; port 0 is any that is free."""
    global _address
    if not _address:
        import debugpy

        host, taken = debugpy.listen((os.environ.get(HOST) or "127.0.0.1", port))
        _address = f"{host}:{taken}"
    return _address


def look_here(trace: TracebackType | None, error: BaseException | None, wait_s: float | None) -> None:
    """Wait for an editor, at most so long, and stop: in the frames of what failed, else on the next line.

    It goes on, or steps, out of here: the others go on then.
    """
    import debugpy

    if not debugpy.is_client_connected():
        _await_client(wait_s)
    if not debugpy.is_client_connected():
        return
    if trace is None or error is None:
        debugpy.breakpoint()
        return
    try:
        debugpy.trigger_exception_handler((type(error), error, trace), as_uncaught=False)
    except (AttributeError, TypeError):  # an older debugpy: `trace` and `error` are here
        debugpy.breakpoint()


def _await_client(wait_s: float | None) -> None:
    import debugpy

    over = threading.Timer(wait_s, lambda: debugpy.wait_for_client.cancel()) if wait_s is not None else None
    if over is not None:
        over.daemon = True
        over.start()
    debugpy.wait_for_client()
    if over is not None:
        over.cancel()
