"""Ring files that lie around: which there are, whether their processes live, and which of the dead have to make room.

A trainer loads this only where a store has many rings on its machine; the desk looks at them in `dump status` and `recover`.
Nothing here opens what is not a regular file, and nothing that another host's process may hold is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from actordbg.formats.ringfile import MOST_OLD, SLOTS_AT, SUFFIX, UNFINISHED, host_name
from actordbg.formats.store_files import atomic_write, open_regular

UNFINISHED_SECONDS = 60.0
"""A ring that has been in the making for so long never will be a ring."""


def ring_paths(folder: Path) -> list[Path]:
    """Every ring file of a folder, oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # it went meanwhile
                if path.name.endswith(SUFFIX):
                    found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def remove_unfinished(folder: Path) -> None:
    """Remove what is left of processes that were killed while they made their ring."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS and not is_held(path):
                    path.unlink()


def is_held(path: Path) -> bool:
    """Whether a process still holds this ring. OSError if it cannot be opened."""
    descriptor = open_regular(path)
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Asks for a shared lock: two that ask at once do not take each other for the owner, and a network file system gives an
    exclusive one only to those who may write.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def forget_old(folder: Path, most: int = MOST_OLD) -> None:
    """Reduce the oldest rings of this host's dead processes, beyond `most`, to their books: a job that is killed every night must
    not fill the memory, and `dump recover` still counts what it lost. Removes what is left of rings that were never finished.
    """
    remove_unfinished(folder)
    dead = []
    for path in ring_paths(folder):
        with contextlib.suppress(OSError):
            if path.name.rsplit("-", 3)[0] == host_name() and path.stat().st_size > SLOTS_AT and not is_held(path):
                dead.append(path)
    for path in dead[: max(0, len(dead) - most)]:
        with contextlib.suppress(OSError), open(open_regular(path), "rb") as ring:
            atomic_write(path, ring.read(SLOTS_AT))  # a new file: whoever maps the old one keeps it
