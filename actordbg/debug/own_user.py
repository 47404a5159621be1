"""Restrict TCP connections to this user's processes, for servers that do not authenticate: debugpy runs any code it is sent.

    guard()                             # from now on `socket.accept` closes other users' connections
    listens("127.0.0.1", 5678)          # whether a process of this user listens there

The kernel's connection table has the owner of each end on this machine. The Python of debugpy's adapter also runs this source at
its start (`editor.py`). Standard library only.
"""

import os
import socket
import sys
import time
from typing import Any

_ESTABLISHED, _LISTENS = "01", "0A"
_LOOKS = 20
_accept = socket.socket.accept


def guard() -> None:
    """Accept TCP connections only from this user or root, in this whole process."""
    socket.socket.accept = accept_own  # type: ignore[method-assign, assignment]


def accept_own(server: socket.socket) -> tuple[socket.socket, Any]:
    """Replace `socket.accept`: return the next connection of this user, and close others."""
    while True:
        connection, address = _accept(server)
        try:  # the owner of the other end; a closed end has none
            own = server.family == socket.AF_UNIX or _in_table(
                [_written(*connection.getpeername()), _written(*connection.getsockname())], _ESTABLISHED
            )
        except (OSError, TypeError):  # gone already; IPv6, at which nothing here listens
            own = False
        if own:
            return connection, address
        connection.close()


def listens(host: str, port: int) -> bool:
    """Check whether a process of this user or of root listens at this address."""
    return _in_table([_written(host, port)], _LISTENS)


def _in_table(ends: list[str], state: str) -> bool:
    """Check whether the kernel's table has a row with these ends and this state that belongs to this user or root.

    Reading skips rows while other connections open and close, so a missing row is looked up again.
    """
    for _ in range(_LOOKS):
        with open("/proc/net/tcp", encoding="ascii") as table:
            rows = [line.split() for line in table]
        if owners := {row[7] for row in rows if row[1 : 1 + len(ends)] == ends and row[3] == state}:
            return bool(owners & {str(os.geteuid()), "0"})
        time.sleep(0.01)
    return False


def _written(host: str, port: int) -> str:
    """Format an address like the table: hexadecimal, in this machine's byte order."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
