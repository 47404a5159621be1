"""What the indexer writes, in one transaction at a time.

Dumps and results come in thousands, so they go in as plain tuples, by one compiled statement: ten times faster than objects
of a session. Everything else comes by the dozen, and goes in as SQLModel objects (`put`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import insert
from sqlmodel import Session

from actordbg.catalog import tables
from actordbg.catalog.dump_rows import DUMP_COLUMNS
from actordbg.catalog.replay_rows import RESULT_COLUMNS, UNFINISHED, FileMark, News, setting_columns, spec_columns
from actordbg.catalog.sqlmodels import MODELS, table_of
from actordbg.formats.law_answer import answers_of
from actordbg.formats.store_files import read_regular

EVENT_FORMAT = 1

GOLDEN = {"golden": "golden", "golden-entropy": "golden_entropy"}
"""What a comparison is against, and how the columns of `result` that it is made from begin."""

_BYTES = DUMP_COLUMNS.index("bytes")
_FINISHED_LATER = "(excluded.finished_at, excluded.attempt) >= (result.finished_at, result.attempt)"


dump, run, replay, result = map(table_of, (tables.IndexedDump, tables.Run, tables.Replay, tables.Result))
comparison_run, comparison = table_of(tables.ComparisonRow), table_of(tables.ComparedDump)
event, damaged = table_of(tables.PatchEventRow), table_of(tables.DamagedFile)
folder, file = table_of(tables.ScannedFolder), table_of(tables.ReadFile)
law_answer = table_of(tables.LawRow)
noise_floor, matrix, matrix_cell = map(table_of, (tables.NoiseRow, tables.Matrix, tables.CellRow))
memory_watch = table_of(tables.MemoryRow)
_FROM = {
    "comparisons": ((comparison, "comparison_id"), (comparison_run, "comparison_id")),
    "noise": ((noise_floor, "noise_id"),),
    "memory": ((memory_watch, "memory_id"),),
    "matrices": ((matrix_cell, "matrix_id"), (matrix, "matrix_id")),
}
"""The tables whose rows come from the files of a folder, and the column that says from which."""


class CatalogWriter:
    """What one transaction writes (`connections.writing` begins it)."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def put(self, row: type[Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows with every column, in place of those with the same key. row: the table's declaration."""
        with Session(self.connection) as session:
            for values in rows:
                session.merge(MODELS[row](**values))
            session.flush()

    def put_dumps(self, run_name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Add rows of `headers.read_row` or `row_of`, all of one run; returns how many were not there yet."""
        if not rows:
            return 0
        self.connection.execute(insert(run).values(name=run_name).on_conflict_do_nothing())
        added = self.connection.exec_driver_sql(_insert_dumps(), list(rows)).rowcount
        if self.connection.execute(select(result.c.id).limit(1)).first():
            self._point_to_last_result([row[0] for row in rows])
        return added

    def remove_dumps(self, dump_ids: Iterable[str]) -> None:
        """Remove rows of dumps; runs that have none left go too. Their results stay."""
        names = [{"gone": dump_id} for dump_id in dump_ids]
        if names:
            self.connection.execute(delete(dump).where(dump.c.dump_id == bindparam("gone")), names)
            self.connection.execute(delete(run).where(~select(dump.c.run).where(dump.c.run == run.c.name).exists()))

    def take_into_pack(self, pack: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Rows that are there as files, or of this pack or one that is not noted any more, become rows of this pack."""
        if not rows:
            return
        self.connection.exec_driver_sql(
            "UPDATE dump SET pack = ?1, bytes = ?2 WHERE dump_id = ?3 AND run = ?4 AND rank = ?5 "
            "AND (pack IS NULL OR pack = ?1 OR pack NOT IN (SELECT path FROM scanned_folder))",
            [(pack, row[_BYTES], row[0], row[1], row[2]) for row in rows],
        )

    def packed_dumps(self, pack: str) -> list[str]:
        """Ids of the dumps whose rows say that they lie in this pack."""
        return list(self.connection.scalars(select(dump.c.dump_id).where(dump.c.pack == pack)))

    def forget_damaged_pack(self, pack: str) -> None:
        """Forget what was noted of a pack, and of dumps in it."""
        inside = damaged.c.path.startswith(f"{pack}#", autoescape=True)
        self.connection.execute(delete(damaged).where((damaged.c.path == pack) | inside))

    def forget_folders_of(self, run_name: str) -> None:
        """Forget the modification times of a run's folders of dump files, so that they are listed again, or missed."""
        of_run = folder.c.path.startswith(f"dumps/{run_name}/", autoescape=True)
        self.connection.execute(update(folder).where(of_run).values(mtime_ns=-1))

    def known_dumps(self, run_name: str, rank: int | None) -> list[str]:
        """Ids of the dumps that have a file of their own in one folder."""
        query = select(dump.c.dump_id).where(dump.c.run == run_name, dump.c.rank == rank, dump.c.pack.is_(None))
        return list(self.connection.scalars(query)) if rank is not None else []

    def put_damaged(self, rows: Sequence[tuple[str, str, str, str]], sound: Iterable[str]) -> None:
        """Note damaged files (path, folder, code, reason), and forget those at the paths `sound`."""
        if self.connection.execute(select(damaged.c.path).limit(1)).first():
            paths = [{"sound": path} for path in sound]
            if paths:
                self.connection.execute(delete(damaged).where(damaged.c.path == bindparam("sound")), paths)
        self.put(tables.DamagedFile, [dict(zip(("path", "folder", "code", "reason"), row, strict=True)) for row in rows])

    def known_damaged(self, path: str) -> list[str]:
        """Paths of the files of one folder that are noted as damaged."""
        return list(self.connection.scalars(select(damaged.c.path).where(damaged.c.folder == path)))

    def note_folder(self, path: str, mtime_ns: int) -> None:
        """Note a folder's modification time; -1 for one that cannot be relied on."""
        self.put(tables.ScannedFolder, [{"path": path, "mtime_ns": mtime_ns}])

    def forget_folder(self, path: str) -> None:
        """Forget a folder or a pack altogether. A folder whose rows are still there must stay noted, or nobody misses it."""
        self.connection.execute(delete(folder).where(folder.c.path == path))

    def count_for_planner(self) -> None:
        """Tell SQLite how many rows each index gives, so that it can choose; looks at a sample, takes a few milliseconds."""
        self.connection.exec_driver_sql("PRAGMA analysis_limit = 400")
        self.connection.exec_driver_sql("ANALYZE dump")
        self.connection.exec_driver_sql("ANALYZE result")

    def put_replay(self, news: News, before: dict[str, FileMark | None]) -> None:
        """Write what is new of one replay, unless another process has read on in the meantime; then nothing is written.

        `before` is the bookkeeping that the reading started from. A lost race costs nothing: what the other process did not
        read is still new for the next refresh.
        """
        if not self._still(before):
            return
        if news.reset:
            self.connection.execute(delete(result).where(result.c.replay_id == news.replay_id))
            self.connection.execute(delete(law_answer).where(law_answer.c.replay_id == news.replay_id))
            own = comparison.c.comparison_id.is_(None)
            self.connection.execute(delete(comparison).where(comparison.c.replay_id == news.replay_id, own))
        self._put_replay_row(news)
        if news.results:
            self._put_results(news)
        marks = [{"path": path, "replay_id": news.replay_id} | vars(mark) for path, mark in news.files.items()]
        self.put(tables.ReadFile, marks)

    def _still(self, before: dict[str, FileMark | None]) -> bool:
        rows = self.connection.execute(
            select(file.c.path, file.c.size, file.c.mtime_ns, file.c.offset).where(file.c.path.in_(before))
        )
        now = {path: FileMark(size, mtime_ns, offset) for path, size, mtime_ns, offset in rows}
        return all(now.get(path) == known for path, known in before.items())

    def _put_replay_row(self, news: News) -> None:
        """Insert or update the row of the replay; what the news do not say stays as it was."""
        stored = self.connection.execute(select(replay).where(replay.c.replay_id == news.replay_id)).mappings().first()
        fresh = {"resolved": None, "status": UNFINISHED, "finished_at": None}
        row: dict[str, Any] = dict(stored) if stored and not news.reset else fresh
        if news.spec is not None:
            row |= spec_columns(news.spec)
        elif stored is None:
            return
        row = dict(stored or {}) | row | {"resolved": news.resolved or row["resolved"]}
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
        self.connection.exec_driver_sql(
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
        rows = [(row["dump_id"], one) for row in news.results for one in answers_of(json.loads(row["extra"]))]
        names = ("verdict", "size", "row", "position", "token", "count", "looked_at", "words")
        self.put(
            tables.LawRow,
            (
                {"replay_id": news.replay_id, "dump_id": dump_id, "law": one.law} | {name: getattr(one, name) for name in names}
                for dump_id, one in rows
            ),
        )

    def _compare_with_golden(self, replay_id: str, dump_ids: Sequence[str]) -> None:
        which = [(replay_id, dump_id) for dump_id in dump_ids]
        for against, column in GOLDEN.items():
            self.connection.exec_driver_sql(
                f"DELETE FROM comparison WHERE replay_id = ? AND dump_id = ? AND against = '{against}' AND comparison_id IS NULL",
                which,
            )
            self.connection.exec_driver_sql(
                "INSERT INTO comparison (replay_id, dump_id, against, count, max_abs, mean_abs) "
                f"SELECT replay_id, dump_id, '{against}', {column}_count, {column}_max_abs, {column}_mean_abs FROM result "
                f"WHERE replay_id = ? AND dump_id = ? AND {column}_count IS NOT NULL",
                which,
            )

    def _point_to_last_result(self, dump_ids: Sequence[str]) -> None:
        newest = (
            select(result.c.id)
            .where(result.c.dump_id == dump.c.dump_id)
            .order_by(result.c.finished_at.desc(), result.c.replay_id.desc())
            .limit(1)
            .scalar_subquery()
        )
        statement = update(dump).where(dump.c.dump_id == bindparam("which")).values(last_result=newest)
        self.connection.execute(statement, [{"which": dump_id} for dump_id in dump_ids])

    def remove_replays(self, replay_ids: Sequence[str]) -> None:
        """Remove replays whose folders are gone, their results and comparisons; their dumps point to the newest result left."""
        of_them = comparison_run.c.replay_id.in_(replay_ids) | comparison_run.c.against.in_(replay_ids)
        self.connection.execute(update(comparison_run).where(of_them).values(current=0))
        self.connection.execute(delete(comparison).where(comparison.c.against.in_(replay_ids)))
        affected = list(self.connection.scalars(select(result.c.dump_id).where(result.c.replay_id.in_(replay_ids))))
        self.connection.execute(delete(replay).where(replay.c.replay_id.in_(replay_ids)))
        self.connection.execute(delete(file).where(file.c.replay_id.in_(replay_ids)))
        if affected:
            self._point_to_last_result(affected)

    def forget_record(self, folder_name: str, path: str) -> None:
        """Before a file is taken in: forget that it was read, what was wrong with it, and that its folder was listed."""
        for table, gone in ((folder, folder_name), (damaged, path), (file, path)):
            self.connection.execute(delete(table).where(table.c.path == gone))

    def remove_record(self, folder_name: str, path: str) -> None:
        """Remove what came from a file that is gone, or damaged."""
        for table, column in _FROM[folder_name]:
            self.connection.execute(delete(table).where(table.c[column] == Path(path).stem))

    def put_record(self, folder_name: str, path: str, rows: Mapping[type[Any], Sequence[dict[str, Any]]]) -> None:
        """Write what a file says, in place of what was there. What is known of a comparison already stays as it is."""
        for row in rows.get(tables.ComparisonRow, ()):
            own = comparison_run.c.comparison_id == row["comparison_id"]
            before = self.connection.execute(select(comparison_run).where(own)).mappings().first()
            if before is not None and dict(before) | {"current": 0} == row:
                return
        self.remove_record(folder_name, path)
        for table, made in rows.items():
            self.put(table, made)

    def put_dumps_of(self, comparison_id: str, rows: Sequence[dict[str, Any]] | None) -> None:
        """The dumps of a comparison become rows, and the comparison current; with None they go, and it is current no more."""
        self.connection.execute(delete(comparison).where(comparison.c.comparison_id == comparison_id))
        if rows:
            self.connection.execute(insert(comparison), list(rows))
        own = comparison_run.c.comparison_id == comparison_id
        self.connection.execute(update(comparison_run).where(own).values(current=int(rows is not None)))

    def put_events(self, rows: Sequence[dict[str, Any]], gone: Sequence[str]) -> None:
        """Add patch events, and remove those whose files are gone."""
        self.put(tables.PatchEventRow, rows)
        if gone:
            self.connection.execute(delete(event).where(event.c.name.in_(gone)))


@cache
def _insert_dumps() -> str:
    statement = insert(dump).values({name: bindparam(name) for name in DUMP_COLUMNS}).on_conflict_do_nothing()
    compiled = statement.compile(dialect=sqlite.dialect(paramstyle="qmark"))
    assert compiled.positiontup is not None
    order = [DUMP_COLUMNS.index(name) + 1 for name in compiled.positiontup]
    return _numbered(str(compiled), order)


def _numbered(sql: str, order: list[int]) -> str:
    """The statement with its n-th `?` as `?<order[n]>`, so that rows need not be sorted into the table's column order."""
    parts = sql.split("?")
    return parts[0] + "".join(f"?{number}{part}" for number, part in zip(order, parts[1:], strict=True))


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
