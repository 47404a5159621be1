"""The files of a store that the training process reads and writes; how a file gets there, and how any of a store is opened.

A file gets there whole or not at all. It is opened only if it is a regular file, never through a link, never waiting: a FIFO
would make its reader wait for ever, a link to /dev/zero would fill its memory, a link may lead out of it. Standard library.

Example::

    path = StoreFiles("/shared/actordbg").publish_dump(record, blob)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from actordbg.base.fault import NewerFormat, StoreProblem
from actordbg.formats.dump_record import SUFFIX, DumpRecord

if TYPE_CHECKING:
    from typing_extensions import Self

AnyPath = str | os.PathLike[str]
FORMAT = 1
TEMPORARY = ".tmp-"
"""How the names of unfinished files begin."""
MOST_BYTES = 2**26
"""Most bytes of a file that is read whole: switches, counters, records and specifications have a few thousand."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link"}


class OddFile(OSError):
    """A name that should be a regular file of a store is something else, or too large; `strerror` says what."""


class StoreFiles:
    """A store's dumps, counters and switch, by its root folder. Making one touches nothing."""

    def __init__(self, root: AnyPath) -> None:
        self.root = Path(os.path.abspath(root))
        self.dumps = self.root / "dumps"
        self.counters = self.root / "counters"
        self.format_path = self.root / "FORMAT"
        self.control_path = self.root / "control.json"
        self.controls = self.root / "controls"

    def require(self) -> Self:
        """Check that a store of a known format is here; StoreProblem or NewerFormat otherwise."""
        try:
            data = json.loads(read_regular(self.format_path))
            version = data["format"]
            if type(version) is not int:
                raise TypeError(f"its format is {version!r:.40}")
        except FileNotFoundError:
            raise StoreProblem(
                f"there is no store in {self.root}",
                hint="`actordbg dump enable`, `dump import` or `dump create` make one; --store DIR names another",
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreProblem(
                f"{self.format_path} is unreadable: {error}", hint='if this is a store, write {"format": 1} into it again'
            ) from None
        if version != FORMAT:
            raise NewerFormat(
                f"the store in {self.root} has format {version}, this actordbg reads format {FORMAT}",
                hint="upgrade actordbg: pip install --upgrade actordbg",
            )
        return self

    def control_of(self, job: str | None = None) -> Path:
        """The switch that a job of this name follows where the file is there; without a name, the store's."""
        return self.controls / f"{job}.json" if job else self.control_path

    def dump_folder(self, run: str, rank: int) -> Path:
        """The folder of one rank's dumps of one run."""
        return self.dumps / run / f"rank{rank:04d}"

    def dump_path(self, record: DumpRecord) -> Path:
        """Where the dump of this record lies or will lie."""
        return self.dump_folder(record.run, record.rank) / f"{record.dump_id}{SUFFIX}"

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        """Write one dump file atomically and return its path; OSError passes through (a full disk is the caller's case)."""
        path = self.dump_path(record)
        atomic_write(path, blob)
        return path


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of the regular file at `path`. OddFile for anything else, OSError where it cannot be opened."""
    try:
        descriptor = os.open(path, flags | _SAFELY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OddFile(errno.ELOOP, "it is a symbolic link, not a file", os.fspath(path)) from None
        if error.errno == errno.ENXIO:
            raise OddFile(errno.ENXIO, "it is a FIFO or a socket, not a file", os.fspath(path)) from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            raise OddFile(errno.EINVAL, f"it is {KINDS.get(kind, 'a device')}, not a file", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: AnyPath, most: int = MOST_BYTES) -> bytes:
    """The whole of the regular file at `path`; OddFile if it is none, or has more than `most` bytes."""
    descriptor = open_regular(path)
    try:
        data, wanted = b"", max(min(os.fstat(descriptor).st_size, most) + 1, 65_536)
        while len(data) <= most and (more := os.read(descriptor, wanted)):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise OddFile(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data


def temporary_name(name: str) -> str:
    """A new name for an unfinished file, which says what process writes it."""
    return f"{TEMPORARY}{processes()}-{os.getpid()}-{os.urandom(4).hex()}-{name}"


@functools.cache
def processes() -> str:
    """Whose process numbers are meant: those of this boot of this kernel, and of this container."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return hashlib.sha256(file.read() + os.readlink("/proc/self/ns/pid").encode()).hexdigest()[:8]
    return os.urandom(4).hex()


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to `path`, whole or not at all: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(temporary_name(path.name[:80]))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileNotFoundError:
        make_folder(path.parent)
        descriptor = os.open(temporary, flags, mode)
    try:
        try:
            file = os.fdopen(descriptor, "wb")
        except BaseException:
            os.close(descriptor)
            raise
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    try:  # noqa: SIM105  # making a contextlib.suppress is a call, and may fail
        sync_folder(path.parent)
    except Exception:  # noqa: BLE001  # the file is there: whoever asked must not take it for lost
        pass


def overwrite(path: Path, data: bytes) -> None:
    """Write over the beginning of a file, where a full disk has no room for a new one. OSError if the file is shorter."""
    descriptor = open_regular(path, os.O_WRONLY)
    try:
        if os.fstat(descriptor).st_size < len(data):
            raise OSError(errno.ENOSPC, "no room for more", os.fspath(path))
        os.pwrite(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """`mkdir -p` with mode 0700 for every folder that it makes."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return
        if not path.is_dir():
            raise NotADirectoryError(20, "not a folder", str(path))


def sync_folder(path: Path) -> None:
    """fsync a folder so that a rename in it survives a power cut; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
