"""What the indexer writes, in one transaction at a time.

Plain SQL on sqlite3's own connection, made from the declarations in `tables`: a command that takes in one file needs neither
SQLAlchemy nor SQLModel, whose import takes longer than the rest of it. The same declarations are SQLModel classes in `sqlmodels`,
which migrations are checked against, and with which a catalog can be asked from Python.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from actordbg.catalog import tables
from actordbg.catalog.dump_rows import DUMP_COLUMNS, Columns
from actordbg.catalog.moments import to_micros
from actordbg.catalog.replay_rows import RESULT_COLUMNS, UNFINISHED, FileMark, News, setting_columns, spec_columns
from actordbg.formats.store_files import read_regular
from actordbg.records.replay_record import answers_of

EVENT_FORMAT = 1

GOLDEN = {"golden": "golden", "golden-entropy": "golden_entropy"}
"""What a comparison is against, and how the columns of `result` that it is made from begin."""

_BYTES, _RUN, _RANK = (DUMP_COLUMNS.index(name) for name in ("bytes", "run", "rank"))
_OF_CALLER = tuple(name for name in DUMP_COLUMNS if name in tables.columns_of(tables.Caller))
"""Columns of a dump's caller, in the order of the rows of `dump_rows`; `_OF_DUMP`: those of its own."""
_OF_DUMP = tuple(name for name in DUMP_COLUMNS if name in tables.columns_of(tables.IndexedDump))
_AT = {name: number for number, name in enumerate(DUMP_COLUMNS)}

_FINISHED_LATER = "(excluded.finished_at, excluded.attempt) >= (result.finished_at, result.attempt)"
_FROM = {
    "comparisons": ("comparison", "comparison_run", "comparison_id"),
    "noise": ("noise_floor", "noise_id"),
    "memory": ("memory_watch", "memory_id"),
    "matrices": ("matrix_cell", "matrix", "matrix_id"),
}
"""The tables whose rows come from the files of a folder, and last the column that says from which."""


