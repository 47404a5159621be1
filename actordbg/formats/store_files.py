"""The files of a store that the training process reads and writes; atomic writes, and safe opening of any file of a store.

Writes are atomic. Nothing is written, made or removed behind another user's link: in a folder that others may write, it leads
where they want. Your own links, and root's, may lead to a larger disk. A file is opened only if it is a regular file, never
through a link and never blocking: a FIFO would block its reader forever, a link to /dev/zero would fill the memory, and a link
may lead out of the store. Standard library only.

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
"""Name prefix of unfinished files."""
MOST_BYTES = 2**26
"""Most bytes of a file that is read at once: switches, counters, records and specifications have a few thousand."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link"}


class OddFile(OSError):
    """A name that should be a regular file of a store is something else, or too large; `strerror` says what."""


class AnothersLink(OddFile, StoreProblem):
    """Another user's link leads to a place of a store."""

    def __init__(self, link: Path, root: Path) -> None:
        OSError.__init__(self, errno.ELOOP, f"another user made {link.relative_to(root)} a link", os.fspath(link))
        self.message, self.hint = str(self.strerror), f"remove {link}, or make it yourself"


class StoreFiles:
    """Paths of a store's dumps, counters and switch. Creating an instance touches nothing."""

    def __init__(self, root: AnyPath) -> None:
        self.root = Path(os.path.abspath(root))
        self.dumps = self.root / "dumps"
        self.counters = self.root / "counters"
        self.format_path = self.root / "FORMAT"
        self.control_path = self.root / "control.json"
        self.controls = self.root / "controls"

    def require(self) -> Self:
        """Check that a store of a known format is here. Raises StoreProblem or NewerFormat."""
        try:
            version = json.loads(read_regular(self.format_path, 4096))["format"]
            if type(version) is not int or version < FORMAT:
                raise TypeError(f"its format is {version!r:.40}")
        except (FileNotFoundError, NotADirectoryError):
            hint = "create one with `actordbg dump enable`, `dump import` or `dump create`, or pass --store DIR"
            raise StoreProblem(f"there is no store in {self.root}", hint=hint) from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreProblem(
                f"{self.format_path} is unreadable: {error}", hint='if this is a store, write {"format": 1} into that file'
            ) from None
        if version > FORMAT:
            what = f"the store in {self.root} has format {version}, this actordbg reads format {FORMAT}"
            raise NewerFormat(what, hint="upgrade actordbg: pip install --upgrade actordbg")
        return self

    def control_of(self, job: str | None = None) -> Path:
        """Return the path of a named job's switch, which takes precedence if it exists; without a name, the store's."""
        return self.controls / f"{job}.json" if job else self.control_path

    def dump_folder(self, run: str, rank: int) -> Path:
        """Return the folder of a rank's dumps of a run."""
        return self.dumps / run / f"rank{rank:04d}"

    def dump_path(self, record: DumpRecord) -> Path:
        """Return the path of this record's dump, present or future."""
        return self.dump_folder(record.run, record.rank) / f"{record.dump_id}{SUFFIX}"

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        """Write a dump file atomically and return its path. OSError passes through (the caller handles a full disk)."""
        path = self.dump_path(record)
        atomic_write(path, blob)
        return path


def require_own_way(path: Path, root: Path | None = None) -> None:
    """Raise AnothersLink if another user's link leads to `path` in its store. root: the store, else the outermost around it.

    It is looked at before a file is opened: who may write into a folder could still exchange it in that moment.
    """
    try:
        root = root or _root_over(path.parent)
    except LookupError:
        return
    mine = {0, os.geteuid()}
    if os.geteuid() == 0 and (behind := os.environ.get("SUDO_UID", "")).isdecimal():
        mine.add(int(behind))
    for folder in path.parents:
        if folder == root:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            state = os.lstat(folder)
            if stat.S_ISLNK(state.st_mode) and state.st_uid not in mine:
                raise AnothersLink(folder, root)


@functools.lru_cache(maxsize=256)
def _root_over(folder: Path) -> Path:
    """Return the outermost store around a folder: what a link inside leads to may look like one. LookupError if there is none."""
    for above in reversed([folder, *folder.parents]):
        if os.path.exists(above / "FORMAT"):
            return above
    raise LookupError(folder)  # and it is looked for again: a store may be made here


def remove(path: Path) -> None:
    """Remove a file of a store if it is there. AnothersLink if another user's link leads to it."""
    require_own_way(path)
    path.unlink(missing_ok=True)


def open_regular(path: AnyPath, flags: int = os.O_RDONLY) -> int:
    """Open the regular file at `path` and return its descriptor. OddFile for anything else, OSError if it cannot be opened."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        require_own_way(Path(path))
    try:
        descriptor = os.open(path, flags | _SAFELY, 0o600)
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
    """Read the whole regular file at `path`. OddFile if it is not a regular file, or has more than `most` bytes."""
    descriptor = open_regular(path)
    try:
        data, chunk = b"", max(min(os.fstat(descriptor).st_size, most) + 1, 65_536)
        while len(data) <= most and (more := os.read(descriptor, chunk)):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise OddFile(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data


def temporary_name(name: str) -> str:
    """Return a new name for an unfinished file, which identifies the process that writes it."""
    return f"{TEMPORARY}{processes()}-{os.getpid()}-{os.urandom(4).hex()}-{name}"


@functools.cache
def processes() -> str:
    """Identify the pid namespace: this boot of this kernel, and this container."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return hashlib.sha256(file.read() + os.readlink("/proc/self/ns/pid").encode()).hexdigest()[:8]
    return os.urandom(4).hex()


def atomic_write(path: Path, data: bytes | str, mode: int = 0o600, *, flush: bool = True) -> None:
    """Write `data` (text as UTF-8) to `path`: temporary name, fsync, rename, fsync of the folder. flush: with the fsyncs."""
    require_own_way(path)
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
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    try:  # making a contextlib.suppress is a call, and may fail
        if flush:
            sync_folder(path.parent)
    except Exception:  # noqa: BLE001  # the file is there: the caller must not take it for lost
        pass


def overwrite(path: Path, data: bytes) -> None:
    """Overwrite the beginning of a file, for a full disk without room for a new file. OSError if the file is shorter."""
    descriptor = open_regular(path, os.O_WRONLY)
    try:
        if os.fstat(descriptor).st_size < len(data):
            raise OSError(errno.ENOSPC, "no room for more", os.fspath(path))
        os.pwrite(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents like `mkdir -p`, with mode 0700 for every new folder."""
    require_own_way(path / path.name)  # an existing one may be a link
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return
        if not path.is_dir():
            raise NotADirectoryError(20, "not a folder", str(path))


def sync_folder(path: Path) -> None:
    """fsync a folder so that a rename in it survives a power failure. Does nothing on file systems that cannot."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_system(folder: AnyPath, mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the file system of `folder` ("ext4", "nfs4", "fuse.sshfs"), by the mount table; "" if unknown."""
    target, best, kind = os.path.realpath(folder), "", ""
    with contextlib.suppress(OSError), open(mounts, encoding="utf-8", errors="replace") as lines:
        for _, point, kind_there, *_ in (line.split(" ") for line in lines if line.count(" ") > 2):
            point = point.replace("\\040", " ")
            if len(point) >= len(best) and (target == point or target.startswith(point.rstrip("/") + "/")):
                best, kind = point, kind_there
    return kind
