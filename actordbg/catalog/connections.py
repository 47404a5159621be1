"""The one place where connections to the catalog are made.

* `writing` for the indexer: plain sqlite3, every transaction begins with `BEGIN IMMEDIATE`. A deferred `BEGIN` that
  reads and then writes fails at once when somebody else wrote in between, busy timeout or not; an immediate one waits.
* `aside` for a catalog from nothing: made in memory, then copied into its file whole.
* `connect_readonly` for everything that reads: plain sqlite3, opened read-only, so a reader cannot harm the catalog and
  need not import SQLAlchemy (`dump ls` starts in a third of the time).

The file may be another user's. So no connection trusts its schema: SQL that lies in it may call nothing that has effects, and
each page is checked as it is read. `migrate` refuses a catalog with views or triggers.

The journal is WAL on a local disk: readers and the writer do not wait for each other. WAL needs memory shared between
all processes that have the file open, which network file systems do not give across hosts, so there the catalog uses a
rollback journal. The kind of file system is read from the mount table.

Example::

    with connect_readonly(store.catalog_path) as connection:
        connection.execute("SELECT count(*) FROM dump").fetchone()
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from actordbg.base.errors import CatalogProblem, UnwritableCatalog
from actordbg.formats.store_files import open_regular

if TYPE_CHECKING:
    from actordbg.catalog.statements import CatalogWriter
    from actordbg.catalog.tables import Column


BUSY_TIMEOUT_S = 60.0
"""How long a connection waits for a writer to finish before it gives up."""
PATIENCE_S = 0.5
"""How long anybody waits in silence."""

_log = logging.getLogger("actordbg")
_CANNOT_WRITE = re.compile(r"attempt to write a readonly|unable to open|database or disk is full|disk I/O error")
"""How SQLite begins to say that a catalog cannot be written where it lies; a journal's index without room is an I/O error."""
_LOCKED = re.compile(r"database (table |schema )?is locked\Z")
REBUILD = "the catalog is derived from the store's files: `actordbg index --rebuild` makes it again"
"""The hint of every catalog that cannot be used as it is."""
_FOLDER = "move the folder away, or have `actordbg fsck --repair` move it into quarantine/ and make the catalog again"
_WRITABLE = "the catalog's folder must be writable for you; or copy the store and name it with --store DIR"
_PARTS = ("-wal", "-shm", "-journal", "")
"""What belongs to a catalog, the file itself last."""
_NETWORK = re.compile(r"(nfs\d?|cifs|smb\w*|9p|afs|lustre|gpfs|beegfs|ceph|glusterfs|panfs|pvfs2|orangefs|wekafs|fuse\..*)\Z")


_SAFE = "PRAGMA trusted_schema = OFF; PRAGMA foreign_keys = ON;"
_BUSY = (5, 6)
"""SQLITE_BUSY and SQLITE_LOCKED, which Python has no names for before 3.11."""
_ASIDE_KIB = 131_072
"""Memory that a catalog made aside takes at most: 300,000 dumps."""

_HELD: ContextVar[tuple[Path, sqlite3.Connection, sqlite3.Connection] | None] = ContextVar("_HELD", default=None)
"""A catalog that a block keeps open: its path, who writes it, and who reads it."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[CatalogWriter]:
    """One write transaction on the catalog, for the indexer."""
    from actordbg.catalog.statements import CatalogWriter

    with plain_transaction(path) as connection:
        yield CatalogWriter(connection)


@contextlib.contextmanager
def plain_transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """One write transaction: commits at the end of the block, rolls back if it raises. Within `held_open` on its connection."""
    held = _HELD.get()
    shared = held[1] if held is not None and held[0] == path else None
    with catalog_errors(path):
        connection = shared or connect_writable(path)
        try:
            with patiently(path):
                connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if shared is None:
                connection.close()


@contextlib.contextmanager
def patiently(path: str | Path) -> Iterator[None]:
    """Where the block takes long, say on standard error what it waits for, and continue waiting."""
    late = threading.Timer(PATIENCE_S, _log.warning, ("waiting for another process, which holds %s", path))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextlib.contextmanager
def _held(path: Path, writer: sqlite3.Connection, reader: sqlite3.Connection) -> Iterator[None]:
    """Within the block whoever writes this catalog has the one connection, and whoever reads it the other."""
    token = _HELD.set((path, writer, reader))
    try:
        yield
    finally:
        _HELD.reset(token)


@contextlib.contextmanager
def held_open(path: Path) -> Iterator[sqlite3.Connection]:
    """Keep the catalog open for the block. The last connection to close copies the journal into the file and waits for
    the disk; with one held, the many short transactions of an index do that once instead of each time. Who only reads shares a
    connection too: opening one costs SQLite a look at the whole schema.
    """
    with catalog_errors(path), contextlib.closing(connect_writable(path)) as writer:
        writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with connect_readonly(path, alone=True) as reader, _held(path, writer, reader):
            yield writer


@contextlib.contextmanager
def aside(path: Path) -> Iterator[sqlite3.Connection]:
    """A catalog that is made beside the one at `path`, in memory; beyond `_ASIDE_KIB` in a temporary file that nobody else sees.

    Within the block whoever reads or writes this catalog has that one. `copy_into` makes it the catalog.
    """
    with catalog_errors(path), contextlib.closing(sqlite3.connect("", isolation_level=None)) as made:
        made.executescript(f"{_SAFE} PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; PRAGMA cache_size = -{_ASIDE_KIB}")
        with _held(path, made, made):
            yield made


def copy_into(made: sqlite3.Connection, path: Path) -> None:
    """Replace what the catalog at `path` holds, in one transaction: readers see the old one or the new one."""

    def busy(status: int, *_: int) -> None:
        if status in _BUSY:  # it was waited for already
            raise sqlite3.OperationalError("database is locked")

    with catalog_errors(path), contextlib.closing(connect_writable(path)) as target:
        mode = journal_mode(path)
        if mode == "wal" and path.stat().st_size == 0:  # nothing can be lost, and the change of the journal waits for the disk
            target.execute("PRAGMA synchronous = OFF")
        with patiently(path):
            target.execute("BEGIN IMMEDIATE")
        target.execute("ROLLBACK")
        made.backup(target, progress=busy)
        target.execute("PRAGMA synchronous = NORMAL")
        with contextlib.suppress(sqlite3.OperationalError):  # a file that others have open keeps the journal it has
            target.execute(f"PRAGMA journal_mode = {mode}")


def connect_writable(path: Path) -> sqlite3.Connection:
    """A plain connection without implicit transactions; makes the file if there is none."""
    refuse_odd(path)
    if not path.exists():
        os.close(open_regular(path, os.O_CREAT | os.O_RDWR))
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.executescript(f"{_SAFE} PRAGMA synchronous = NORMAL; PRAGMA cache_size = -65536")
    return connection


@contextlib.contextmanager
def connect_readonly(path: Path, *, alone: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that can only read, closed at the end of the block, or of that of `held_open`. Errors become CatalogProblem.

    alone: not one that others use too.
    """
    held = _HELD.get()
    if held is not None and held[0] == path and not alone:
        with catalog_errors(path):
            yield held[2]
        return
    refuse_odd(path)
    with catalog_errors(path):
        if os.path.exists(f"{path}-journal") and is_writable(path):
            with contextlib.closing(connect_writable(path)) as writer:  # has SQLite undo what a killed writer left there
                writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        uri = f"file:{quote(str(path))}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            connection.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; PRAGMA query_only = ON")
            yield connection


