"""Creates the catalog's schema, or refuses a database that is not a catalog of this program.

    no catalog            created from `head.sql`: filled in memory, and put in place whole (`make_anew`)
    at HEAD               unchanged; one small read finds this out
    earlier               rebuilt from the store's files, as by `index --rebuild`: everything in the catalog comes from them
    without a setting     also rebuilt: a setting is a column of `replay`
    newer, or not ours    refused, untouched; also refused with views or triggers, which could make a query do anything
    damaged               refused; `actordbg index --rebuild` rebuilds it

The schema lies beside this module. Revisions are numbers ("0014"), so that newer and older can be distinguished without knowing
the newer program's tables.

A store may belong to another user, or lie on a read-only mount or a full disk, or a newer actordbg may have written its catalog.
The catalog is a cache, so reading commands can use another (`with_a_catalog`).

    the store's catalog                               if it can be written
    $XDG_CACHE_HOME/actordbg/catalogs/<hash>/         else a *private catalog* of this user, by the store's real path
    /dev/shm/actordbg-<uid>/catalogs/<hash>/          if that cannot be written either; then in the folder for temporary files

A private catalog begins as a copy of the store's, if no process is writing that, and follows the files from there like any other.
Its folders are 0700 and owned by this user; folders that another user made are skipped. A process holds a shared lock on
the private catalog that it uses. A process that makes a new one removes unused ones: those of stores that are gone or writable
again, and those unused for a month.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from actordbg.base.errors import CatalogProblem, NewerCatalog, UnwritableCatalog
from actordbg.base.owners import user_folder
from actordbg.catalog import connections as engine
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.store_files import OddFile, make_folder, open_regular, read_regular
from actordbg.store.layout import Store

HEAD = "0014"
"""The revision that this program reads and writes."""

SCRIPT = Path(__file__).with_name("head.sql")
"""The schema of HEAD."""
STATEMENT_END = ";\n\n"

_INDEX = "CREATE INDEX ix_dump_"
_SEARCHED = ("ix_dump_caller_seq_len", "ix_dump_pack")
"""The indexes of `dump` that indexing needs. The others are created after the rows, in a quarter of the time."""


def earlier(path: Path) -> str | None:
    """Return the revision of a catalog that an earlier actordbg made, which must be rebuilt; None for any other.

    A catalog at HEAD that lacks the column of a setting counts as earlier. Raises NewerCatalog for a revision after HEAD, or with
    a name unlike that of any revision so far, CatalogProblem for a database that is not a catalog.
    """
    version, columns = _look(path)
    if version is not None and version != HEAD and (not version.isdecimal() or int(version) > int(HEAD)):
        raise NewerCatalog(
            f"{path} has revision {version:.40}, written by a newer actordbg (this version reads up to {HEAD})",
            hint="upgrade actordbg: pip install --upgrade actordbg (or remove catalog.db and run `actordbg index`); "
            "nothing was touched",
        )
    complete = version == HEAD and columns >= {setting.stored for setting in SETTINGS.values()}
    return None if complete else version


def make_anew(store: Store, fill: Callable[[], None], *, rebuild: bool) -> bool:
    """Create the catalog and `fill` it aside, then put it in place whole. Returns False, without `rebuild`, if it is at HEAD.

    A kill leaves the old catalog, or none. Until the end, readers see the old catalog, and other processes that would create it
    wait. A damaged catalog is replaced; a newer one is refused, as everywhere.
    """
    path = store.catalog_path
    with locked(store):
        if not rebuild and revision(path) is not None and earlier(path) is None:
            return False
        engine.refuse_odd(path, folders_alone=True)
        _refuse_newer(path)
        statements = SCRIPT.read_text().split(STATEMENT_END)[:-1]
        later = [sql for sql in statements if sql.startswith(_INDEX) and not any(name in sql for name in _SEARCHED)]
        with engine.aside(path) as made:
            for sql in statements:
                if sql not in later:
                    made.execute(sql)
            fill()
            for sql in later:
                made.execute(sql)
            try:
                engine.copy_into(made, path)
            except CatalogProblem as error:
                if not rebuild or isinstance(error, UnwritableCatalog) or engine.is_locked(error.message):
                    raise
                _refuse_newer(path)
                engine.remove(path)
                engine.copy_into(made, path)
        return True


def revision(path: Path) -> str | None:
    """Return the revision of the catalog at `path`; None if it is missing or empty. CatalogProblem if it is not a catalog."""
    return _look(path)[0]


def _look(path: Path) -> tuple[str | None, set[str]]:
    """Read the revision, and the columns of `replay`, which include one for each setting.

    Refuses a database with views, triggers or virtual tables: a query or a write would run code from its schema.
    """
    with engine.catalog_errors(path):
        if not path.exists() or path.stat().st_size == 0:
            return None, set()
    with engine.connect_readonly(path) as connection:
        sql = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'create virtual%' LIMIT 1"
        if program := connection.execute(sql).fetchone():
            raise CatalogProblem(
                f"{path} is not a catalog of actordbg: it has a {program[0]} {program[1]!r:.60}", hint=engine.REBUILD
            )
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        try:  # after the names: a process that creates the catalog meanwhile creates all of it at once
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            row = None
        if row is None and not names <= {"alembic_version"}:
            raise CatalogProblem(f"{path} is a database, but not a catalog of actordbg", hint=engine.REBUILD)
        return str(row[0]) if row is not None else None, {row[1] for row in connection.execute("PRAGMA table_info(replay)")}


def _refuse_newer(path: Path) -> None:
    try:
        earlier(path)
    except NewerCatalog:
        raise
    except CatalogProblem:
        return


@contextlib.contextmanager
def locked(store: Store) -> Iterator[None]:
    """Hold the lock under which one process at a time creates or empties the catalog; it ends with its process."""
    path = store.catalog_path.with_name("catalog.lock")
    try:
        descriptor = open_regular(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        kind = CatalogProblem if isinstance(error, OddFile | IsADirectoryError) else UnwritableCatalog
        raise kind(f"cannot open {path}: {error.strerror}", hint="make its folder writable, and the lock a file") from None
    try:
        try:
            with engine.patiently(path):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise UnwritableCatalog(
                f"cannot lock {path}: {error.strerror}",
                hint="use a store on a file system with locks, which a catalog needs",
            ) from None
        yield
    finally:
        os.close(descriptor)


T = TypeVar("T")
UNUSED_S = 30 * 86400.0
"""Seconds without use after which a private catalog is removed."""
SETTLED_S = 2.0
"""Seconds without a change after which a catalog may be copied: file systems keep coarse times."""
_held: dict[Path, int] = {}
"""The private catalogs that this process uses, each with the descriptor of its shared lock."""


def with_a_catalog(store: Store, work: Callable[[], T], *, newer_too: bool = False) -> T:
    """Do `work` on the store's catalog; if that cannot be written, set `store.catalog_path` to a private one, and work on that.

    newer_too: also use a private catalog if a newer actordbg wrote the store's. Other problems of a writable catalog are raised.
    """
    if is_private(store):
        return work()
    own = store.catalog_path
    problem: CatalogProblem | None = None
    if engine.is_writable(own):
        try:
            return work()
        except (UnwritableCatalog, NewerCatalog) as error:
            if isinstance(error, NewerCatalog) and not newer_too:
                raise
            problem = error
    for folder in places(store):
        try:
            _hold(folder, store)
            store.catalog_path = folder / "catalog.db"
            answer = _begun(store, own, work)
        except (UnwritableCatalog, OSError):
            store.catalog_path = own
            continue
        reason = "this store's catalog cannot be written" + ("" if problem is None else f" ({problem.message})")
        if isinstance(problem, NewerCatalog):
            reason = f"{problem.message}: upgrade actordbg (pip install --upgrade actordbg)"
        logging.getLogger("actordbg").warning("%s; this command uses %s", reason, store.catalog_path)
        return answer
    reason = problem.message if problem else f"{own} cannot be written"
    raise CatalogProblem(
        f"{reason}; a private catalog cannot be written anywhere either", hint="set XDG_CACHE_HOME to a writable folder"
    )


def is_private(store: Store) -> bool:
    """Check whether this process uses a private catalog for the store."""
    return store.catalog_path.parent != store.root


def places(store: Store) -> Iterator[Path]:
    """Yield the folders where a private catalog of this store may lie, the best first."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(store.root))).hexdigest()[:24]
    bases = [user_folder("XDG_CACHE_HOME", "~/.cache")]
    for folder in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        bases += [Path(folder, f"actordbg-{os.geteuid()}")] if os.path.isdir(folder) else []
    yield from (base / "catalogs" / name for base in bases)


