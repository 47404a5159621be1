"""The indexer's writes, one transaction at a time: plain SQL on an sqlite3 connection, with the columns of `tables`."""

import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from actordbg.catalog import lab_columns
from actordbg.catalog.columns import CallerColumns, Dump, Row
from actordbg.catalog.dump_rows import Columns
from actordbg.catalog.lab_columns import DamagedFile, ReadFile, Replay, Result, ScannedFolder
from actordbg.catalog.record_rows import Marks, News, answers_in, setting_columns
from actordbg.catalog.tables import OF_A_RANK, Damaged, shared, to_micros
from actordbg.records.locate_record import IDENTITY


class CatalogWriter:
    """Writer within one transaction (`connections.writing` begins it)."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.execute, self.executemany = connection.execute, connection.executemany

    def put(self, row: type[Row], rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert rows that share their columns, or replace rows with the same key; objects as JSON."""
        listed = list(rows)
        if not listed:
            return
        objects = {name for name, column in row.columns.items() if column.type is dict}
        values = (
            [json.dumps(each[name]) if name in objects and each[name] is not None else each[name] for name in listed[0]]
            for each in listed
        )
        keys = tuple(name for name, column in row.columns.items() if column.key)
        self.executemany(_upsert(row.table, tuple(listed[0]), keys), values)

    def put_dumps(self, run_name: str, columns: Columns) -> int:
        """Insert rows of `dump_rows`, given by columns, all of one run; return how many were new."""
        if not columns:
            return 0
        callers = self._callers(run_name, columns)
        before = self.connection.total_changes
        own = {name: columns[name] for name in Dump.columns if name in columns}
        own |= {"caller": callers, "timestamp": list(map(to_micros, own["timestamp"]))}
        sql = f"{_insert('dump', own)} ON CONFLICT DO NOTHING"
        self.executemany(sql, zip(*own.values(), strict=True))
        added = self.connection.total_changes - before
        for table in ("result", "lint_answer"):
            if self.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                judged = f"INSERT OR IGNORE INTO unjudged SELECT dump_id FROM {table} WHERE dump_id = ? LIMIT 1"
                self.executemany(judged, [(dump_id,) for dump_id in columns["dump_id"]])
        return added

    def _callers(self, run_name: str, columns: Columns) -> list[int]:
        """Return the caller ids of rows to insert; insert a row for each new caller."""
        fields = {name: columns[name] for name in CallerColumns.columns}
        varying = [name for name, values in fields.items() if values.count(values[0]) != len(values)]
        keys = list(zip(*(fields[name] for name in varying), strict=True)) or [()] * len(columns["dump_id"])
        listed = f"{_listed(fields)} FROM caller WHERE run = ? AND rank = ?"
        known = {
            tuple(row): number
            for rank in {*fields["rank"]}
            for number, *row in self.execute(f"SELECT id, {listed}", (run_name, rank))
        }
        insert = _insert("caller", fields)
        first = {name: values[0] for name, values in fields.items()}
        numbers = {}
        for key in dict.fromkeys(keys):
            caller = tuple((first | dict(zip(varying, key, strict=True))).values())
            numbers[key] = known[caller] if caller in known else self.execute(insert, caller).lastrowid
        return [numbers[key] for key in keys]  # type: ignore[misc]

    def remove_dumps(self, dump_ids: Iterable[str]) -> None:
        """Remove rows of dumps, and callers without dumps. Results stay."""
        names = [(dump_id,) for dump_id in dump_ids]
        if names:
            self.executemany("DELETE FROM dump WHERE dump_id = ?", names)
            self.execute("DELETE FROM caller WHERE NOT EXISTS (SELECT 1 FROM dump WHERE dump.caller = caller.id)")

    def take_into_pack(self, pack: str, columns: Columns) -> None:
        """Assign existing rows to this pack: rows of dump files, of this pack, and of packs that are no longer noted."""
        which = (columns[name] for name in ("bytes", "dump_id", "run", "rank"))
        self.executemany(
            "UPDATE dump SET pack = ?1, bytes = ?2 WHERE dump_id = ?3 "
            "AND (SELECT run = ?4 AND rank = ?5 FROM caller WHERE id = dump.caller) "
            "AND (pack IS NULL OR pack = ?1 OR pack NOT IN (SELECT path FROM read_file))",
            [(pack, *row) for row in zip(*which, strict=True)],
        )

    def packed_dumps(self, pack: str) -> list[str]:
        """Return the ids of dumps whose rows name this pack."""
        return self.first("SELECT dump_id FROM dump WHERE pack = ?", pack)

    def forget_folders_of(self, run_name: str) -> None:
        """Forget the modification times of a run's folders of dump files, so that they are listed again, or found missing."""
        inside = f"dumps/{run_name}/"
        self.execute("UPDATE scanned_folder SET mtime_ns = -1 WHERE substr(path, 1, ?) = ?", (len(inside), inside))

    def known_dumps(self, run_name: str, rank: int | None) -> list[str]:
        """Return the ids of the unpacked dumps of a rank; none without a rank."""
        if rank is None:
            return []
        return self.first(f"SELECT dump_id FROM dump WHERE {OF_A_RANK} AND pack IS NULL", run_name, rank)

    def put_damaged(self, folder: str, files: Iterable[Damaged], sound: Iterable[str] = ()) -> None:
        """Note damaged files of a folder, and forget notes about the paths `sound`."""
        if self.execute("SELECT 1 FROM damaged_file LIMIT 1").fetchone():
            self.executemany("DELETE FROM damaged_file WHERE path = ?", [(path,) for path in sound])
        self.put(DamagedFile, [shared(item, DamagedFile) | {"folder": folder} for item in files])

    def note_folder(self, path: str, mtime_ns: int) -> None:
        """Note a folder's modification time; -1 if it is not reliable."""
        self.put(ScannedFolder, [{"path": path, "mtime_ns": mtime_ns}])

    def count_for_planner(self) -> None:
        """Update the statistics of SQLite's query planner from a sample of each index; takes a few milliseconds."""
        for sql in ("PRAGMA analysis_limit = 400", "ANALYZE caller", "ANALYZE dump", "ANALYZE result"):
            self.execute(sql)

    def put_replay(self, news: News, before: Marks) -> None:
        """Write the news of a replay, unless another process has indexed it in the meantime; then nothing is written.

        `before`: the file marks from which reading started. A lost race costs nothing: lines that the other process did not
        read are still new for the next refresh.
        """
        sql = "SELECT path, size, mtime_ns, offset FROM read_file WHERE replay_id = ?"
        replay_id, results = news.row["replay_id"], news.results
        if before != {path: tuple(mark) for path, *mark in self.execute(sql, (replay_id,))}:
            return
        gone: list[str] = []
        if news.anew:
            gone = self.first("SELECT dump_id FROM result WHERE replay_id = ?", replay_id)
            self.remove_rows(("result", "law_answer", "read_file"), "replay_id", replay_id)
        else:
            sql = "SELECT finished_at, attempt FROM result WHERE replay_id = ? AND dump_id = ?"
            there = {dump_id: self.execute(sql, (replay_id, dump_id)).fetchone() for dump_id in results}
            results = {
                dump_id: record
                for dump_id, record in results.items()
                if (record.finished_at, record.attempt) >= (there[dump_id] or ("", 0))
            }
            for table in ("result", "law_answer"):
                which = [(replay_id, dump_id) for dump_id in results if there[dump_id]]
                self.executemany(f"DELETE FROM {table} WHERE replay_id = ? AND dump_id = ?", which)
        self.put(Replay, [news.row | setting_columns(news.row["config"], news.row["resolved"])])
        self.put(Result, (shared(result, Result) | {"replay_id": replay_id} for result in results.values()))
        answered = set()
        for dump_id, result in results.items():
            answers = [row | {"replay_id": replay_id, "dump_id": dump_id} for row in answers_in(result, news.row["config"])]
            self.put(lab_columns.LawAnswer, answers)
            answered |= {row["law"] for row in answers}
        self.has_news({*gone, *results})
        if news.anew or IDENTITY in answered:  # what it says of its model, and its configuration, is about all its dumps
            self._has_news_of(replay_id)
        marks = ((path, replay_id, *mark) for path, mark in news.files.items())
        names = ("path", "replay_id", "size", "mtime_ns", "offset")
        self.put(ReadFile, [dict(zip(names, mark, strict=True)) for mark in marks])

    def has_news(self, dump_ids: Iterable[str]) -> None:
        """Note dumps whose verdict is to be folded again (`dump_verdicts`)."""
        self.executemany("INSERT OR IGNORE INTO unjudged VALUES (?)", [(dump_id,) for dump_id in dump_ids])

    def _has_news_of(self, replay_id: str) -> None:
        """Note the dumps of a replay, and those that were compared with it."""
        compared = "SELECT c.dump_id FROM comparison_run AS f JOIN comparison AS c USING (comparison_id)"
        self.has_news(
            self.first(
                f"SELECT dump_id FROM result WHERE replay_id = ?1 UNION {compared} WHERE ?1 IN (f.against, f.rounding_id)",
                replay_id,
            )
        )

    def remove_replays(self, replay_ids: Sequence[str]) -> None:
        """Remove replays whose folders are gone, and their results; their dumps are judged by what remains."""
        for replay_id in replay_ids:
            self._has_news_of(replay_id)
            self.remove_rows(("replay", "read_file"), "replay_id", replay_id)

    def forget_file(self, path: str) -> None:
        """Forget that a file was read, and any damage noted for it or its contents."""
        self.execute("DELETE FROM read_file WHERE path = ?", (path,))
        inside = f"{path}#"
        self.execute("DELETE FROM damaged_file WHERE path = ? OR substr(path, 1, ?) = ?", (path, len(inside), inside))

    def remove_rows(self, tables: Iterable[str], column: str, value: str) -> None:
        """Remove the rows of these tables whose `column` has this value."""
        for table in tables:
            self.execute(f"DELETE FROM {table} WHERE {column} = ?", (value,))

    def first(self, sql: str, *params: Any) -> list[Any]:
        """Return the first column of a query's rows."""
        return [row[0] for row in self.execute(sql, params)]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _insert(table: str, names: Collection[str]) -> str:
    return f"INSERT INTO {table} ({_listed(names)}) VALUES ({', '.join('?' * len(names))})"


@cache
def _upsert(table: str, names: tuple[str, ...], keys: tuple[str, ...]) -> str:
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name not in keys)
    return f"{_insert(table, names)} ON CONFLICT ({_listed(keys)}) DO UPDATE SET {changes}"
