"""What the indexer writes, in one transaction at a time: plain SQL on sqlite3's own connection, with the columns of `tables`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from actordbg.catalog.dump_rows import DUMP_COLUMNS, Columns
from actordbg.catalog.record_rows import RESULT_COLUMNS, UNFINISHED, FileMark, News, Row, setting_columns
from actordbg.catalog.tables import COLUMNS, OF_A_RANK, Damaged, shared, to_micros
from actordbg.records.replay_record import answers_of

GOLDEN = {"golden": "golden", "golden-entropy": "golden_entropy"}
"""What a comparison is against, and how the columns of `result` that it is made from begin."""
_OF_CALLER = tuple(name for name in DUMP_COLUMNS if name in COLUMNS["caller"])
"""Columns of a dump's caller, in the order of the rows of `dump_rows`."""
_FINISHED_LATER = "(excluded.finished_at, excluded.attempt) >= (result.finished_at, result.attempt)"


class CatalogWriter:
    """What one transaction writes (`connections.writing` begins it)."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def put(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, in place of those with the same key; objects as JSON."""
        kinds = COLUMNS[table]
        for row in rows:
            values = [
                json.dumps(value) if kinds[name].type == "dict" and value is not None else value for name, value in row.items()
            ]
            self.connection.execute(_upsert(table, tuple(row)), values)

    def put_dumps(self, run_name: str, columns: Columns) -> int:
        """Add rows of `dump_rows`, by columns, all of one run; returns how many were not there yet."""
        if not columns:
            return 0
        self.connection.execute("INSERT OR IGNORE INTO run (name) VALUES (?)", (run_name,))
        callers = self._callers(run_name, columns)
        before = self.connection.total_changes
        own = {name: values for name, values in zip(DUMP_COLUMNS, columns, strict=True) if name in COLUMNS["dump"]}
        own |= {"caller": callers, "timestamp": list(map(to_micros, own["timestamp"]))}
        sql = f"INSERT INTO dump ({_listed(own)}) VALUES ({', '.join('?' * len(own))}) ON CONFLICT DO NOTHING"
        self.connection.executemany(sql, zip(*own.values(), strict=True))
        added = self.connection.total_changes - before
        if self.connection.execute("SELECT 1 FROM result LIMIT 1").fetchone():
            self._point_to_last_result(columns[0])
        return added

    def _callers(self, run_name: str, columns: Columns) -> list[int]:
        """The numbers of the callers of rows that are added; a new caller gets a row."""
        said = {name: values for name, values in zip(DUMP_COLUMNS, columns, strict=True) if name in _OF_CALLER}
        varying = [name for name, values in said.items() if values.count(values[0]) != len(values)]
        keys = list(zip(*(said[name] for name in varying), strict=True)) or [()] * len(columns[0])
        listed = f"{_listed(_OF_CALLER)} FROM caller WHERE run = ? AND rank = ?"
        known = {
            tuple(row): number
            for rank in {*said["rank"]}
            for number, *row in self.connection.execute(f"SELECT id, {listed}", (run_name, rank))
        }
        insert = f"INSERT INTO caller ({_listed(_OF_CALLER)}) VALUES ({', '.join('?' * len(_OF_CALLER))})"
        first = {name: values[0] for name, values in said.items()}
        numbers = {}
        for key in dict.fromkeys(keys):
            caller = tuple((first | dict(zip(varying, key, strict=True))).values())
            numbers[key] = known[caller] if caller in known else self.connection.execute(insert, caller).lastrowid
        return [numbers[key] for key in keys]  # type: ignore[misc]

    def remove_dumps(self, dump_ids: Iterable[str]) -> None:
        """Remove rows of dumps; runs that have none left go too. Their results stay."""
        names = [(dump_id,) for dump_id in dump_ids]
        if names:
            self.connection.executemany("DELETE FROM dump WHERE dump_id = ?", names)
            self.connection.execute("DELETE FROM caller WHERE NOT EXISTS (SELECT 1 FROM dump WHERE dump.caller = caller.id)")
            self.connection.execute("DELETE FROM run WHERE NOT EXISTS (SELECT 1 FROM caller WHERE caller.run = run.name)")

    def take_into_pack(self, pack: str, columns: Columns) -> None:
        """Rows that are there as files, or of this pack or one that is not noted any more, become rows of this pack."""
        which = (columns[DUMP_COLUMNS.index(name)] for name in ("bytes", "dump_id", "run", "rank"))
        self.connection.executemany(
            "UPDATE dump SET pack = ?1, bytes = ?2 WHERE dump_id = ?3 "
            "AND (SELECT run = ?4 AND rank = ?5 FROM caller WHERE id = dump.caller) "
            "AND (pack IS NULL OR pack = ?1 OR pack NOT IN (SELECT path FROM read_file))",
            [(pack, *row) for row in zip(*which, strict=True)],
        )

    def packed_dumps(self, pack: str) -> list[str]:
        """Ids of the dumps whose rows say that they lie in this pack."""
        return self.first("SELECT dump_id FROM dump WHERE pack = ?", pack)

    def forget_folders_of(self, run_name: str) -> None:
        """Forget the modification times of a run's folders of dump files, so that they are listed again, or missed."""
        inside = f"dumps/{run_name}/"
        self.connection.execute("UPDATE scanned_folder SET mtime_ns = -1 WHERE substr(path, 1, ?) = ?", (len(inside), inside))

    def known_dumps(self, run_name: str, rank: int | None) -> list[str]:
        """Ids of the dumps that have a file of their own in one folder."""
        if rank is None:
            return []
        return self.first(f"SELECT dump_id FROM dump WHERE {OF_A_RANK} AND pack IS NULL", run_name, rank)

    def put_damaged(self, folder: str, found: Iterable[Damaged], sound: Iterable[str] = ()) -> None:
        """Note damaged files of a folder, and forget those at the paths `sound`."""
        if self.connection.execute("SELECT 1 FROM damaged_file LIMIT 1").fetchone():
            self.connection.executemany("DELETE FROM damaged_file WHERE path = ?", [(path,) for path in sound])
        self.put("damaged_file", [{**vars(item), "folder": folder} for item in found])

    def note_folder(self, path: str, mtime_ns: int) -> None:
        """Note a folder's modification time; -1 for one that cannot be relied on."""
        self.put("scanned_folder", [{"path": path, "mtime_ns": mtime_ns}])

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
        marks = ({"path": path, "replay_id": news.replay_id} | mark._asdict() for path, mark in news.files.items())
        self.put("read_file", marks)

    def _still(self, before: dict[str, FileMark | None]) -> bool:
        sql = "SELECT size, mtime_ns, offset FROM read_file WHERE path = ?"
        return before == {path: self.connection.execute(sql, (path,)).fetchone() for path in before}

    def _put_replay_row(self, news: News) -> None:
        """Insert or update the row of the replay; what the news do not say stays as it was."""
        row = self.row("replay", "replay_id", news.replay_id) or {}
        if news.reset or not row:
            row["resolved"] = None
        if news.reset or news.active or "status" not in row:
            row |= {"status": UNFINISHED, "finished_at": None}
        row |= news.columns
        if "config" in row:
            self.put("replay", [row | setting_columns(row["config"], row["resolved"])])

    def _put_results(self, news: News) -> None:
        """Add results; of two for one dump the one that finished last stays, in whatever order they are read."""
        names = RESULT_COLUMNS
        changes = ", ".join(f"{name} = excluded.{name}" for name in names)
        self.connection.executemany(
            f"INSERT INTO result ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT (replay_id, dump_id) DO UPDATE SET {changes} WHERE {_FINISHED_LATER}",
            [(*(json.dumps(row[name]) if name == "extra" else row[name] for name in names),) for row in news.results],
        )
        dump_ids = sorted({row["dump_id"] for row in news.results})
        self._put_laws(news)
        self._compare_with_golden(news.replay_id, dump_ids)
        self._point_to_last_result(dump_ids)

    def _put_laws(self, news: News) -> None:
        """The answers of results that have some; a later result of the same dump replaces them."""
        for row in news.results:
            keys = {"replay_id": news.replay_id, "dump_id": row["dump_id"]}
            self.put("law_answer", (shared(answer, "law_answer") | keys for answer in answers_of(row["extra"])))

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
            affected += self.first("SELECT dump_id FROM result WHERE replay_id = ?", replay_id)
            self.connection.execute("UPDATE comparison_run SET current = 0 WHERE replay_id = ?1 OR against = ?1", (replay_id,))
            for which in ("comparison WHERE against", "replay WHERE replay_id", "read_file WHERE replay_id"):
                self.connection.execute(f"DELETE FROM {which} = ?", (replay_id,))
        self._point_to_last_result(affected)

    def forget_file(self, path: str) -> None:
        """Forget that a file was read, and what was wrong with it or in it."""
        self.connection.execute("DELETE FROM read_file WHERE path = ?", (path,))
        inside = f"{path}#"
        self.connection.execute("DELETE FROM damaged_file WHERE path = ? OR substr(path, 1, ?) = ?", (path, len(inside), inside))

    def remove_rows(self, tables: Iterable[str], column: str, value: str) -> None:
        """Remove the rows of these tables that have this value."""
        for table in tables:
            self.connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (value,))

    def put_dumps_of(self, comparison_id: str, rows: Sequence[dict[str, Any]] | None) -> None:
        """The dumps of a comparison become rows, and the comparison current; with None they go, and it is current no more."""
        self.connection.execute("DELETE FROM comparison WHERE comparison_id = ?", (comparison_id,))
        self.put("comparison", rows or ())
        sql = "UPDATE comparison_run SET current = ? WHERE comparison_id = ?"
        self.connection.execute(sql, (int(rows is not None), comparison_id))

    def first(self, sql: str, *params: Any) -> list[Any]:
        """The first column of what a query finds."""
        return [row[0] for row in self.connection.execute(sql, params)]

    def row(self, table: str, column: str, value: str) -> Row | None:
        """The row of a table with this value, by name, JSON as what it says; None without one."""
        columns = COLUMNS[table]
        sql = f"SELECT {_listed(columns)} FROM {table} WHERE {column} = ?"
        values = self.connection.execute(sql, (value,)).fetchone()
        return values and {
            name: json.loads(value) if columns[name].type == "dict" and value is not None else value
            for name, value in zip(columns, values, strict=True)
        }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@cache
def _upsert(table: str, names: tuple[str, ...]) -> str:
    keys = [name for name, column in COLUMNS[table].items() if column.primary]
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name not in keys)
    sql = f"INSERT INTO {table} ({_listed(names)}) VALUES ({', '.join('?' * len(names))})"
    if not set(keys) <= set(names):  # a row with a number of its own
        return sql
    return f"{sql} ON CONFLICT ({_listed(keys)}) DO {f'UPDATE SET {changes}' if changes else 'NOTHING'}"
