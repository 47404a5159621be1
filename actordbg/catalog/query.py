"""Reads the catalog: dumps by condition, replays and their results, damaged files.

Every function takes a `Store` or a `Catalog`. It indexes a Store first, so the result includes new files. A Catalog,
from `open_fresh`, was indexed when it was opened, so a command indexes once and then queries as often as it likes.

A row is a plain object with the attributes of its class in `models`. Rows are read with plain sqlite3 on read-only connections,
so that `dump ls` need not import SQLModel. Queries that carry a user's condition go through the sandbox.

Example::

    catalog = open_fresh(store)
    for row in select_dumps(catalog, "seq_len>4096 and rank=0", order="length", limit=20):
        print(row.dump_id, row.seq_len, row.status)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from actordbg.base.errors import CatalogProblem, UsageError
from actordbg.base.owners import is_mine
from actordbg.base.units import LAST, LEAST_OF_HANDLE, resolve
from actordbg.catalog import connections as engine, indexer as index
from actordbg.catalog.columns import DumpRow, RowType
from actordbg.catalog.dump_verdicts import LOCATED, MATRIX
from actordbg.catalog.lab_columns import ComparisonRun, Replay, ReplayRow, Result
from actordbg.catalog.tables import (
    BOTH_THERE,
    CALLER,
    DUMP_TAIL,
    LAST_RESULT,
    WHERE_COLUMNS,
    Damaged,
    from_micros,
)
from actordbg.catalog.where import Condition, Sandbox, compile_where, guarded
from actordbg.config.replay_config import NAME
from actordbg.formats.dump_record import FORWARD, SUFFIX
from actordbg.records.replay_record import ResultRecord
from actordbg.store.layout import Store
from actordbg.store.places import packed_place

ORDERS = {
    "time": ("ix_dump_timestamp", "d.timestamp, d.dump_id"),
    "newest": ("ix_dump_timestamp", "d.timestamp DESC, d.dump_id DESC"),
    "length": ("ix_dump_seq_len", "d.seq_len, d.timestamp, d.dump_id"),
    "longest": ("ix_dump_seq_len", "d.seq_len DESC, d.timestamp DESC, d.dump_id DESC"),
}
"""By name, the index with that order, and the order in SQL."""
_ALL = f"CROSS {CALLER} {LAST_RESULT}"
"""Joins after `dump AS d` for every column; CROSS keeps dumps in the outer loop, and so their order."""
FORWARDS = f"k.point = '{FORWARD}'"
_NAME_LOSSES, _JUDGE_LOSSES = {"point", "dump_id", "dump"}, {"verdict", "broken"}
SELECT_LOSSES = _NAME_LOSSES | _JUDGE_LOSSES
"""Columns with which a condition selects losses too."""
_LISTED = 5
_AT_ONCE = 500
"""Most dumps that a query names: SQLite takes at least 999 parameters."""
_PROBE = 1000
"""A condition with fewer matches counts as selective."""
_MOST_CALLERS = 1000
"""Most callers that a query names."""


@dataclass(frozen=True)
class Catalog:
    """An indexed store, and the summary of the indexing."""

    store: Store
    summary: index.IndexSummary


_DUMP_ROW = {name: column for name, column in DumpRow.columns.items() if name in WHERE_COLUMNS}
_DUMP_SQL = ", ".join(WHERE_COLUMNS[name].sql for name in _DUMP_ROW)
_COUNT = "(SELECT count(*) FROM result AS r WHERE r.replay_id = p.replay_id AND +r.status = '{}')"
"""`+` disables the index on status: else SQLite scans, for each replay, the passed results of all replays."""
_REPLAY_SQL = ", ".join(f"p.{name}" if name in Replay.columns else _COUNT.format(name) for name in ReplayRow.columns)
_CURRENT = (
    "comparison_id IN (SELECT comparison_id FROM (SELECT c.comparison_id, max(c.created_at || c.comparison_id) "
    f"FROM comparison_run AS c WHERE {BOTH_THERE} GROUP BY c.replay_id, c.against, c.origin))"
)
"""Condition for the newest comparison of each pair whose replays exist; imported ones hide none that was made here."""


def open_fresh(store: Store, where: str | None = None) -> Catalog:
    """Index what is new and return the catalog; the store must exist (StoreProblem otherwise).

    where: the condition of the next query, if any; an invalid condition is refused (WhereError) before anything is read.
    """
    if where is not None:
        compile_where(where)
    return Catalog(store, index.refresh(store))


def select_dumps(source: Store | Catalog, where: str | None = None, **options: Any) -> list[DumpRow]:
    """Return the dumps that a condition selects (all without one), in the order of `each_dump`."""
    return list(each_dump(source, where, **options))


def each_dump(
    source: Store | Catalog,
    where: str | None = None,
    *,
    order: str = "time",
    limit: int | None = None,
    offset: int = 0,
    losses: bool = False,
) -> Iterator[DumpRow]:
    """Yield the dumps that a condition selects, in an order of ORDERS or by a column ("-tokens": the largest first), read on
    demand: any number takes little memory, and a slow consumer locks nothing. losses: also yield losses, as `point` does.

    Raises WhereError for a condition that is not allowed, UsageError for an unknown order.
    """
    index, by = _sorting(order)
    catalog = catalog_of(source, where)
    with guarded(catalog.store.catalog_path) as box:  # one connection for all three: SQLite parses the schema for each
        source_sql, params = _source(box, _of_forwards(box, where, losses), index)
        sql = f"SELECT d.dump_id FROM {source_sql} ORDER BY {by} LIMIT ? OFFSET ?"
        ids = [dump_id for (dump_id,) in box.rows(sql, (*params, -1 if limit is None else limit, offset))]
        first = _rows_of(ids[:_AT_ONCE], box.rows)
    yield from first
    for some in _in_queries(ids[_AT_ONCE:]):
        yield from _rows_of(some, partial(answers, catalog))


def _rows_of(ids: Sequence[str], ask: Callable[[str, Sequence[Any]], Iterable[Any]]) -> list[DumpRow]:
    """Return the rows of those dumps that are there still, in this order. ask: runs a query."""
    sql = f"SELECT {_DUMP_SQL} FROM dump AS d {_ALL} WHERE d.dump_id IN ({','.join('?' * len(ids))})"
    rows = {row.dump_id: row for row in _dump_rows(ask(sql, ids))} if ids else {}
    return [rows[dump_id] for dump_id in ids if dump_id in rows]


def _sorting(order: str) -> tuple[str, str]:
    """Return the index that has an order, as SQLite is told to use it ("" for none), and the order in SQL."""
    if order in ORDERS:
        index, by = ORDERS[order]
        return f"INDEXED BY {index}", by
    column = WHERE_COLUMNS.get(order.removeprefix("-"))
    if column is None:
        hint = f"use one of {', '.join(ORDERS)}, or a column of `actordbg dump columns` (-COLUMN: the largest first)"
        raise UsageError(f"there is no order {order!r:.80}", hint=hint)
    way = "DESC" if order.startswith("-") else "ASC"
    return "", f"{column.sql} {way}, d.timestamp DESC, d.dump_id DESC"


def _of_forwards(box: Sandbox, where: str | None, losses: bool = False) -> Condition | None:
    """Return the condition that selects dumps: without `losses`, only forwards, and losses that it names or judges."""
    condition = compile_where(where) if where is not None else None
    columns = condition.columns if condition is not None else set()
    named = losses or not columns.isdisjoint(_NAME_LOSSES)
    if named or not list(box.rows("SELECT 1 FROM caller WHERE point != ? LIMIT 1", (FORWARD,))):
        return condition  # no store without losses pays for them
    listed = f"point = '{FORWARD}'"
    if not columns.isdisjoint(_JUDGE_LOSSES):
        listed = f"({listed} or verdict is not null)"
    return compile_where(listed if where is None else f"({where}) and {listed}")


def _source(box: Sandbox, condition: Condition | None, index: str) -> tuple[str, tuple[Any, ...]]:
    """Return the part after FROM that finds the rows of a condition fast, which depends on the number of matches. index: that
    of the order, in SQL.

    SQLite cannot know that number, so a probe counts up to `_PROBE` matches. Few matches: look them up by row number, and sort.
    Many: read rows in the requested order along that order's index, and test each; sorting half a million rows to show twenty
    would take a second.
    """
    if condition is None:
        return f"dump AS d {index} {_ALL}", ()
    some = f"SELECT d.rowid AS number FROM {_fastest(box, condition)} LIMIT {_PROBE}"
    count, numbers = next(box.rows(f"SELECT count(*), group_concat(number) FROM ({some})", condition.params))
    if count < _PROBE:
        numbers = numbers or ""
        return f"dump AS d {_ALL} WHERE d.rowid IN ({numbers})", ()
    return f"dump AS d {index} {_ALL} WHERE {condition.sql}", condition.params


def _fastest(box: Sandbox, condition: Condition) -> str:
    """Return the part after FROM for the dumps of a condition, in any order.

    SQLite cannot know whether a single caller meets a condition or all do, and would look up the dumps of each. So callers are
    queried first. Their ids tell SQLite how many dumps they have, and whether another index finds fewer.
    """
    plain = f"dump AS d {condition.joins} WHERE {condition.sql}"
    if not condition.of_callers:
        return plain
    callers_sql = " AND ".join(sql for sql, _ in condition.of_callers)
    params = [value for _, values in condition.of_callers for value in values]
    ((every,),) = box.rows("SELECT count(*) FROM caller")
    ((met, numbers),) = box.rows(f"SELECT count(*), group_concat(k.id) FROM caller AS k WHERE {callers_sql}", params)
    if _MOST_CALLERS < met <= every / 2:
        return plain
    numbers = numbers or ""
    named = f"d.caller IN ({numbers}) AND " if met <= every / 2 else ""
    return f"dump AS d CROSS {condition.joins} WHERE {named}{condition.sql}"


def count_dumps(source: Store | Catalog, where: str | None = None) -> int:
    """Count the dumps that a condition selects, as `each_dump` does."""
    with guarded(catalog_of(source, where).store.catalog_path) as box:
        condition = _of_forwards(box, where)
        source_sql, params = (_fastest(box, condition), condition.params) if condition else ("dump", ())
        return int(next(box.rows(f"SELECT count(*) FROM {source_sql}", params))[0])


def dump_extent(source: Store | Catalog) -> tuple[int, int, int]:
    """Return the number of dumps, and the shortest and longest `seq_len`; (0, 0, 0) without dumps."""
    sql = f"SELECT count(*), coalesce(min(seq_len), 0), coalesce(max(seq_len), 0) FROM dump AS d {CALLER} WHERE {FORWARDS}"
    ((count, shortest, longest),) = answers(source, sql)
    return count, shortest, longest


def dump_bytes(source: Store | Catalog) -> int:
    """Return the total size of all dumps, in bytes."""
    return int(answers(source, "SELECT coalesce(sum(bytes), 0) FROM dump")[0][0])


def dump_files(source: Store | Catalog, where: str | None = None) -> list[tuple[str, int]]:
    """Return (path below the store, bytes) of the dumps that a condition selects, the oldest first.

    The path of a packed dump is a place in its pack (`actordbg.store.places`), its bytes are its share.
    """
    condition = compile_where(where) if where is not None else None
    with guarded(catalog_of(source).store.catalog_path) as box:
        index, by = _sorting("time")
        source_sql, params = _source(box, condition, index)
        sql = f"SELECT d.dump_id, k.run, k.rank, d.pack, d.bytes FROM {source_sql} ORDER BY {by}"
        return [(dump_path(*place), size) for *place, size in box.rows(sql, params)]


def get_dump(source: Store | Catalog, dump_id: str) -> DumpRow:
    """Return the dump with this id, beginning of an id or handle, or the newest for "last"; UsageError otherwise."""
    catalog, span = catalog_of(source), (dump_id, dump_id + chr(0x10FFFF))
    sql = "SELECT d.dump_id FROM dump AS d WHERE {} BETWEEN ? AND ? ORDER BY d.dump_id LIMIT {}"
    ids = [row[0] for row in answers(catalog, sql.format("d.dump_id", _LISTED), span)] if dump_id else []
    if not ids and len(dump_id) >= LEAST_OF_HANDLE:
        ids = [row[0] for row in answers(catalog, sql.format(DUMP_TAIL, _LISTED), span)]
    if not ids:
        newest = f"SELECT d.dump_id FROM dump AS d {CALLER} WHERE {FORWARDS} ORDER BY d.timestamp DESC LIMIT {_LISTED}"
        ids = [row[0] for row in answers(catalog, newest)][::-1]
    full_id = resolve(dump_id, ids, "dump", made_by="dump enable")
    return _dump_rows(answers(catalog, f"SELECT {_DUMP_SQL} FROM dump AS d {_ALL} WHERE d.dump_id = ?", (full_id,)))[0]


def list_replays(source: Store | Catalog, limit: int | None = None) -> list[ReplayRow]:
    """Return replays, the newest first."""
    return _replay_rows(catalog_of(source), "1", (), -1 if limit is None else limit)


def list_own_replays(source: Store | Catalog, *, typed: bool = False) -> list[ReplayRow]:
    """Return the replays that `@1`, `@2`, ... mean, the newest first: this user's, without truths, variations and matrix cells.

    Other commands start those, so users do not know them; others' replays lie in a shared store, or were imported. If this user
    has no replays, returns anybody's. With `typed`, a truth that was requested through `actordbg replay` counts too.
    """
    catalog = catalog_of(source)
    rows = [
        row
        for row in list_replays(catalog)
        if not (row.config.get("oracle") or row.config.get("vary"))
        or (typed and {"actordbg", "replay"} <= {*(row.command or "").split()})
    ]
    direct = (row for row in rows if not (row.command or "").startswith((MATRIX, LOCATED)))
    return [row for row in direct if row.origin is None and is_mine(catalog.store.replays / row.replay_id)] or rows


def newest_configuration(source: Store | Catalog, *, typed: bool = False) -> ReplayRow | None:
    """Return the replay that "last" means: the newest of `list_own_replays` that ended, else the newest; None without any."""
    rows = list_own_replays(source, typed=typed)
    return next((row for row in rows if row.status not in OPEN), next(iter(rows), None))


OPEN = ("interrupted", "unfinished")
"""Statuses of a replay that did not end: it was interrupted, or it is running or was killed."""


def get_replay(source: Store | Catalog, replay_id: str) -> ReplayRow:
    """Return the replay with this id, unique beginning of an id, name or handle (`replay_named`); else UsageError."""
    catalog = catalog_of(source)
    replay_id = replay_named(catalog, replay_id)
    ids = [row[0] for row in answers(catalog, "SELECT replay_id FROM replay ORDER BY created_at, replay_id")]
    full_id = resolve(replay_id, ids, "replay", made_by="replay")
    return _replay_rows(catalog, "p.replay_id = ?", (full_id,), 1)[0]


def replay_named(source: Store | Catalog, name: str) -> str:
    """Return the id of the replay that a handle or a name means; any other text unchanged.

    "last" and `@last` are the `newest_configuration`, `@1` is the newest that `actordbg replay ls` lists, `@2` the second newest.
    A name (`--name`) means its newest replay. UsageError for a number beyond the list.
    """
    if name in (LAST, f"@{LAST}") and (newest := newest_configuration(source)):
        return newest.replay_id
    if name == LAST or not (name[:1] == "@" or name[:1].isalpha()):
        return name
    catalog = catalog_of(source)
    if name[0] == "@":
        listed, number = list_own_replays(catalog), name[1:]
        if not (number.isdecimal() and number.isascii() and 1 <= int(number[:9]) <= len(listed)):
            raise UsageError(f"no replay {name:.40}", hint=f"use @1 to @{len(listed)}; `actordbg replay ls` lists them")
        return listed[int(number) - 1].replay_id
    rows = list_replays(catalog)
    if NAME.match(name) is None or any(row.replay_id.startswith(name) for row in rows):
        return name
    return next((row.replay_id for row in rows if row.config.get("name") == name), name)


def results_for(source: Store | Catalog, replay_id: str) -> list[ResultRecord]:
    """Return the results of a replay (full id), by their end."""
    return _results(source, "replay_id = ? ORDER BY finished_at, id", replay_id)


def results_of_dump(source: Store | Catalog, dump_id: str) -> list[ResultRecord]:
    """Return the results of a dump (full id) in all replays, the newest first."""
    return _results(source, "dump_id = ? ORDER BY finished_at DESC, replay_id DESC", dump_id)


def _results(source: Store | Catalog, where: str, param: str) -> list[ResultRecord]:
    rows = list(map(vars, table_rows(source, Result, where, (param,))))
    for row in rows:
        del row["id"]
    return [ResultRecord(**row) for row in rows]


def damaged_files(source: Store | Catalog) -> list[Damaged]:
    """Return every dump file, pack or packed dump that could not be indexed; code "corrupt-dump": the file itself is damaged."""
    with engine.connect_readonly(catalog_of(source).store.catalog_path) as reader:
        return [item for item in index.read_damaged(reader) if item.path.startswith(("dumps/", "packs/"))]


def table_rows(source: Store | Catalog, row: type[RowType], where: str, params: tuple[Any, ...] = ()) -> list[RowType]:
    """Return the rows of a table that an SQL condition selects."""
    answered = answers(source, f"SELECT {', '.join(row.columns)} FROM {row.table} WHERE {where}", params)
    return [row(values) for values in engine.decoded(row.columns, answered)]


def comparisons(source: Store | Catalog, replay_id: str | None = None) -> list[ComparisonRun]:
    """Return the newest comparison of each pair whose replays exist, the newest first; of `replay_id` (full) only, as A."""
    where, params = (f"{_CURRENT} AND replay_id = ?", (replay_id,)) if replay_id else (_CURRENT, ())
    return table_rows(source, ComparisonRun, f"{where} ORDER BY created_at DESC, comparison_id DESC", params)


def autocast_dtypes(source: Store | Catalog, dump_ids: Sequence[str]) -> dict[str, str]:
    """Return the autocast dtype ("torch.bfloat16") by dump id, for dumps that were recorded under autocast."""
    dtypes: dict[str, str] = {}
    catalog = catalog_of(source)
    for some in _in_queries(dump_ids):
        named = f"d.dump_id IN ({','.join('?' * len(some))}) AND k.autocast_dtype IS NOT NULL"
        dtypes |= dict(answers(catalog, f"SELECT d.dump_id, k.autocast_dtype FROM dump AS d CROSS {CALLER} WHERE {named}", some))
    return dtypes


def dump_path(dump_id: str, run: str, rank: int, pack: str | None = None) -> str:
    """Return a dump's path below the store: "dumps/ppo-1/rank0000/<dump_id>.safetensors.zst", or its place in its pack."""
    if not isinstance(rank, int) or "/" in dump_id or "/" in run or (pack and ("/.." in pack or pack[:6] != "packs/")):
        raise CatalogProblem(f"the catalog has a row of a dump outside the store: {dump_id!r:.80}", hint=engine.REBUILD)
    return packed_place(pack, dump_id) if pack is not None else f"dumps/{run}/rank{rank:04d}/{dump_id}{SUFFIX}"


