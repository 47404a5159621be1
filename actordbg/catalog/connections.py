"""Connections to the catalog: all are made here.

* `writing` for the indexer: plain sqlite3, every transaction begins with `BEGIN IMMEDIATE`. A deferred `BEGIN` that
  reads and then writes fails at once if another process wrote in between, despite the busy timeout; an immediate one waits.
* `aside` for a new catalog: built in memory, then copied into its file whole.
* `connect_readonly` for everything that reads: plain sqlite3, opened read-only, so a reader cannot harm the catalog and
  need not import SQLAlchemy (`dump ls` starts in a third of the time).

The file may belong to another user. So no connection trusts its schema: SQL in it cannot call functions with side effects, and
each page is checked as it is read. `migrate` refuses a catalog with triggers.

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
from actordbg.formats.record_reading import strict_json
from actordbg.formats.store_files import file_system, open_regular

if TYPE_CHECKING:
    from actordbg.catalog.columns import Column
    from actordbg.catalog.statements import CatalogWriter


BUSY_TIMEOUT_S = 60.0
"""How long a connection waits for a writer to finish before it gives up."""
PATIENCE_S = 0.5
"""Seconds of waiting before a message says so."""

_log = logging.getLogger("actordbg")
_CANNOT_WRITE = re.compile(r"attempt to write a readonly|unable to open|database or disk is full|disk I/O error")
"""Beginnings of SQLite's messages for an unwritable catalog; a full disk under a journal's index is an I/O error."""
_LOCKED = re.compile(r"database (table |schema )?is locked\Z")
REBUILD = "run `actordbg index --rebuild` to rebuild the catalog from the store's files"
"""The hint for every unusable catalog."""
_FOLDER = "move the folder away, or run `actordbg store fsck --repair` to move it into quarantine/ and rebuild the catalog"
_WRITABLE = "make the catalog's folder writable, or copy the store and name the copy with --store DIR"
_PARTS = ("-wal", "-shm", "-journal", "")
"""Suffixes of a catalog's files, the catalog itself last."""
_NETWORK = re.compile(r"(nfs\d?|cifs|smb\w*|9p|afs|lustre|gpfs|beegfs|ceph|glusterfs|panfs|pvfs2|orangefs|wekafs|fuse\..*)\Z")


_SAFE = "PRAGMA trusted_schema = OFF; PRAGMA foreign_keys = ON;"
_BUSY = (5, 6)
"""SQLITE_BUSY and SQLITE_LOCKED, which Python has no names for before 3.11."""
_ASIDE_KIB = 131_072
"""Most memory of a catalog that `aside` builds, in KiB: 300,000 dumps."""

_HELD: ContextVar[tuple[Path, sqlite3.Connection, sqlite3.Connection] | None] = ContextVar("_HELD", default=None)
"""A catalog that a block keeps open: its path, its writing and its reading connection."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[CatalogWriter]:
    """Open a write transaction on the catalog, for the indexer."""
    from actordbg.catalog.statements import CatalogWriter

    with plain_transaction(path) as connection:
        yield CatalogWriter(connection)


@contextlib.contextmanager
def plain_transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a write transaction: commit at the end of the block, roll back if it raises. Uses the connection of `held_open`."""
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
    """Say on standard error what the block waits for if it takes long, and continue waiting."""
    late = threading.Timer(PATIENCE_S, _log.warning, ("waiting for another process, which holds %s", path))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextlib.contextmanager
def _held(path: Path, writer: sqlite3.Connection, reader: sqlite3.Connection) -> Iterator[None]:
    """Let all code within the block write this catalog on `writer` and read it on `reader`."""
    token = _HELD.set((path, writer, reader))
    try:
        yield
    finally:
        _HELD.reset(token)


@contextlib.contextmanager
def held_open(path: Path) -> Iterator[sqlite3.Connection]:
    """Keep the catalog open for the block. The last connection to close copies the journal into the file and waits for
    the disk; with one held, the many short transactions of an index do that once instead of each time. Readers also share a
    connection, since SQLite parses the whole schema for each new one.
    """
    with catalog_errors(path), contextlib.closing(connect_writable(path)) as writer:
        writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        with connect_readonly(path, alone=True) as reader, _held(path, writer, reader):
            yield writer


@contextlib.contextmanager
def aside(path: Path) -> Iterator[sqlite3.Connection]:
    """Build a new catalog for `path` in memory; beyond `_ASIDE_KIB` in a temporary file that no other process sees.

    Within the block, all code that reads or writes the catalog at `path` gets the new one. `copy_into` puts it in place.
    """
    with catalog_errors(path), contextlib.closing(sqlite3.connect("", isolation_level=None)) as made:
        made.executescript(f"{_SAFE} PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; PRAGMA cache_size = -{_ASIDE_KIB}")
        with _held(path, made, made):
            yield made