def odd_parts(path: Path) -> list[Path]:
    """What lies in the place of a catalog or of its journals and is not a file: SQLite waits for a FIFO, and follows a link."""
    irregular = []
    for part in (Path(f"{path}{suffix}") for suffix in _PARTS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a journal goes with the last who has the catalog open
            if not stat.S_ISREG(part.lstat().st_mode):
                irregular.append(part)
    return irregular


def refuse_odd(path: Path, *, folders_alone: bool = False) -> None:
    """Raise CatalogProblem if the catalog or a journal is not a file. folders_alone: only if it is a folder."""
    for part in odd_parts(path):
        folder = part.is_dir() and not part.is_symlink()
        if folder or not folders_alone:
            what = "a folder" if folder else "a link, a FIFO or a device"
            raise CatalogProblem(f"{part} is {what}, not a file", hint=_FOLDER if folder else REBUILD)


def remove(path: Path) -> None:
    """Remove a catalog and its journals, whatever is in their place."""
    with catalog_errors(path):
        for suffix in _PARTS:
            Path(f"{path}{suffix}").unlink(missing_ok=True)


@contextlib.contextmanager
def catalog_errors(path: Path) -> Iterator[None]:
    """Turns every sqlite3 error of the block into a CatalogProblem that says what to do."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes the schema in its messages, whatever bytes it has
        text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        kind = UnwritableCatalog if _CANNOT_WRITE.match(text) else CatalogProblem
        raise kind(f"{path}: {text}", hint=_hint(text)) from None
    except OSError as error:
        if not os.fsdecode(error.filename or "").startswith(str(path)):
            raise
        refuse_odd(path, folders_alone=True)
        raise UnwritableCatalog(f"cannot open {path}: {error.strerror}", hint=_WRITABLE) from None


def is_writable(path: Path) -> bool:
    """Whether this process may write a catalog at `path`, by permissions and mounts; whether there is room is not known."""
    effective = os.access in os.supports_effective_ids
    return os.access(path.parent, os.W_OK | os.X_OK, effective_ids=effective) and (
        os.access(path, os.W_OK, effective_ids=effective) or not path.exists()
    )


def decoded(columns: Mapping[str, Column], rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a query for these columns, by name: flags as bool, JSON parsed."""
    flags, texts = ([name for name, column in columns.items() if column.type == kind] for kind in ("bool", "dict"))
    try:
        for values in rows:
            row = dict(zip(columns, values, strict=True))
            for name in flags:
                if row[name] is not None:
                    row[name] = row[name] != 0
            for name in texts:
                if row[name] is not None:
                    row[name] = json.loads(row[name])
            yield row
    except (TypeError, ValueError) as error:
        raise CatalogProblem(f"the catalog has a damaged row: {error}", hint=REBUILD) from None


def _hint(message: str) -> str:
    if is_locked(message):
        return "another actordbg is writing the catalog; try again in a moment"
    if not _CANNOT_WRITE.match(message):
        return REBUILD
    return "make room on that disk" if "full" in message else _WRITABLE


def is_locked(message: str) -> bool:
    """Whether SQLite's message says that another process holds the catalog."""
    return bool(_LOCKED.search(message))


def journal_mode(path: Path) -> str:
    """The journal that suits the file system of `path`: "wal" on a local disk, "delete" on a network file system."""
    return "delete" if _NETWORK.match(file_system(path.parent)) else "wal"


def file_system(folder: Path, mounts: str = "/proc/self/mounts") -> str:
    """The type of file system that `folder` lies on ("ext4", "nfs4", "fuse.sshfs"); "" where that cannot be told."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    target, best, kind = os.path.realpath(folder), "", ""
    for parts in (line.split(" ") for line in lines):
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ")
        if len(point) >= len(best) and (target == point or target.startswith(point.rstrip("/") + "/")):
            best, kind = point, parts[2]
    return kind