def _in_queries(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[first : first + _AT_ONCE] for first in range(0, len(ids), _AT_ONCE))


def catalog_of(source: Store | Catalog, where: str | None = None) -> Catalog:
    """Return a catalog that is open, or open that of a store: see `open_fresh`."""
    return source if isinstance(source, Catalog) else open_fresh(source, where)


def answers(source: Store | Catalog, sql: str, params: Sequence[Any] = ()) -> list[Any]:
    """Run a query of our own and return its rows; queries with a user's condition go through the sandbox instead."""
    with engine.connect_readonly(catalog_of(source).store.catalog_path) as reader:
        return reader.execute(sql, params).fetchall()


def _dump_rows(raw_rows: Iterable[Sequence[Any]]) -> list[DumpRow]:
    """Convert rows of `_DUMP_SQL`."""
    rows = []
    for row in engine.decoded(_DUMP_ROW, raw_rows):
        row["timestamp"] = from_micros(row["timestamp"])
        row["path"] = dump_path(row["dump_id"], row["run"], row["rank"], row["pack"])
        rows.append(DumpRow(row))
    return rows


def _replay_rows(catalog: Catalog, where: str, params: tuple[Any, ...], limit: int) -> list[ReplayRow]:
    sql = f"SELECT {_REPLAY_SQL} FROM replay AS p WHERE {where} ORDER BY p.created_at DESC, p.replay_id DESC LIMIT ?"
    return [ReplayRow(row) for row in engine.decoded(ReplayRow.columns, answers(catalog, sql, (*params, limit)))]
