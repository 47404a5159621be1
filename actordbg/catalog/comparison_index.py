"""The lab's part of the index: files of comparisons/, noise/ and matrices/ to rows.

A folder is listed again only if its modification time changed, and a file is read again only if its size or time did: a matrix
is replaced while it runs, the others are written once. Times younger than two seconds are not relied on.

Every comparison has a row in `comparison_run`. Of a pair (A, B) the newest one whose replays are both in the catalog is
*current*: its dumps are rows of `comparison`. Which one that is may change when a file comes or goes, and when a replay does, so
it is looked up at each refresh (one query), and only what changed is read.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem
from actordbg.catalog import connections as engine
from actordbg.formats.comparison_record import ComparisonRecord
from actordbg.formats.matrix_record import MatrixRecord
from actordbg.formats.noise_record import NoiseRecord
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from sqlalchemy import Connection

COMPARISONS, NOISE, MATRICES = "comparisons", "noise", "matrices"
_KINDS: dict[str, tuple[type[Any], str]] = {
    COMPARISONS: (ComparisonRecord, "comparison_id"),
    NOISE: (NoiseRecord, "noise_id"),
    MATRICES: (MatrixRecord, "matrix_id"),
}
_NOT_AS_IT_SHOULD_BE = """
    WITH wanted AS (
        SELECT comparison_id, max(created_at || comparison_id) FROM comparison_run AS c
        WHERE EXISTS (SELECT 1 FROM replay AS p WHERE p.replay_id = c.replay_id)
          AND (c.against = 'golden' OR EXISTS (SELECT 1 FROM replay AS p WHERE p.replay_id = c.against))
        GROUP BY replay_id, against
    )
    SELECT c.comparison_id, c.comparison_id IN (SELECT comparison_id FROM wanted) FROM comparison_run AS c
    WHERE c.current != (c.comparison_id IN (SELECT comparison_id FROM wanted))
"""

Damage = tuple[str, str, str, str]
"""A row of `damaged_file`: path, folder, code, reason."""


@dataclass(frozen=True)
class _File:
    """A file as it was when it was looked at."""

    path: str
    size: int
    mtime_ns: int


def refresh_lab(store: Store, settled_ns: int) -> int:
    """Bring the rows of the lab's files up to date; returns how many files were read. settled_ns: see `index`."""
    read = sum(_refresh_folder(store, folder, settled_ns) for folder in _KINDS)
    return read + _refresh_current(store)


def _refresh_folder(store: Store, folder: str, settled_ns: int) -> int:
    try:
        mtime_ns = os.stat(store.root / folder).st_mtime_ns
    except OSError:
        mtime_ns = 0
    with engine.connect_readonly(store.catalog_path) as reader:
        noted = reader.execute("SELECT mtime_ns FROM scanned_folder WHERE path = ?", (folder,)).fetchone()
        if (noted[0] if noted else 0) == mtime_ns:
            return 0
        sql = "SELECT path, size, mtime_ns FROM read_file WHERE path LIKE ?"
        known = {row[0]: _File(*row) for row in reader.execute(sql, (f"{folder}/%",))}
        bad = {row[0] for row in reader.execute("SELECT path FROM damaged_file WHERE folder = ?", (folder,))}
    found = _list(store, folder, time.time_ns() - settled_ns)
    passing = False
    changed = [one for one in found if known.get(one.path) != one or (folder == MATRICES and one.mtime_ns < 0)]
    for one in changed:
        passing = _take(store, folder, one) or passing
    gone = (set(known) | bad) - {one.path for one in found}
    settled = not passing and time.time_ns() - mtime_ns >= settled_ns
    _settle(store, folder, sorted(gone), mtime_ns if settled else -1)
    return len(changed)


