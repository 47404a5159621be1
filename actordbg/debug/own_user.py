"""TCP connections between this user's processes alone, for servers that ask nobody who connects: debugpy runs what it is told.

    guard()                             # from now on `socket.accept` closes what other users connected
    listens("127.0.0.1", 5678)          # whether a process of this user listens there

The kernel's table of connections says whose an end is, if that is on this machine. This source is also what the Python of
debugpy's adapter executes at its start (`editor.py`). Standard library only.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

_ESTABLISHED, _LISTENS = "01", "0A"
_LOOKS = 20
_accept = socket.socket.accept


def guard() -> None:
    """Take TCP connections of this user, or of root, alone, in this process."""
    socket.socket.accept = accept_own  # type: ignore[method-assign, assignment]


def accept_own(server: socket.socket) -> tuple[socket.socket, Any]:
    """`socket.accept`, for the next connection that is this user's."""
    while True:
        connection, address = _accept(server)
        try:  # who holds the other end now; an end that was closed is nobody's
            own = server.family == socket.AF_UNIX or _in_table(
                [_written(*connection.getpeername()), _written(*connection.getsockname())], _ESTABLISHED
            )
        except (OSError, TypeError):  # gone already; IPv6, at which nothing here listens
            own = False
        if own:
            return connection, address
        connection.close()


def listens(host: str, port: int) -> bool:
    """Whether a process of this user or of root listens at this address."""
    return _in_table([_written(host, port)], _LISTENS)


def _in_table(ends: list[str], state: str) -> bool:
    """Whether a row of the kernel's table has these ends and this state, and is this user's or root's.

    Reading skips rows while other connections come and go, so a row that is missing is looked for again.
    """
    for _ in range(_LOOKS):
        with open("/proc/net/tcp", encoding="ascii") as table:
            rows = [line.split() for line in table]
        if owners := {row[7] for row in rows if row[1 : 1 + len(ends)] == ends and row[3] == state}:
            return bool(owners & {str(os.geteuid()), "0"})
        time.sleep(0.01)
    return False


def _written(host: str, port: int) -> str:
    """An address as the table has it: the bytes of this machine's order, in hexadecimal."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
