"""The error tree: every failure that a user can cause or meet is one of these classes.

    ActordbgError                 code                exit
    ├── UsageError                usage                 2   an option or argument makes no sense
    │   └── WhereError            where                 2   a --where expression is not allowed or not understood
    ├── Refused                   refused               3   doing it could lose or harm something
    │   ├── Conflict              conflict              3   the file on disk is not in the state this needs
    │   ├── UnsafeInput           unsafe-input          3   a file that asks to execute code, or lies about its size
    │   └── Unsupported           unsupported           3   a combination that cannot work here, with the reason
    ├── NothingToDo               nothing               5   nothing was selected
    ├── BadResult                 bad-result            1   a result is wrong, where the caller asked for an error
    └── EnvironmentProblem        environment           4   something outside actordbg is missing or broken
        ├── StoreProblem          store                 4   the store is missing, unreadable or of another format
        │   ├── CorruptDump       corrupt-dump          4   a dump file is not what its header says
        │   ├── NewerFormat       newer-format          4   written by a newer actordbg
        │   ├── UnreadableFile    store                 4   a file cannot be read: permissions, or the disk
        │   └── AnothersLink      store                 4   another user made a place of the store a link
        ├── CatalogProblem        catalog               4   the catalog cannot be opened or upgraded
        │   └── UnwritableCatalog catalog               4   the catalog cannot be written where it is
        ├── MachineFault          environment           4   a full or broken disk, no open files left: never an input's result
        ├── StaysChanged          environment           4   a patch failed, and the original could not be put back
        └── LaunchProblem         launch                4   a replay's or a job's processes could not be started
            └── GroupsLost        launch                4   its groups were lost more often than allowed

Each carries a message (what and why) and a hint (what to do next). The command line catches the root once
(`actordbg.cli.app.main`), prints `error[code]: message` and `hint: ...`, and exits with `exit_code`.
Exit codes: 0 success, 1 bad result (mismatch, failed replay), 2 usage, 3 refused, 4 environment, 5 nothing to do,
130 interrupted.
`docs/reference/errors.md` has a section for each code.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from actordbg.base.fault import ActordbgError, EnvironmentProblem, NewerFormat, Refused, StoreProblem, Unsupported

__all__ = ["ActordbgError", "EnvironmentProblem", "NewerFormat", "Refused", "StoreProblem", "Unsupported"]
"""Re-exported from `fault`; journals store the full names of the classes with this module."""
for _kind in (ActordbgError, EnvironmentProblem, NewerFormat, Refused, StoreProblem, Unsupported):
    _kind.__module__ = __name__


class UsageError(ActordbgError):
    code = "usage"
    exit_code = 2


class WhereError(UsageError):
    code = "where"


class Conflict(Refused):
    code = "conflict"


class NothingToDo(ActordbgError):
    """Nothing was selected; exit code 0 would hide that."""

    code = "nothing"
    exit_code = 5


class BadResult(ActordbgError):
    """A result is wrong, or was not checked, and the caller asked for an error (`Answer.raise_if_wrong`)."""

    code = "bad-result"


class UnsafeInput(Refused):
    code = "unsafe-input"


class CorruptDump(StoreProblem):
    code = "corrupt-dump"


class UnreadableFile(StoreProblem):
    """A file that cannot be read, whatever is in it."""


class CatalogProblem(EnvironmentProblem):
    code = "catalog"


class UnwritableCatalog(CatalogProblem):
    """The catalog cannot be written where it is, or cannot even be opened because of that."""


class MachineFault(EnvironmentProblem):
    """The machine failed, not the program that ran on it (`machine_fault`)."""


class StaysChanged(EnvironmentProblem):
    """A change failed after the file had its new bytes, and the original could not be put back."""


class LaunchProblem(EnvironmentProblem):
    code = "launch"


class GroupsLost(LaunchProblem):
    """Worker groups were lost more often than allowed, through no input's fault."""


def error_named(error_class: str, message: str, hint: str = "") -> ActordbgError | None:
    """Rebuild the error that a worker raised from its class's full name; None if it is not a class of this tree."""
    module, _, name = error_class.rpartition(".")
    kind = globals().get(name) if module == __name__ else None
    return kind(message, hint=hint) if isinstance(kind, type) and issubclass(kind, ActordbgError) else None


def reason_of(error: Exception) -> str:
    """Return why something failed: of the system's errors without the path, "Permission denied"."""
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def system_errors(kind: type[ActordbgError], what: str, hint: str) -> Iterator[None]:
    """Raise an error of the system in the block as one of ours: "cannot read x: Permission denied". what: "cannot read x"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {reason_of(error)}", hint=hint) from None


def require_package(who: str, name: str, distribution: str = "") -> None:
    """Check that an optional package is installed. Raises EnvironmentProblem, with the command that installs it."""
    if importlib.util.find_spec(name) is None:
        package = distribution or name
        raise EnvironmentProblem(
            f"{who} needs {package}, which is not installed in {sys.executable}'s environment",
            hint=f"{sys.executable} -m pip install {package}",
        )


_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE)


def machine_fault(error: BaseException, folder: Path) -> MachineFault | None:
    """Return `error` as a fault of the machine, not of what runs on it: a full or broken disk, no open files left.

    It counts if it is such an OSError, was caused by such an OSError, or quotes its text, as C++ libraries do. Otherwise None.
    folder: the replay's, which `--resume` continues.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MachineFault):
            return cause
        if number := machine_errno(cause):
            begun = (folder / "spec.json").exists()
            hint = (
                f"fix that, then `actordbg replay --resume {folder.name}` continues" if begun else "fix that, then run it again"
            )
            return MachineFault(f"{os.strerror(number)} ({_free(folder)}); unfinished inputs stay open", hint=hint)
        cause = cause.__cause__ or cause.__context__
    return None


def machine_errno(error: BaseException) -> int:
    """Return the errno of the machine's fault that `error` is, or quotes; 0 for any other error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _NUMBERS else 0
    return next((number for number in _NUMBERS if os.strerror(number) in str(error)), 0)


def _free(folder: Path) -> str:
    """Say how much is free on the disks that may be full: a write error does not name its file."""
    import shutil
    import tempfile  # imported here: every command loads this module

    disks = []
    for place in (folder, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            disks.append(f"{place} has {shutil.disk_usage(place).free / 2**20:,.1f} MiB free")
    return ", ".join(disks)