class CatalogWriter:
    """What one transaction writes (`connections.writing` begins it)."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def put(self, row: Any, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, in place of those with the same key. row: the table's declaration."""
        for values in rows:
            self.connection.execute(_upsert(row, tuple(values)), _stored(row, values))

    def put_dumps(self, run_name: str, columns: Columns) -> int:
        """Add rows of `dump_rows`, by columns, all of one run; returns how many were not there yet."""
        if not columns:
            return 0
        self.connection.execute("INSERT OR IGNORE INTO run (name) VALUES (?)", (run_name,))
        callers = self._callers(run_name, columns)
        before = self.connection.total_changes
        own = {name: columns[_AT[name]] for name in _OF_DUMP} | {"caller": callers}
        own["timestamp"] = [to_micros(moment) for moment in own["timestamp"]]
        sql = f"INSERT INTO dump ({_listed(own)}) VALUES ({', '.join('?' * len(own))}) ON CONFLICT DO NOTHING"
        self.connection.executemany(sql, zip(*own.values(), strict=True))
        added = self.connection.total_changes - before
        if self.connection.execute("SELECT 1 FROM result LIMIT 1").fetchone():
            self._point_to_last_result(columns[0])
        return added

    def _callers(self, run_name: str, columns: Columns) -> list[int]:
        """The numbers of the callers of rows that are added; a new caller gets a row."""
        count = len(columns[0])
        parts = [columns[_AT[name]] for name in _OF_CALLER]
        varying = [number for number, part in enumerate(parts) if part.count(part[0]) != count]
        keys: list[tuple[Any, ...]] = list(zip(*(parts[number] for number in varying), strict=True)) or [()] * count
        known: dict[tuple[Any, ...], int] = {}
        for rank in {*columns[_RANK]}:
            sql = f"SELECT id, {_listed(_OF_CALLER)} FROM caller WHERE run = ? AND rank = ?"
            known |= {tuple(row): number for number, *row in self.connection.execute(sql, (run_name, rank))}
        insert = f"INSERT INTO caller ({_listed(_OF_CALLER)}) VALUES ({', '.join('?' * len(_OF_CALLER))})"
        values = [part[0] for part in parts]
        numbers = {}
        for key in dict.fromkeys(keys):
            for number, value in zip(varying, key, strict=True):
                values[number] = value
            found = known.get(tuple(values))
            numbers[key] = self.connection.execute(insert, values).lastrowid if found is None else found
        return [numbers[key] for key in keys]  # type: ignore[misc]

    def remove_dumps(self, dump_ids: Iterable[str]) -> None:
        """Remove rows of dumps; runs that have none left go too. Their results stay."""
        names = [(dump_id,) for dump_id in dump_ids]
        if names:
            self.connection.executemany("DELETE FROM dump WHERE dump_id = ?", names)
            self.connection.execute("DELETE FROM caller WHERE NOT EXISTS (SELECT 1 FROM dump WHERE dump.caller = caller.id)")
            self.connection.execute("DELETE FROM run WHERE NOT EXISTS (SELECT 1 FROM caller WHERE caller.run = run.name)")

    def take_into_pack(self, pack: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Rows that are there as files, or of this pack or one that is not noted any more, become rows of this pack."""
        if not rows:
            return
        self.connection.executemany(
            "UPDATE dump SET pack = ?1, bytes = ?2 WHERE dump_id = ?3 "
            "AND (SELECT run = ?4 AND rank = ?5 FROM caller WHERE id = dump.caller) "
            "AND (pack IS NULL OR pack = ?1 OR pack NOT IN (SELECT path FROM scanned_folder))",
            [(pack, row[_BYTES], row[0], row[_RUN], row[_RANK]) for row in rows],
        )

    def packed_dumps(self, pack: str) -> list[str]:
        """Ids of the dumps whose rows say that they lie in this pack."""
        return self._first("SELECT dump_id FROM dump WHERE pack = ?", pack)

    def forget_damaged_pack(self, pack: str) -> None:
        """Forget what was noted of a pack, and of dumps in it."""
        inside = f"{pack}#"
        self.connection.execute("DELETE FROM damaged_file WHERE path = ? OR substr(path, 1, ?) = ?", (pack, len(inside), inside))

    def forget_folders_of(self, run_name: str) -> None:
        """Forget the modification times of a run's folders of dump files, so that they are listed again, or missed."""
        inside = f"dumps/{run_name}/"
        self.connection.execute("UPDATE scanned_folder SET mtime_ns = -1 WHERE substr(path, 1, ?) = ?", (len(inside), inside))

    def known_dumps(self, run_name: str, rank: int | None) -> list[str]:
        """Ids of the dumps that have a file of their own in one folder."""
        if rank is None:
            return []
        return self._first(f"SELECT dump_id FROM dump WHERE {tables.OF_A_RANK} AND pack IS NULL", run_name, rank)

    def put_damaged(self, folder: str, found: Iterable[tables.Damaged], sound: Iterable[str] = ()) -> None:
        """Note damaged files of a folder, and forget those at the paths `sound`."""
        if self.connection.execute("SELECT 1 FROM damaged_file LIMIT 1").fetchone():
            self.connection.executemany("DELETE FROM damaged_file WHERE path = ?", [(path,) for path in sound])
        self.put(tables.DamagedFile, [{**vars(item), "folder": folder} for item in found])

    def known_damaged(self, path: str) -> list[str]:
        """Paths of the files of one folder that are noted as damaged."""
        return self._first("SELECT path FROM damaged_file WHERE folder = ?", path)

    def note_folder(self, path: str, mtime_ns: int) -> None:
        """Note a folder's modification time; -1 for one that cannot be relied on."""
        self.put(tables.ScannedFolder, [{"path": path, "mtime_ns": mtime_ns}])

    def forget_folder(self, path: str) -> None:
        """Forget a folder or a pack altogether. A folder whose rows are still there must stay noted, or nobody misses it."""
        self.connection.execute("DELETE FROM scanned_folder WHERE path = ?", (path,))

    def count_for_planner(self) -> None:
        """Tell SQLite how many rows each index gives, so that it can choose; looks at a sample, takes a few milliseconds."""
        for sql in ("PRAGMA analysis_limit = 400", "ANALYZE caller", "ANALYZE dump", "ANALYZE result"):
            self.connection.execute(sql)

    def put_replay(self, news: News, before: dict[str, FileMark | None]) -> None:
        """Write what is new of one replay, unless another process has read on in the meantime; then nothing is written.

        `before` is the bookkeeping that the reading started from. A lost race costs nothing: what the other process did not
        read is still new for the next refresh.
        """
        if not self._still(before):
            return
        if news.reset:
            for which in ("result WHERE", "law_answer WHERE", "comparison WHERE comparison_id IS NULL AND"):
                self.connection.execute(f"DELETE FROM {which} replay_id = ?", (news.replay_id,))
        self._put_replay_row(news)
        if news.results:
            self._put_results(news)
        marks = [{"path": path, "replay_id": news.replay_id} | vars(mark) for path, mark in news.files.items()]
        self.put(tables.ReadFile, marks)

    def _still(self, before: dict[str, FileMark | None]) -> bool:
        sql = "SELECT size, mtime_ns, offset FROM read_file WHERE path = ?"
        rows = {path: self.connection.execute(sql, (path,)).fetchone() for path in before}
        return before == {path: FileMark(*row) if row else None for path, row in rows.items()}

    def _put_replay_row(self, news: News) -> None:
        """Insert or update the row of the replay; what the news do not say stays as it was."""
        stored = self._row(tables.Replay, "replay_id", news.replay_id)
        if stored is None and news.spec is None:
            return
        fresh = {"resolved": None, "status": UNFINISHED, "finished_at": None}
        row: dict[str, Any] = (stored or {}) | (fresh if news.reset or stored is None else {})
        if news.spec is not None:
            row |= spec_columns(news.spec)
        row["resolved"] = news.resolved or row["resolved"]
        row |= setting_columns(row["config"], row["resolved"])
        if news.status is not None:
            row |= {"status": news.status, "finished_at": news.finished_at}
        elif news.active or news.reset:
            row |= {"status": UNFINISHED, "finished_at": None}
        self.put(tables.Replay, [row])

    def _put_results(self, news: News) -> None:
        """Add results; of two for one dump the one that finished last stays, in whatever order they are read."""
        names = RESULT_COLUMNS
        changes = ", ".join(f"{name} = excluded.{name}" for name in names)
        self.connection.executemany(
            f"INSERT INTO result ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT (replay_id, dump_id) DO UPDATE SET {changes} WHERE {_FINISHED_LATER}",
            [tuple(row[name] for name in names) for row in news.results],
        )
        dump_ids = sorted({row["dump_id"] for row in news.results})
        self._put_laws(news)
        self._compare_with_golden(news.replay_id, dump_ids)
        self._point_to_last_result(dump_ids)

    def _put_laws(self, news: News) -> None:
        """The answers of results that have some; a later result of the same dump replaces them."""
        for row in news.results:
            keys = {"replay_id": news.replay_id, "dump_id": row["dump_id"]}
            answers = answers_of(json.loads(row["extra"]))
            self.put(tables.LawRow, (tables.shared(answer, tables.LawRow) | keys for answer in answers))

    def _compare_with_golden(self, replay_id: str, dump_ids: Sequence[str]) -> None:
        which = [(replay_id, dump_id) for dump_id in dump_ids]
        for against, column in GOLDEN.items():
            self.connection.executemany(
                f"DELETE FROM comparison WHERE replay_id = ? AND dump_id = ? AND against = '{against}' AND comparison_id IS NULL",
                which,
            )
            self.connection.executemany(
                "INSERT INTO comparison (replay_id, dump_id, against, count, max_abs, mean_abs) "
                f"SELECT replay_id, dump_id, '{against}', {column}_count, {column}_max_abs, {column}_mean_abs FROM result "
                f"WHERE replay_id = ? AND dump_id = ? AND {column}_count IS NOT NULL",
                which,
            )

    def _point_to_last_result(self, dump_ids: Sequence[str]) -> None:
        self.connection.executemany(
            "UPDATE dump SET last_result = (SELECT id FROM result WHERE result.dump_id = dump.dump_id "
            "ORDER BY finished_at DESC, replay_id DESC LIMIT 1) WHERE dump_id = ?",
            [(dump_id,) for dump_id in dump_ids],
        )

    def remove_replays(self, replay_ids: Sequence[str]) -> None:
        """Remove replays whose folders are gone, their results and comparisons; their dumps point to the newest result left."""
        affected: list[str] = []
        for replay_id in replay_ids:
            affected += self._first("SELECT dump_id FROM result WHERE replay_id = ?", replay_id)
            self.connection.execute("UPDATE comparison_run SET current = 0 WHERE replay_id = ?1 OR against = ?1", (replay_id,))
            for which in ("comparison WHERE against", "replay WHERE replay_id", "read_file WHERE replay_id"):
                self.connection.execute(f"DELETE FROM {which} = ?", (replay_id,))
        self._point_to_last_result(affected)

    def forget_record(self, folder_name: str, path: str) -> None:
        """Before a file is taken in: forget that it was read, what was wrong with it, and that its folder was listed."""
        for table, gone in (("scanned_folder", folder_name), ("damaged_file", path), ("read_file", path)):
            self.connection.execute(f"DELETE FROM {table} WHERE path = ?", (gone,))

    def remove_record(self, folder_name: str, path: str) -> None:
        """Remove what came from a file that is gone, or damaged."""
        *those, column = _FROM[folder_name]
        for table in those:
            self.connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (Path(path).stem,))

    def put_record(self, folder_name: str, path: str, rows: Mapping[type[Any], Sequence[dict[str, Any]]]) -> None:
        """Write what a file says, in place of what was there. What is known of a comparison already stays as it is."""
        for row in rows.get(tables.ComparisonRow, ()):
            before = self._row(tables.ComparisonRow, "comparison_id", row["comparison_id"])
            if before is not None and before | {"current": 0} == row:
                return
        self.remove_record(folder_name, path)
        for table, made in rows.items():
            self.put(table, made)

    def put_dumps_of(self, comparison_id: str, rows: Sequence[dict[str, Any]] | None) -> None:
        """The dumps of a comparison become rows, and the comparison current; with None they go, and it is current no more."""
        self.connection.execute("DELETE FROM comparison WHERE comparison_id = ?", (comparison_id,))
        self.put(tables.ComparedDump, rows or ())
        sql = "UPDATE comparison_run SET current = ? WHERE comparison_id = ?"
        self.connection.execute(sql, (int(rows is not None), comparison_id))

    def put_events(self, rows: Sequence[dict[str, Any]], gone: Sequence[str]) -> None:
        """Add patch events, and remove those whose files are gone."""
        self.put(tables.PatchEventRow, rows)
        self.connection.executemany("DELETE FROM patch_event WHERE name = ?", [(name,) for name in gone])

    def _first(self, sql: str, *params: Any) -> list[Any]:
        """The first column of what a query finds."""
        return [row[0] for row in self.connection.execute(sql, params)]

    def _row(self, row: type[Any], column: str, value: str) -> dict[str, Any] | None:
        """The row of a table with this value, by name, JSON as what it says; None without one."""
        columns = tables.columns_of(row)
        sql = f"SELECT {_listed(columns)} FROM {row.TABLE} WHERE {column} = ?"
        found = self.connection.execute(sql, (value,)).fetchone()
        if found is None:
            return None
        return {
            one.name: json.loads(this) if one.kind == "dict" and this is not None else this
            for one, this in zip(columns.values(), found, strict=True)
        }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@cache
def _upsert(row: Any, names: tuple[str, ...]) -> str:
    keys = [one.name for one in tables.columns_of(row).values() if one.primary]
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name not in keys)
    sql = f"INSERT INTO {row.TABLE} ({_listed(names)}) VALUES ({', '.join('?' * len(names))})"
    if not set(keys) <= set(names):  # a row with a number of its own
        return sql
    return f"{sql} ON CONFLICT ({_listed(keys)}) DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"


def _stored(row: type[Any], values: Mapping[str, Any]) -> list[Any]:
    """Values as SQLite holds them: JSON as text."""
    columns = tables.columns_of(row)
    return [json.dumps(one) if columns[name].kind == "dict" and one is not None else one for name, one in values.items()]


def event_row(path: Path) -> dict[str, Any] | None:
    """The row of a patch event's file; None for a file that is not one (yet)."""
    try:
        data = json.loads(read_regular(path))
        if data["format"] != EVENT_FORMAT or not isinstance(data["event"], str):
            return None
        values = {name: data.get(name) for name in tables.columns_of(tables.PatchEventRow)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return {name: None if value is None else str(value) for name, value in values.items()} | {"name": path.name}
