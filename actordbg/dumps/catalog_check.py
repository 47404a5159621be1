"""The check of the catalog: a sound database whose rows are what the files say. It writes nothing into the store.

A copy of the catalog is brought up to date in a folder of its own, whose `dumps`, `packs` and so on are links to the store's; a
second catalog is made there from nothing. Both must have the same rows. What differs, no refresh will ever mend.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from actordbg.base.errors import CatalogProblem, StoreProblem
from actordbg.catalog import connections as engine
from actordbg.catalog import migrate
from actordbg.catalog.indexer import FOLDERS, refresh
from actordbg.dumps.finding import Finding
from actordbg.store.layout import Store

_UNLIKE = ("alembic_version", "scanned_folder", "read_file", "caller")
"""Tables that say how the index got there, and the callers, whose columns are compared as those of their dumps."""
_NUMBERS = ("id", "last_result", "caller")
"""Columns that hold numbers of rows."""
_WITH = {"dump": ("dump", "caller")}
"""Tables whose rows go on in another one."""


def catalog(store: Store, deep: bool) -> Iterator[Finding]:
    """Is it a database, of this program's revision, and with `deep` with the rows that the files give?"""
    odd = engine.odd_parts(store.catalog_path)
    yield from (Finding(path, "damaged-catalog", "it is not a file") for path in odd)
    if odd or not os.path.lexists(store.catalog_path):
        return
    with tempfile.TemporaryDirectory(prefix="actordbg-fsck-") as folder:
        copy = _beside(store, Path(folder, "copy"))
        try:
            yield from _copied(store, copy, Path(folder), deep)
        except (CatalogProblem, StoreProblem, OSError) as error:
            yield Finding(store.catalog_path, "damaged-catalog", str(error).replace(str(copy.root), str(store.root)))


def _copied(store: Store, copy: Store, folder: Path, deep: bool) -> Iterator[Finding]:
    try:
        for suffix in ("", "-wal", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{store.catalog_path}{suffix}", f"{copy.catalog_path}{suffix}", follow_symlinks=False)
    except OSError as error:
        yield Finding(store.catalog_path, "unreadable", f"no copy of it can be made, so it was not checked: {error.strerror}")
        return
    found = migrate.earlier(copy.catalog_path)
    with engine.catalog_errors(copy.catalog_path), contextlib.closing(sqlite3.connect(copy.catalog_path)) as connection:
        wrong = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    if wrong != ["ok"]:
        yield Finding(store.catalog_path, "damaged-catalog", wrong[0][:200])
    elif found:
        yield Finding(store.catalog_path, "other-catalog", f"revision {found}, this actordbg has {migrate.HEAD}")
    elif deep:
        yield from _compared(store, copy, folder)


def _beside(store: Store, root: Path) -> Store:
    """A store without a catalog whose folders are the store's."""
    made = Store(root).create()
    for name in FOLDERS:
        if os.path.isdir(store.root / name):
            (root / name).symlink_to(store.root / name)
    return made


def _compared(store: Store, copy: Store, folder: Path) -> Iterator[Finding]:
    refresh(copy)
    fresh = _beside(store, folder / "fresh")
    refresh(fresh)
    ours, wanted = _rows(copy.catalog_path), _rows(fresh.catalog_path)
    unlike = sorted(name for name in wanted if ours.get(name) != wanted[name])
    if unlike:
        yield Finding(store.catalog_path, "stale-catalog", f"other rows in {', '.join(unlike)}")


def _rows(path: Path) -> dict[str, set[tuple[object, ...]]]:
    """The rows of every table that is made from files, without the numbers of rows."""
    tables = {}
    with engine.catalog_errors(path), contextlib.closing(sqlite3.connect(path)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in (name for name in names if name not in _UNLIKE and not name.startswith("sqlite_")):
            both = _WITH.get(table, (table,))
            columns = [row[1] for part in both for row in connection.execute(f'PRAGMA table_info("{part}")')]
            plain = ", ".join(f'"{name}"' for name in sorted(columns) if name not in _NUMBERS)
            joined = f'"{table}"' + "".join(f' JOIN "{part}" ON "{part}".id = "{table}"."{part}"' for part in both[1:])
            tables[table] = set(connection.execute(f"SELECT {plain} FROM {joined}"))
    return tables
