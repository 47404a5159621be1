"""Change one file as a whole: locked, under a temporary name, with its mode and owner, and never in place.

Why not in place: uv and other installers hard-link one file into many environments and their cache. Writing into it
would change them all; `os.replace` gives this one name a new file and leaves the others alone. A reader sees the old
bytes or the new ones, nothing between.

Invariants:
- One actordbg at a time works on a folder: `locked` takes `flock` on the folder itself, which needs no file of its own,
  works in a read-only folder, and ends with its process. File systems that cannot do that (NFS) get a lock file in the
  temporary folder, which serialises the processes of one host.
- What was read is what is replaced: a file that someone else changed in between is a Conflict, and stays as it is.
- A failure leaves the file as it was. A temporary file that a killed process left behind is removed by the next one;
  its name (leading dot, `.tmp`) cannot be imported meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import Conflict, EnvironmentProblem
from actordbg.formats.store_files import sync_folder

LOCK_SECONDS = 120.0
_TEMPORARY = ".actordbg-"
_NOT_OURS_TO_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class FileRead:
    """A file's bytes and what `stat` said about exactly these bytes."""

    path: Path
    data: bytes
    stat: os.stat_result

    @property
    def sha256(self) -> str:
        """Of the bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()


def read(path: Path) -> FileRead:
    """The file as it is now. EnvironmentProblem if it is not there or cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read()
            return FileRead(path, data, os.fstat(file.fileno()))
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its rights") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep every other actordbg on this host from changing files in the folder of `path` until the block ends."""
    descriptor = _open_lock(path.parent)
    try:
        _wait(descriptor, path)
        _remove_leftovers(path)
        yield
    finally:
        os.close(descriptor)


def replace(old: FileRead, data: bytes, *, mtime_ns: int | None = None, way_out: str = "") -> None:
    """Put `data` in the place of the file that `old` was read from, with its mode, owner and extended attributes.

    `mtime_ns`: the new file's modification time; None for now. `way_out`: what to do where nothing can be written, for the
    hint. Conflict if the file changed since `old` was read, EnvironmentProblem if the folder cannot be written or the
    owner cannot be kept; the file is as it was then.
    """
    temporary = old.path.with_name(f"{_TEMPORARY}{old.path.name}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _write(temporary, data, old, mtime_ns)
        _require_unchanged(old)
        os.replace(temporary, old.path)
    except OSError as error:
        read_only = error.errno in _NOT_OURS_TO_WRITE
        raise EnvironmentProblem(
            f"{f'{old.path} is read-only here' if read_only else f'cannot change {old.path}'}: {error.strerror}"
            f" (a new file must be written into {old.path.parent})",
            hint=(f"{way_out}; or " if way_out and read_only else "")
            + "run this as the owner of that environment, with the folder writable and space on its disk",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_folder(old.path.parent)


def _write(temporary: Path, data: bytes, old: FileRead, mtime_ns: int | None) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        made = os.fstat(file.fileno())
        if (made.st_uid, made.st_gid) != (old.stat.st_uid, old.stat.st_gid):
            os.fchown(file.fileno(), old.stat.st_uid, old.stat.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(old.stat.st_mode))
        _copy_attributes(old.path, file.fileno())
        if mtime_ns is not None:
            os.utime(file.fileno(), ns=(old.stat.st_atime_ns, mtime_ns))
        os.fsync(file.fileno())


def _copy_attributes(path: Path, descriptor: int) -> None:
    """Extended attributes (ACLs among them), as far as the file system and our rights allow."""
    if not hasattr(os, "listxattr"):
        return
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):
            with contextlib.suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(path, name))


def _require_unchanged(old: FileRead) -> None:
    now = os.stat(old.path)
    if (now.st_ino, now.st_size, now.st_mtime_ns) != (old.stat.st_ino, old.stat.st_size, old.stat.st_mtime_ns):
        raise Conflict(f"{old.path} was changed by another program just now", hint="look at it, then run this again")


def _open_lock(folder: Path) -> int:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise EnvironmentProblem(f"cannot open {folder}: {error.strerror}", hint="check the path and its rights") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor
    except OSError:
        os.close(descriptor)
        return _open_lock_file(folder)
    return descriptor


def _open_lock_file(folder: Path) -> int:
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
    name = Path(tempfile.gettempdir()) / f"actordbg-{os.getuid()}-{key}.lock"
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make the lock file {name}: {error.strerror}", hint="set TMPDIR") from None


def _wait(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise EnvironmentProblem(
                    f"another actordbg has worked on {path} for {LOCK_SECONDS:.0f} s",
                    hint="find out what it waits for, then run this again",
                ) from None
        time.sleep(0.01)


def _remove_leftovers(path: Path) -> None:
    """Temporary files of processes that were killed: only the holder of the lock could be writing one."""
    for name in path.parent.glob(f"{_TEMPORARY}{path.name}-*.tmp"):
        with contextlib.suppress(OSError):
            name.unlink()
