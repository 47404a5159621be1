"""Checks of a store as folders (FORMAT, names, types, permissions, owners, leftovers), and of its catalog.

Of other files only FORMAT is read. The catalog is sound if its rows are what the files say: a copy of it is brought
up to date in a folder of its own, whose `dumps`, `packs` and so on are links to the store's; a second catalog is made
there from nothing. Both must have the same rows. What differs, no refresh will ever mend. Nothing is written into the
store.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from actordbg.base.errors import CatalogProblem, StoreProblem
from actordbg.catalog import connections as engine
from actordbg.catalog import migrate
from actordbg.catalog.indexer import FOLDERS, refresh
from actordbg.dumps.finding import Finding
from actordbg.dumps.recover import is_forsaken
from actordbg.formats.store_files import FORMAT, KINDS, TEMPORARY, read_regular
from actordbg.store.layout import UNPRINTABLE, Store

_FILES = re.compile(
    r"FORMAT|control\.json|catalog\.db(-wal|-shm|-journal)?|catalog\.lock|catalog\.\w+\.bak\.db|controls/[^/]+\.json"
    r"|(counters|weights)/[^/]+/[^/]+\.json|dumps/[^/]+/rank\d{4,}/[^/]+\.safetensors\.zst|packs/\.lock|packs/[^/]+/[^/]+\.pack"
    r"|replays/[^/]+/(?!tensors$)[^/]+|replays/[^/]+/tensors/[^/]+\.safetensors|(comparisons|noise|matrices|events)/[^/]+\.json"
    r"|memory/[^/]+\.(json|csv)|trainchecks/[^/]+/check\.json|trainchecks/[^/]+/cell-\d+\.\d+/(?!tensors$)[^/]+|trainchecks/[^/]+/logs/(sft/)?[^/]+\.log"
    r"|backups/[0-9a-f]{64}/(actor\.py|origin\.json)"
)
_FOLDERS = re.compile(
    r"(controls|comparisons|noise|matrices|memory|events|models|reports|rings|quarantine|cache)|(counters|weights|packs|backups)(/[^/]+)?"
    r"|dumps(/[^/]+(/rank\d{4,})?)?|replays(/[^/]+(/tensors)?)?|trainchecks(/[^/]+(/logs(/sft)?|/cell-\d+\.\d+(/tensors)?)?)?"
)
_OWN_CHECKS = ("FORMAT", "catalog.db")
"""Whose type their own checks look at."""
_NOT_LOOKED_INTO = ("models", "reports", "rings", "quarantine", "cache")
_OTHERS, _OWNERS_FILE, _OWNERS_FOLDER = 0o007, 0o400, 0o500


def format_file(store: Store, deep: bool) -> Iterator[Finding]:
    """FORMAT: a store of a format that this program reads."""
    path = store.format_path
    try:
        version = json.loads(read_regular(path))["format"]
    except FileNotFoundError:
        yield Finding(path, "no-format")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield Finding(path, "bad-format", str(error))
    else:
        if type(version) is not int or version < FORMAT:
            yield Finding(path, "bad-format", f"it says format {version!r:.40}")
        elif version > FORMAT:
            yield Finding(path, "newer-store", f"it has format {version}, this actordbg reads {FORMAT}")


def layout(store: Store, deep: bool) -> Iterator[Finding]:
    """Every name of the store: is it one of a store, of the right type, and private?"""
    state = os.stat(store.root)
    if state.st_mode & stat.S_IWOTH:
        yield Finding(store.root, "open-mode", f"it has mode {stat.S_IMODE(state.st_mode):o}: anybody may put files into it")
    yield from _listed(store.root, "", state.st_uid)


def _listed(folder: Path, below: str, owner: int) -> Iterator[Finding]:
    """Say what is odd about each name of a folder, and about what lies below it."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        yield Finding(folder, "unreadable", f"cannot be listed: {error.strerror}")
        return
    for name in names:
        path, relative = folder / name, f"{below}{name}"
        with contextlib.suppress(FileNotFoundError):
            yield from _entry(path, relative, os.lstat(path), owner)


def _entry(path: Path, relative: str, state: os.stat_result, owner: int) -> Iterator[Finding]:
    """Say what is odd about one name."""
    folder, regular = os.path.isdir(path), stat.S_ISREG(state.st_mode)
    file_name, folder_name = _FILES.fullmatch(relative), _FOLDERS.fullmatch(relative)
    if not path.name.isprintable():
        yield Finding(path, "odd-name", UNPRINTABLE)
    elif path.name.startswith(TEMPORARY) or (path.name.startswith("catalog.") and path.name.endswith(".part")):
        yield Finding(path, "temporary-file" if regular and is_forsaken(path.name, state) else "unfinished-file")
    elif folder and folder_name:
        if relative not in _NOT_LOOKED_INTO:
            yield from _modes(path, os.stat(path), owner)
            yield from _listed(path, f"{relative}/", owner)
    elif regular and file_name:
        yield from _modes(path, state, owner)
    elif relative in _OWN_CHECKS:
        return
    elif file_name or not (folder or regular) or (folder_name and "/" not in relative):
        what = KINDS.get(stat.S_IFMT(state.st_mode), "a file" if regular else "a device")
        yield Finding(path, "odd-file", f"it is {what}, not {'a file' if file_name else 'a folder'}")
    elif path.name[0] != ".":
        yield Finding(path, "foreign-file")


def _modes(path: Path, state: os.stat_result, owner: int) -> Iterator[Finding]:
    wanted = _OWNERS_FOLDER if stat.S_ISDIR(state.st_mode) else _OWNERS_FILE
    if state.st_mode & _OTHERS or state.st_mode & wanted != wanted:
        yield Finding(path, "open-mode", f"it has mode {stat.S_IMODE(state.st_mode):o}")
    if state.st_uid != owner:
        yield Finding(path, "foreign-owner", f"it belongs to user {state.st_uid}, the store to {owner}")


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
