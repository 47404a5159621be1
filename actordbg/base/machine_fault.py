"""Faults of the machine, told from those of what runs on it: a full or broken disk, no open files left.

    machine_fault(OSError(errno.ENOSPC, ...), folder)     # a MachineFault: no result of the input that met it
    machine_fault(ValueError(...), folder)                # None

An error counts if it is such an OSError, if one of those caused it, or if it quotes one's text, as libraries of C++ do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from actordbg.base.errors import MachineFault
from actordbg.base.units import human_bytes

_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE)


def machine_fault(error: BaseException, folder: Path) -> MachineFault | None:
    """`error` as a fault of the machine; None if it is another one. folder: the replay's, which `--resume` goes on with."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MachineFault):
            return cause
        if number := machine_errno(cause):
            free = ", ".join(_free(folder, Path(tempfile.gettempdir())))
            begun = (folder / "spec.json").exists()
            hint = f"fix that, then `actordbg replay --resume {folder.name}` goes on" if begun else "fix that, then run it again"
            return MachineFault(f"{os.strerror(number)} ({free}); what had not finished stays open", hint=hint)
        cause = cause.__cause__ or cause.__context__
    return None


def machine_errno(error: BaseException) -> int:
    """The number of the machine's fault that `error` is, or quotes; 0 if it is another error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _NUMBERS else 0
    return next((number for number in _NUMBERS if os.strerror(number) in str(error)), 0)


def _free(*places: Path) -> Iterator[str]:
    """What is free on the disks that may be meant: an error of a write names no file."""
    for place in places:
        with contextlib.suppress(OSError):
            state = os.statvfs(place)
            yield f"{place} has {human_bytes(state.f_bavail * state.f_frsize)} free"
