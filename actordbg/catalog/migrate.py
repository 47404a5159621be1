"""Makes the catalog's schema, or refuses to touch what is not a catalog of this program.

    no catalog            made by `migrations/head.sql`: filled in memory, and put in its place whole (`make_anew`)
    at HEAD               nothing; found out with one small read
    earlier               made anew from the store's files, as `index --rebuild` does: the catalog holds nothing of its own
    without a setting     the same: a setting is a column of `replay`
    newer, or not ours    refused, untouched; so is one with views or triggers, which could make a query do anything
    damaged               refused; `actordbg index --rebuild` makes it again

The schema lies in `migrations/` of the source tree and in `actordbg/_migrations` of an installed package. Revisions are
numbers ("0011"), so that newer and older can be told apart without knowing the newer program's tables.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from actordbg.base.errors import CatalogProblem, NewerCatalog, UnwritableCatalog
from actordbg.catalog import connections as engine
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.store_files import OddFile, open_regular
from actordbg.store.layout import Store

HEAD = "0011"
"""The revision that this program reads and writes."""

SCRIPT = "head.sql"
"""The schema of HEAD."""
STATEMENT_END = ";\n\n"

_INDEX = "CREATE INDEX ix_dump_"
_SEARCHED = ("ix_dump_caller_seq_len", "ix_dump_pack")
"""The indexes of `dump` that an index of files needs. The others are made behind the rows, in a quarter of the time."""

_UPGRADE = "upgrade actordbg: pip install --upgrade actordbg (or remove catalog.db and run `actordbg index`); nothing was touched"


def earlier(path: Path) -> str | None:
    """Returns the revision of a catalog that an earlier actordbg made, which must be made anew; None for any other.

    One of HEAD that lacks the column of a setting counts as earlier. Raises CatalogProblem for a newer one, or for no catalog.
    """
    found, columns = _look(path)
    if found is not None and _is_newer(found):
        raise newer(path, found)
    complete = found == HEAD and columns >= {setting.stored for setting in SETTINGS.values()}
    return None if complete else found


def ensure(store: Store) -> None:
    """Makes an empty catalog where there is none. Safe to call from many processes. Raises CatalogProblem."""
    path = store.catalog_path
    if revision(path) is None:
        with locked(store):
            if revision(path) is None:
                make(path)


def make(path: Path) -> None:
    """Makes every table and index in an empty catalog; the caller holds the lock."""
    with engine.held_open(path) as connection:
        engine.set_journal(connection, engine.journal_mode(path))
        with engine.plain_transaction(path):
            _execute(connection)


def make_anew(store: Store, fill: Callable[[], None], *, rebuild: bool) -> bool:
    """Make the catalog and `fill` it aside, then put it in its place whole. False, without `rebuild`, where one is at HEAD.

    A kill leaves the old catalog, or none. Until the end readers see the old one, and others who would make one wait. A damaged
    one is replaced. A newer one is refused, as everywhere.
    """
    path = store.catalog_path
    with locked(store):
        if not rebuild and revision(path) is not None and earlier(path) is None:
            return False
        engine.refuse_odd(path, folders_alone=True)
        _refuse_newer(path)
        later = [one for one in _statements() if one.startswith(_INDEX) and not any(name in one for name in _SEARCHED)]
        with engine.aside(path) as made:
            with engine.plain_transaction(path):
                _execute(made, later)
            fill()
            with engine.plain_transaction(path):
                for statement in later:
                    made.execute(statement)
            _put_in_place(made, path, rebuild)
        return True


def _put_in_place(made: sqlite3.Connection, path: Path, rebuild: bool) -> None:
    try:
        engine.copy_into(made, path)
    except CatalogProblem as error:
        if not rebuild or isinstance(error, UnwritableCatalog) or engine.is_locked(error.message):
            raise
        _refuse_newer(path)
        engine.remove(path)
        engine.copy_into(made, path)


def _execute(connection: sqlite3.Connection, later: Sequence[str] = ()) -> None:
    """Execute the statements of the schema but those of `later`."""
    for statement in _statements():
        if statement not in later:
            connection.execute(statement)


def _statements() -> list[str]:
    return (scripts_folder() / SCRIPT).read_text().split(STATEMENT_END)[:-1]


def revision(path: Path) -> str | None:
    """The revision of the catalog at `path`; None for no catalog or an empty one. Raises CatalogProblem if it is not one."""
    return _look(path)[0]


def _look(path: Path) -> tuple[str | None, set[str]]:
    """The revision, and the columns of `replay`, one for each setting among them."""
    with engine.catalog_errors(path):
        if not path.exists() or path.stat().st_size == 0:
            return None, set()
    with engine.connect_readonly(path) as connection:
        _refuse_programs(connection, path)
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        try:  # after the names: whoever makes the catalog meanwhile makes all of it at once
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            row = None
        if row is None and not names <= {"alembic_version"}:
            raise CatalogProblem(f"{path} is a database, but not a catalog of actordbg", hint=engine.REBUILD)
        return str(row[0]) if row is not None else None, {row[1] for row in connection.execute("PRAGMA table_info(replay)")}


def scripts_folder() -> Path:
    """Where the migrations are: inside the installed package, else in the source tree."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise CatalogProblem("actordbg's migrations are missing from this installation", hint="install actordbg again")


def _is_newer(found: str) -> bool:
    return found != HEAD and (not found.isdecimal() or int(found) > int(HEAD))


def newer(path: Path, found: str) -> NewerCatalog:
    """The error for a revision that comes after `head`, or has a name such as no revision has had so far."""
    message = f"{path} has revision {found:.40}, written by a newer actordbg; this one knows revisions up to {HEAD}"
    return NewerCatalog(message, hint=_UPGRADE)


def _refuse_programs(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database in which a query or a write runs what somebody wrote into its schema."""
    sql = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR sql LIKE 'create virtual%' LIMIT 1"
    found = connection.execute(sql).fetchone()
    if found:
        raise CatalogProblem(f"{path} is not a catalog of actordbg: it has a {found[0]} {found[1]!r:.60}", hint=engine.REBUILD)


def _refuse_newer(path: Path) -> None:
    try:
        found = revision(path)
    except CatalogProblem:
        return
    if found is not None and _is_newer(found):
        raise newer(path, found)


@contextlib.contextmanager
def locked(store: Store) -> Iterator[None]:
    """One process at a time makes or empties the catalog; the lock goes with the process that holds it."""
    path = store.catalog_path.with_name("catalog.lock")
    try:
        descriptor = open_regular(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        kind = CatalogProblem if isinstance(error, OddFile | IsADirectoryError) else UnwritableCatalog
        raise kind(f"cannot open {path}: {error.strerror}", hint="the lock must be a file, its folder writable for you") from None
    try:
        try:
            with engine.patiently(path):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise UnwritableCatalog(
                f"cannot lock {path}: {error.strerror}",
                hint="the store's file system has no locks, which a catalog needs: use a store on another one",
            ) from None
        yield
    finally:
        os.close(descriptor)
