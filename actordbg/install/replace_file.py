"""Change one file as a whole: locked, under a temporary name, with its mode and owner, and never in place.

Why not in place: uv and other installers hard-link one file into many environments and their cache. Writing into it
would change them all; `os.replace` gives this name a new file and leaves the others alone. A reader sees the old
bytes or the new ones, nothing between.

Invariants:
- One actordbg at a time works on a folder: `locked` takes `flock` on the folder itself, which needs no extra file,
  works in a read-only folder, and ends with its process. File systems that cannot do that (NFS) get a lock file in the
  temporary folder, for the processes of one host; there the next rule holds alone between hosts.
- Only the file that was read is replaced: a file that someone else changed in between is a Conflict, and stays unchanged.
- A failure leaves the file unchanged: the original keeps a second name until the change is finished, and one rename restores
  it, which needs no space. If that fails as well, StaysChanged says so.
- A temporary file that a killed process left behind is removed by the next process; its name (leading dot, `.tmp`) cannot be
  imported meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import ActordbgError, Conflict, EnvironmentProblem, StaysChanged

LOCK_SECONDS = 120.0
_TEMPORARY = ".actordbg-"
_NOT_OURS_TO_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Errors without a warning: the file system cannot flush a folder, or we may not open the folder."""
_UNDO_ATTEMPTS = 3
_LOCAL = "set TMPDIR to a folder on a local disk"


@dataclass(frozen=True)
class FileRead:
    """A file's bytes and what `stat` said about exactly these bytes."""

    path: Path
    data: bytes
    stat: os.stat_result

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()


def read(path: Path) -> FileRead:
    """Read the file. Raises EnvironmentProblem if it does not exist or cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read()
            return FileRead(path, data, os.fstat(file.fileno()))
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep every other actordbg on this host from changing files in the folder of `path` until the block ends."""
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot open {path.parent}: {error.strerror}", hint="check the path and its permissions"
        ) from None
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvironmentProblem(
                        f"another actordbg has worked on {path} for {LOCK_SECONDS:.0f} s",
                        hint="find out what it is waiting for, then run this again",
                    ) from None
                time.sleep(0.01)
            except OSError as error:
                if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    raise EnvironmentProblem(f"cannot lock {path.parent}: {error.strerror}", hint=_LOCAL) from None
                os.close(descriptor)
                descriptor = _lock_file(path.parent)
        for name in path.parent.glob(f"{_TEMPORARY}{glob.escape(path.name)}-*.tmp"):  # no other process can be writing one now
            with contextlib.suppress(OSError):
                name.unlink()
        yield
    finally:
        with contextlib.suppress(OSError):  # the lock is gone whatever close says
            os.close(descriptor)


def _lock_file(folder: Path) -> int:
    """Open the file that is locked instead of a folder whose file system has no locks."""
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
    path = Path(tempfile.gettempdir()) / f"actordbg-{os.getuid()}-{key}.lock"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvironmentProblem(f"cannot create the lock file {path}: {error.strerror}", hint=_LOCAL) from None


@contextlib.contextmanager
def replaced(old: FileRead, data: bytes, *, mtime_ns: int | None = None, way_out: str = "") -> Iterator[list[str]]:
    """Replace the file that `old` was read from by `data`, keeping its mode, owner and extended attributes.

    Yields notes for the user. If the block fails, or anything before it, the original is put back: the same file, not a copy.
    `mtime_ns`: the new file's modification time; None for now. `way_out`: a workaround for the hint, if nothing can be
    written. Raises Conflict if the file changed since `old` was read, EnvironmentProblem if the folder cannot be written or
    the owner cannot be kept; the file is then unchanged. Raises StaysChanged if the original could not be put back.
    """
    new, kept = _beside(old), _beside(old)
    made = None
    try:
        try:
            try:  # a second name for the original; a copy, where the file system or its owner forbids links
                os.link(old.path, kept)
            except OSError:
                _write(kept, old.data, old, old.stat.st_mtime_ns)
            made = _write(new, data, old, mtime_ns)
            now = os.stat(old.path)
            if (now.st_ino, now.st_size, now.st_mtime_ns) != (old.stat.st_ino, old.stat.st_size, old.stat.st_mtime_ns):
                raise Conflict(f"{old.path} was changed by another program just now", hint="look at it, then run this again")
            os.replace(new, old.path)
        except OSError as error:
            what, hint = (
                f"cannot change {old.path}",
                "run this as the owner of that environment, with the folder writable and space on its disk",
            )
            if error.errno in _NOT_OURS_TO_WRITE:
                what, hint = f"{old.path} is read-only here", f"{way_out}; or {hint}" if way_out else hint
            message = f"{what}: {error.strerror} (a new file must be written into {old.path.parent})"
            raise EnvironmentProblem(message, hint=hint) from None
        yield _flushed(old.path.parent)
    except BaseException as error:  # interrupts included: half a change must not stay
        _put_back(old, kept, made, error)
        raise
    finally:
        for path in (new, kept):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _beside(old: FileRead) -> Path:
    return old.path.with_name(f"{_TEMPORARY}{old.path.name}-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def _put_back(old: FileRead, kept: Path, made: int | None, first: BaseException) -> None:
    """Undo a change, if it was made. `made`: the new file's inode. A file that another program put there meanwhile stays."""
    for attempt in range(_UNDO_ATTEMPTS):
        try:
            if made is not None and _inode(old.path) in (made, None):
                os.replace(kept, old.path)
                _flushed(old.path.parent)
            return
        except BaseException as error:  # noqa: BLE001  a second interrupt must not stop this either
            now = _inode(old.path)
            if attempt == _UNDO_ATTEMPTS - 1 and now in (made, None):
                stays = "stays changed" if now is not None else "stays changed, or is as before: it could not be read"
                raise StaysChanged(
                    f"{old.path} {stays}: {_said(first)}; putting the original back also failed: {_said(error)}",
                    hint="fix the last error; `actordbg status` shows the state of the file",
                ) from None


def _said(error: BaseException) -> str:
    return error.message if isinstance(error, ActordbgError) else str(error) or type(error).__name__


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _flushed(folder: Path) -> list[str]:
    """fsync the folder, so that a rename in it survives a power cut. Return a note for the user if the disk refuses."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            lost = "a power cut may revert it; `actordbg status` shows the state of the file"
            return [f"the disk did not confirm the change in {folder} ({error.strerror}): {lost}"]
    return []


def _write(temporary: Path, data: bytes, old: FileRead, mtime_ns: int | None) -> int:
    """Write `data` under a temporary name beside `old`, with its owner, mode and extended attributes; return the inode."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        made = os.fstat(file.fileno())
        if (made.st_uid, made.st_gid) != (old.stat.st_uid, old.stat.st_gid):
            os.fchown(file.fileno(), old.stat.st_uid, old.stat.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(old.stat.st_mode))
        with contextlib.suppress(OSError):  # extended attributes, ACLs among them, as far as file system and rights allow
            for name in os.listxattr(old.path):
                with contextlib.suppress(OSError):
                    os.setxattr(file.fileno(), name, os.getxattr(old.path, name))
        if mtime_ns is not None:
            os.utime(file.fileno(), ns=(old.stat.st_atime_ns, mtime_ns))
        os.fsync(file.fileno())
        return made.st_ino