def _list(store: Store, folder: str, settled_before_ns: int) -> list[_File]:
    """The folder's files; one whose time cannot be relied on yet has -1 for it, so that it differs from what is noted."""
    try:
        with os.scandir(store.root / folder) as entries:
            named = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(".json")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        hint = "check the permissions of the store"
        raise StoreProblem(f"cannot list {folder}: {error.strerror}", hint=hint) from None
    return [
        _File(f"{folder}/{name}", state.st_size, state.st_mtime_ns if state.st_mtime_ns < settled_before_ns else -1)
        for name, state in sorted(named, key=lambda one: one[0])
        if name[0] != "." and name.isprintable()
    ]


def _take(store: Store, folder: str, one: _File) -> bool:
    """Read one file and write its rows; whether it may become readable without a change."""
    from actordbg.catalog import comparison_writer as labwriter

    record, damage, passing = _read(store, folder, one.path)
    with engine.transaction(store.catalog_path) as connection:
        labwriter.forget(connection, folder, one.path)
        if damage is not None:
            labwriter.note_damage(connection, damage)
        if record is None:
            labwriter.remove(connection, folder, one.path)
        else:
            _write(connection, folder, record)
        if not passing:
            labwriter.note_file(connection, one.path, one.size, one.mtime_ns)
    return passing


def _read(store: Store, folder: str, path: str) -> tuple[Any, Damage | None, bool]:
    """The record of a file, or what is wrong with it, and whether that may pass."""
    kind, name = _KINDS[folder]
    try:
        record = kind.from_json((store.root / path).read_bytes())
        own = getattr(record, name)
        if f"{folder}/{own}.json" != path:
            raise CorruptDump(f"the file is that of {own!s:.80}")
        return record, None, False
    except FileNotFoundError:
        return None, None, True
    except StoreProblem as error:
        return None, (path, folder, error.code, error.message), isinstance(error, NewerFormat)
    except OSError as error:
        return None, (path, folder, StoreProblem.code, f"cannot be read: {error.strerror}"), True


def _write(connection: Connection, folder: str, record: Any) -> None:
    from actordbg.catalog import comparison_rows as labrows
    from actordbg.catalog import comparison_writer as labwriter

    if folder == COMPARISONS:
        labwriter.put_comparison_run(connection, labrows.comparison_run(record))
    elif folder == NOISE:
        labwriter.put_noise(connection, labrows.noise_floor(record))
    else:
        labwriter.put_matrix(connection, labrows.matrix(record), labrows.matrix_cells(record))


def _settle(store: Store, folder: str, gone: list[str], mtime_ns: int) -> None:
    from actordbg.catalog import comparison_writer as labwriter
    from actordbg.catalog import statements as writer

    with engine.transaction(store.catalog_path) as connection:
        for path in gone:
            if not (store.root / path).exists():
                labwriter.forget(connection, folder, path)
                labwriter.remove(connection, folder, path)
        writer.note_folder(connection, folder, mtime_ns)


def _refresh_current(store: Store) -> int:
    """Make the rows of `comparison` those of the comparisons that are current now; returns how many files were read."""
    with engine.connect_readonly(store.catalog_path) as reader:
        if not reader.execute("SELECT 1 FROM comparison_run LIMIT 1").fetchone():
            return 0
        wrong = reader.execute(_NOT_AS_IT_SHOULD_BE).fetchall()
    if not wrong:
        return 0
    from actordbg.catalog import comparison_rows as labrows
    from actordbg.catalog import comparison_writer as labwriter

    records = [_read(store, COMPARISONS, f"{COMPARISONS}/{name}.json")[0] for name, wanted in wrong if wanted]
    rows = {one.comparison_id: labrows.comparisons(one) for one in records if one is not None}
    with engine.transaction(store.catalog_path) as connection:
        now = connection.exec_driver_sql(_NOT_AS_IT_SHOULD_BE).fetchall()
        for name in sorted(name for name, wanted in now if not wanted):
            labwriter.remove_comparison_rows(connection, name)
        for name in sorted(name for name, wanted in now if wanted and name in rows):
            labwriter.put_comparison_rows(connection, name, rows[name])
    return len(records)
