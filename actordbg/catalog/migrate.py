"""Creates the catalog's schema, or refuses a database that is not a catalog.

    no catalog            created from `head.sql`: filled in memory, and put in place whole (`make_anew`)
    at HEAD               unchanged; one small read finds this out
    a released revision   migrated to HEAD by alembic, where it is installed (`upgraded`)
    any other revision    rebuilt from the store's files, as by `index --rebuild`: everything in the catalog comes from them
    without a setting     also rebuilt: a setting is a column of `replay`
    not ours              refused, untouched; also refused with triggers, or a view in a table's place, which could make a
                          query do anything. Other views are the user's
    damaged               refused; `actordbg index --rebuild` rebuilds it

The schema lies beside this module.

A store may belong to another user, or lie on a read-only mount or a full disk. The catalog is a cache, so reading commands can
use another (`with_a_catalog`).

    the store's catalog                               if it can be written
    $XDG_CACHE_HOME/actordbg/catalogs/<hash>/         else a *private catalog* of this user, by the store's real path

A private catalog is built from the files like any other. Its folders are 0700. A process that makes another removes those that
were not used for a month.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from actordbg.base.errors import CatalogProblem, UnwritableCatalog
from actordbg.base.owners import is_own, user_cache
from actordbg.catalog import connections as engine
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.store_files import OddFile, make_folder, open_regular
from actordbg.store.layout import Store

HEAD = "0020"
"""The revision that this program reads and writes."""

SCRIPT = Path(__file__).with_name("head.sql")
"""The schema of HEAD."""
STATEMENT_END = ";\n\n"

MIGRATIONS = (Path(__file__).parents[1] / "_migrations", Path(__file__).parents[2] / "migrations")
"""Alembic's scripts, in an installed package and in a checkout."""
VIEW = "dump_and_caller"

_INDEX = "CREATE INDEX ix_dump_"
_SEARCHED = ("ix_dump_caller_seq_len", "ix_dump_pack")
"""The indexes of `dump` that indexing needs. The others are created after the rows, in a quarter of the time."""


def make_anew(store: Store, fill: Callable[[], None], *, rebuild: bool) -> bool:
    """Create the catalog and `fill` it aside, then put it in place whole. Returns False, without `rebuild`, if it is at HEAD.

    A kill leaves the old catalog, or none. Until the end, readers see the old catalog, and other processes that would create it
    wait. A damaged catalog is replaced.
    """
    path = store.catalog_path
    with locked(store):
        if not rebuild and look(path)[1]:
            return False
        engine.refuse_odd(path, folders_alone=True)
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
                engine.remove(path)
                engine.copy_into(made, path)
        return True


def upgraded(store: Store, revision: str | None) -> bool:
    """Migrate the catalog of a released revision to HEAD by alembic, in one transaction. Returns whether the program can use it.

    False without alembic, without a migration from there, and if one fails: then the catalog is as it was. CatalogProblem if it
    cannot be opened or locked, UnwritableCatalog if it cannot be written.
    """
    folder = next((place for place in MIGRATIONS if place.is_dir()), None)
    try:
        from alembic import command
        from alembic.config import Config
        from alembic.script import ScriptDirectory
        from sqlalchemy import create_engine
        from sqlalchemy.exc import SQLAlchemyError
        from sqlalchemy.pool import StaticPool
    except ImportError:
        return False
    if folder is None:
        return False
    path, config = store.catalog_path, Config()
    config.set_main_option("script_location", os.fspath(folder))
    if revision not in {script.revision for script in ScriptDirectory(os.fspath(folder)).walk_revisions()}:
        return False
    with locked(store), engine.catalog_errors(path), contextlib.closing(engine.connect_writable(path)) as connection:
        if look(path)[0] != revision:  # another process was quicker
            return look(path)[1]
        alchemy = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool, pool_reset_on_return=None)
        try:
            with alchemy.connect() as there, there.begin():
                connection.execute("BEGIN IMMEDIATE")  # sqlite3 begins none before a CREATE or ALTER
                config.attributes["connection"] = there
                command.upgrade(config, HEAD)
        except SQLAlchemyError:
            return False
    return look(path)[1]


def look(path: Path) -> tuple[str | None, bool]:
    """Return the revision of the catalog at `path` (None if it is missing or empty), and whether this program can use it: it is
    at HEAD, with a column for each setting.

    Raises CatalogProblem for a database that is not a catalog, or that has triggers, virtual tables, or a view in a table's
    place: a query or a write would run code from its schema.
    """
    with engine.catalog_errors(path):
        if not path.exists() or path.stat().st_size == 0:
            return None, False
    with engine.connect_readonly(path) as connection:
        sql = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'create virtual%'"
        programs = [found for found in connection.execute(sql) if found[0] != "view" or _is_read(found[1])]
        if programs:
            program = programs[0]
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
        columns = {column[1] for column in connection.execute("PRAGMA table_info(replay)")}
        settings = {setting.stored for setting in SETTINGS.values()}
        return (None, False) if row is None else (str(row[0]), str(row[0]) == HEAD and columns >= settings)


def _is_read(view: str) -> bool:
    """Return whether commands read a table of this name."""
    return view != VIEW and re.search(rf"CREATE TABLE {re.escape(view)} ", SCRIPT.read_text(), re.IGNORECASE) is not None


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


def with_a_catalog(store: Store, work: Callable[[], T]) -> T:
    """Do `work` on the store's catalog; if that cannot be written, set `store.catalog_path` to a private one and use that."""
    if is_private(store):
        return work()
    own, problem = store.catalog_path, ""
    if engine.is_writable(own):
        try:
            return work()
        except UnwritableCatalog as error:
            problem = error.message
    folder = private_folder(store)
    try:
        _prepare(folder)
        store.catalog_path = folder / "catalog.db"
        answer = _repaired(store, work)
    except (UnwritableCatalog, OSError) as error:
        store.catalog_path = own
        why = problem or f"{own} cannot be written"
        raise CatalogProblem(
            f"{why}; a private catalog in {folder} cannot be written either: {error}",
            hint="set XDG_CACHE_HOME to a writable folder",
        ) from None
    reason = "this store's catalog cannot be written"
    if problem:
        reason += f" ({problem})"
    logging.getLogger("actordbg").warning("%s; this command uses %s", reason, store.catalog_path)
    return answer


def is_private(store: Store) -> bool:
    """Check whether this process uses a private catalog for the store."""
    return store.catalog_path.parent != store.root


def private_folder(store: Store) -> Path:
    """Return the folder of this user's private catalog of a store."""
    place = os.fsencode(os.path.realpath(store.root))
    name = hashlib.sha256(place).hexdigest()[:24]
    return user_cache() / "catalogs" / name


def _repaired(store: Store, work: Callable[[], T]) -> T:
    """Do `work` on the private catalog; if it is damaged, begin with an empty one."""
    try:
        return work()
    except UnwritableCatalog:
        raise
    except CatalogProblem:
        with locked(store):
            engine.remove(store.catalog_path)
        return work()


def _prepare(folder: Path) -> None:
    """Make the folder of a private catalog if it is missing, and note its use; OSError if that fails."""
    if not folder.is_dir():
        make_folder(folder)
        for other in folder.parent.iterdir():
            with contextlib.suppress(OSError):  # another process removed it
                if time.time() - os.lstat(other).st_mtime > UNUSED_S:
                    shutil.rmtree(other, ignore_errors=True)
    for place in (folder.parent, folder):
        if not is_own(os.lstat(place).st_uid):
            raise PermissionError(1, "it belongs to another user", str(place))
    os.utime(folder)