def copy_into(made: sqlite3.Connection, path: Path) -> None:
    """Replace the contents of the catalog at `path` in one transaction: readers see the old or the new contents."""

    def busy(status: int, *_: int) -> None:
        if status in _BUSY:  # the lock was waited for already
            raise sqlite3.OperationalError("database is locked")

    with catalog_errors(path), contextlib.closing(connect_writable(path)) as target:
        mode = journal_mode(path)
        if mode == "wal" and path.stat().st_size == 0:  # nothing to lose, and the change of the journal waits for the disk
            target.execute("PRAGMA synchronous = OFF")
        with patiently(path):
            target.execute("BEGIN IMMEDIATE")
        target.execute("ROLLBACK")
        made.backup(target, progress=busy)
        target.execute("PRAGMA synchronous = NORMAL")
        with contextlib.suppress(sqlite3.OperationalError):  # a file that other processes have open keeps its journal
            target.execute(f"PRAGMA journal_mode = {mode}")


def connect_writable(path: Path) -> sqlite3.Connection:
    """Open a plain connection without implicit transactions; create the file if there is none."""
    refuse_odd(path)
    if not path.exists():
        os.close(open_regular(path, os.O_CREAT | os.O_RDWR))
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.executescript(f"{_SAFE} PRAGMA synchronous = NORMAL; PRAGMA cache_size = -65536")
    return connection


@contextlib.contextmanager
def connect_readonly(path: Path, *, alone: bool = False) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection, closed at the end of the block, or share that of `held_open`. Errors become CatalogProblem.

    alone: do not share.
    """
    held = _HELD.get()
    if held is not None and held[0] == path and not alone:
        with catalog_errors(path):
            yield held[2]
        return
    refuse_odd(path)
    with catalog_errors(path):
        if os.path.exists(f"{path}-journal") and is_writable(path):
            with contextlib.closing(connect_writable(path)) as writer:  # SQLite rolls back what a killed writer left
                writer.execute("SELECT count(*) FROM sqlite_master").fetchone()
        uri = f"file:{quote(str(path))}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            connection.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; PRAGMA query_only = ON")
            yield connection


def odd_parts(path: Path) -> list[Path]:
    """Return the paths of a catalog and its journals that are not regular files: SQLite waits for a FIFO and follows a link."""
    irregular = []
    for part in (Path(f"{path}{suffix}") for suffix in _PARTS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the last connection removes its journal
            if not stat.S_ISREG(part.lstat().st_mode):
                irregular.append(part)
    return irregular


def refuse_odd(path: Path, *, folders_alone: bool = False) -> None:
    """Raise CatalogProblem if the catalog or a journal is not a regular file. folders_alone: only if it is a folder."""
    for part in odd_parts(path):
        folder = part.is_dir() and not part.is_symlink()
        if folder or not folders_alone:
            what = "a folder" if folder else "a link, a FIFO or a device"
            raise CatalogProblem(f"{part} is {what}, not a file", hint=_FOLDER if folder else REBUILD)


def remove(path: Path) -> None:
    """Remove a catalog and its journals, also links and FIFOs in their place."""
    with catalog_errors(path):
        for suffix in _PARTS:
            Path(f"{path}{suffix}").unlink(missing_ok=True)


@contextlib.contextmanager
def catalog_errors(path: Path) -> Iterator[None]:
    """Turn every sqlite3 error of the block into a CatalogProblem that says what to do."""
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
    """Check whether this process may write a catalog at `path`, by permissions and mounts, not by free space."""
    effective = os.access in os.supports_effective_ids
    return os.access(path.parent, os.W_OK | os.X_OK, effective_ids=effective) and (
        os.access(path, os.W_OK, effective_ids=effective) or not path.exists()
    )


def decoded(columns: Mapping[str, Column], rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows of a query for these columns as dicts by name: flags as bool, JSON parsed."""
    flags, texts = ([name for name, column in columns.items() if column.type is kind] for kind in (bool, dict))
    try:
        for values in rows:
            row = dict(zip(columns, values, strict=True))
            for name in flags:
                if row[name] is not None:
                    row[name] = row[name] != 0
            for name in texts:
                if row[name] is not None:
                    row[name] = strict_json(row[name], json.loads)
            yield row
    except (TypeError, ValueError) as error:
        raise CatalogProblem(f"the catalog has a damaged row: {error}", hint=REBUILD) from None


def _hint(message: str) -> str:
    if is_locked(message):
        return "another actordbg is writing the catalog: try again in a moment"
    if not _CANNOT_WRITE.match(message):
        return REBUILD
    return "make room on that disk" if "full" in message else _WRITABLE


def is_locked(message: str) -> bool:
    """Check whether SQLite's message says that another process holds the catalog."""
    return bool(_LOCKED.search(message))


def journal_mode(path: Path) -> str:
    """Return the journal mode for the file system of `path`: "wal" on a local disk, "delete" on a network file system."""
    return "delete" if _NETWORK.match(file_system(path.parent)) else "wal"
