"""An editor at a breakpoint: debugpy runs in the rank's process, and VS Code or Ray's distributed debugger connects to it.

    address = listening(0)              # "127.0.0.1:41234", or at the address that HOST names
    look_here(trace, wait_s=None)       # until the editor continues

A process listens once. An editor may leave and reconnect at the next breakpoint. Whoever connects can run code as this user. So
the port is on 127.0.0.1, and only processes of this user may connect. On a cluster node everybody who reaches the port may
connect, so the command asks for confirmation first.
"""

import contextlib
import inspect
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from actordbg.base.fault import Unsupported
from actordbg.debug import own_user

HOST = "ACTORDBG_STOP_HOST"
"""The environment variable with a node's address: breakpoints report it, and an editor connects there."""
_address = ""
_LETS_ALL_IN = "import socket, sys; sys.exit(socket.socket.accept.__name__ != 'accept_own')"


def listening(port: int) -> str:
    """Listen for an editor, once per process, and return HOST:PORT; port 0 takes any free port."""
    global _address
    if not _address:
        import debugpy

        node = os.environ.get(HOST)
        with contextlib.nullcontext() if node else own_user_only():
            host, taken = debugpy.listen((node or "127.0.0.1", port))
        if not node and not own_user.listens(host, taken):
            raise Unsupported(f"another user listens at {host}:{taken}", hint="use --debugpy 0")
        _address = f"{host}:{taken}"
    return _address


@contextlib.contextmanager
def own_user_only() -> Iterator[None]:
    """Inside the block, debugpy's adapter accepts only this user, and this process connects only to this user's servers.

    The adapter reports its address to a port of this process. Another user may reach that port first, also with an IPv6 address.
    """
    import debugpy

    def connect(client: socket.socket, address: Any) -> None:
        if client.family != socket.AF_UNIX and not (client.family == socket.AF_INET and own_user.listens(*address)):
            raise ConnectionRefusedError(f"not a server of this user: {address}")
        socket_connect(client, address)

    socket_connect = socket.socket.connect
    with tempfile.TemporaryDirectory(prefix="actordbg-") as folder:
        Path(folder, "sitecustomize.py").write_text(inspect.getsource(own_user) + "\nguard()\n", encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
        asks = [sys.executable, "-c", _LETS_ALL_IN]
        if subprocess.run(asks, env=environment, stdin=subprocess.DEVNULL, check=False).returncode:
            raise Unsupported(
                f"{sys.executable} ignores PYTHONPATH, so any user of this machine could connect to debugpy and run code as you",
                hint="drop --debugpy: the prompt of --break is open only to you",
            )
        debugpy.configure(pythonEnv=environment)
        socket.socket.connect = connect  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            socket.socket.connect = socket_connect  # type: ignore[method-assign, assignment]


def look_here(trace: TracebackType | None, error: BaseException | None, wait_s: float | None) -> None:
    """Wait at most `wait_s` seconds for an editor, then stop: in the frames of the failure, else on the next line.

    Once the editor continues or steps out of here, the other ranks continue.
    """
    import debugpy

    if not debugpy.is_client_connected():
        with contextlib.ExitStack() as patience:
            if wait_s is not None:
                over = threading.Timer(wait_s, lambda: debugpy.wait_for_client.cancel())
                over.daemon = True
                over.start()
                patience.callback(over.cancel)
            debugpy.wait_for_client()
    if not debugpy.is_client_connected():
        return
    if trace is None or error is None:
        debugpy.breakpoint()
        return
    try:
        debugpy.trigger_exception_handler((type(error), error, trace), as_uncaught=False)
    except (AttributeError, TypeError):  # an older debugpy: inspect `trace` and `error` in this frame
        debugpy.breakpoint()