def _begun(store: Store, seed: Path, work: Callable[[], T]) -> T:
    """Do `work` on the private catalog, which begins as a copy of `seed`; if the copy is damaged or newer, begin empty."""
    if not store.catalog_path.exists():
        with locked(store):
            if not store.catalog_path.exists():
                _copy(seed, store.catalog_path)
    try:
        return work()
    except UnwritableCatalog:
        raise
    except CatalogProblem:
        with locked(store):
            engine.remove(store.catalog_path)
        return work()


def _copy(source: Path, target: Path) -> None:
    """Copy a catalog that no process is writing or wrote just now. Does nothing if it cannot be read."""
    part = Path(f"{target}.part")
    with contextlib.suppress(OSError):
        before = os.lstat(source)
        journals = [journal for suffix in ("-wal", "-journal") if os.path.lexists(journal := f"{source}{suffix}")]
        if time.time() - before.st_mtime < SETTLED_S or any(os.lstat(journal).st_size for journal in journals):
            return
        with (
            open(open_regular(source), "rb") as file,
            open(open_regular(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as copy,
        ):
            shutil.copyfileobj(file, copy, 2**20)
        after = os.lstat(source)
        if (before.st_ino, before.st_mtime_ns, before.st_size) == (after.st_ino, after.st_mtime_ns, after.st_size):
            part.replace(target)
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def _hold(folder: Path, store: Store) -> None:
    """Make the folder if it is missing, and hold a shared lock on it while this process lives; OSError if that fails."""
    new = not folder.is_dir()
    make_folder(folder)
    for own in (folder.parent.parent, folder.parent, folder):
        seen = os.lstat(own)
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
            raise PermissionError(1, "not a folder of this user", str(own))
        if seen.st_mode & 0o077:
            own.chmod(0o700)
    if folder not in _held:
        descriptor = _open_lock(folder)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[folder] = descriptor
    os.utime(_held[folder])
    if new:
        (folder / "store").write_bytes(os.fsencode(os.path.realpath(store.root)))
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and not other.is_symlink():
                _tidy(other)


def _open_lock(folder: Path) -> int:
    return open_regular(folder / "in-use", os.O_RDWR | os.O_CREAT)


def _tidy(folder: Path) -> None:
    """Remove a private catalog that no process holds, if it was unused for long, or its store is gone or has a writable
    catalog again. Ignores files that cannot be removed.
    """
    with contextlib.suppress(OSError):
        if time.time() - (folder / "in-use").stat().st_mtime <= UNUSED_S:
            root = Path(os.fsdecode(read_regular(folder / "store")))
            if (root / "FORMAT").is_file() and not engine.is_writable(root / "catalog.db"):
                return
        descriptor = _open_lock(folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)
