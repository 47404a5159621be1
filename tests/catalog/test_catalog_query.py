"""Queries: a condition selects the rows that it means, in the asked order, inside the sandbox."""

import sqlite3

import catalogcases as cases
import pytest
from casefiles import cases_of
from steps import TickingClock, counted

from actordbg.base.errors import UsageError, WhereError
from actordbg.catalog import query, where
from actordbg.catalog.columns import DumpRow
from actordbg.catalog.tables import FUNCTIONS, WHERE_COLUMNS
from actordbg.store.layout import Store

Row = DumpRow


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """40 dumps of two runs; a replay with results for the first 12: two failed, one crashed."""
    store = Store(tmp_path_factory.mktemp("query") / "store").create()
    records = [cases.record(n, run="ppo-1" if n < 30 else "sft-2", step=None if n % 5 == 0 else n // 8) for n in range(40)]
    for described in records:
        cases.publish(store, described)
    folder = cases.write_spec(store, cases.spec("r1", records[:12]))
    statuses = ["passed"] * 9 + ["failed"] * 2 + ["crashed"]
    cases.append(folder / "rank0.jsonl", *(
        cases.result("r1", r.dump_id, status, forward_s=n / 10, error_class=None if status == "passed" else "RuntimeError")
        for n, (r, status) in enumerate(zip(records, statuses, strict=False))
    ))  # fmt: skip
    return query.open_fresh(store)


@pytest.fixture(scope="module")
def rows(catalog):
    return query.select_dumps(catalog)


SELECTED = cases_of("selected")


@pytest.mark.parametrize("text", SELECTED)
def test_a_condition_selects_what_it_means(catalog, rows, text):
    spans = [part.partition("-") for part in SELECTED[text].expected[0].split()]
    numbers = {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}
    wanted = [row for row in rows if row.call_index in numbers]
    assert query.select_dumps(catalog, text) == wanted
    assert query.count_dumps(catalog, text) == len(wanted)
    assert query.select_dumps(catalog, text, limit=3, offset=1) == wanted[1:4]


def test_every_documented_column_and_function_works(catalog):
    for name in WHERE_COLUMNS:
        assert query.count_dumps(catalog, f"{name} is null or {name} is not null") == 40
    texts = {"abs": "abs(rank)=1", "coalesce": "coalesce(step,0)=1", "length": "length(run)=5", "lower": "lower(run)='x'",
             "now": "timestamp<now()", "round": "round(rank)=1 and round(rank, 1)=1", "upper": "upper(run)='X'"}  # fmt: skip
    assert texts.keys() == FUNCTIONS.keys()
    for text in texts.values():
        query.select_dumps(catalog, text)


def test_orders(catalog, rows):
    assert [r.timestamp for r in rows] == sorted(r.timestamp for r in rows)
    by_length = query.select_dumps(catalog, order="length")
    assert by_length == sorted(rows, key=lambda r: (r.seq_len, r.timestamp, r.dump_id))
    with pytest.raises(UsageError):
        query.select_dumps(catalog, order="colour")


def test_a_dump_is_found_by_the_beginning_of_its_id(catalog, rows):
    assert query.get_dump(catalog, rows[3].dump_id[:23]) == rows[3]
    assert query.get_dump(catalog, rows[3].dump_id) == rows[3]
    for text in ("2025", "1999", "", "%", "\0", "20250619'"):
        with pytest.raises(UsageError) as caught:
            query.get_dump(catalog, text)
        assert caught.value.hint


def test_replays_are_found_by_id_beginning_and_as_the_last(catalog):
    assert query.get_replay(catalog, "r1") == query.get_replay(catalog, "last") == query.list_replays(catalog)[0]
    replay = query.get_replay(catalog, "r")
    assert (replay.passed, replay.failed, replay.crashed, replay.hung) == (9, 2, 1, 0)
    with pytest.raises(UsageError):
        query.get_replay(catalog, "nope")


def test_asking_a_store_indexes_it_and_asking_a_catalog_does_not(store):
    cases.fill(store, 1)
    opened = query.open_fresh(store)
    cases.publish(store, cases.record(1))
    assert (query.count_dumps(opened), query.count_dumps(store), query.count_dumps(opened)) == (1, 2, 2)


def test_a_condition_with_many_matches_is_answered_in_order_too(catalog, rows, monkeypatch):
    monkeypatch.setattr(query, "_PROBE", 1)
    assert query.select_dumps(catalog, "seq_len > 10", limit=5) == [r for r in rows if r.seq_len > 10][:5]
    by_length = sorted(rows, key=lambda r: (r.seq_len, r.timestamp))
    found = query.select_dumps(catalog, "rank = 1", limit=5, order="length")
    assert found == [r for r in by_length if r.rank == 1][:5]


def test_the_sandbox_denies_all_but_reading_four_tables(catalog):
    path = catalog.store.catalog_path
    for sql in (
        "DELETE FROM dump", "PRAGMA table_info(dump)", "ATTACH ':memory:' AS x", "SELECT * FROM sqlite_master",
        "SELECT * FROM scanned_folder", "SELECT randomblob(9)", "SELECT load_extension('x')", "CREATE TEMP TABLE x (y)",
        "SELECT * FROM dump WHERE host GLOB '*'", "WITH RECURSIVE t(n) AS (SELECT 1 UNION SELECT n+1 FROM t) SELECT n FROM t",
        "SELECT * FROM pragma_table_info('dump')", "SELECT printf('%1000000d', 1)", "VACUUM", "REINDEX",
    ):  # fmt: skip
        with where.guarded(path) as box, pytest.raises(sqlite3.Error):
            list(box.rows(sql))


def test_a_query_that_gives_nothing_for_too_long_is_stopped(tmp_path, monkeypatch):
    """Time is counted in looks at the clock, one for so many steps of SQLite; it starts again with each batch of rows."""
    path = tmp_path / "big.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE dump (rank INTEGER)")
        connection.executemany("INSERT INTO dump VALUES (?)", ((n,) for n in range(3000)))
    clock = TickingClock()
    monkeypatch.setattr(where, "time", clock)
    with where.guarded(path, time_limit_s=5) as box, pytest.raises(WhereError, match="stopped"):
        list(box.rows("SELECT a.rank FROM dump a, dump b, dump c WHERE a.rank + b.rank + c.rank < 0"))
    assert clock.looks == 1 + 6, "the first look after the limit stops it"
    clock.looks = 0
    with where.guarded(path, time_limit_s=5) as box:
        listed = list(box.rows("SELECT a.rank FROM dump a, dump b LIMIT 300000"))
    assert len(listed) == 300_000 and clock.looks > 3 * 6, "listing took longer than the limit, and gave rows all the time"


@pytest.mark.parametrize("where", ["abs(-9223372036854775807 - 1) > 0", f"rank{' / 2' * 590} > 0"])
def test_what_sqlite_cannot_compute_is_the_conditions_fault(catalog, where):
    with pytest.raises(WhereError):
        query.select_dumps(catalog, where)
    with pytest.raises(WhereError):
        query.count_dumps(catalog, where)


def test_long_sums_and_chains_are_answered(catalog, rows):
    for condition in ("seq_len" + " + 1" * 60 + " > 60", " or ".join(["replayable"] * 299)):
        with counted() as steps:
            assert query.count_dumps(catalog, condition) == len(rows)
        assert steps.count < 20_000 + 100 * len(condition), "work grows faster than the condition"


def test_extent_bytes_and_paths_are_those_of_the_rows(catalog):
    found = query.select_dumps(catalog)
    lengths = [row.seq_len for row in found]
    assert query.dump_extent(catalog) == (len(found), min(lengths), max(lengths))
    assert query.dump_bytes(catalog) == sum(row.bytes for row in found)
    assert [path for path, _ in query.dump_files(catalog)] == [row.path for row in found]
    assert [path for path, _ in query.dump_files(catalog, "rank=0")] == [
        row.path for row in query.select_dumps(catalog, "rank=0")
    ]
    middle = found[len(found) // 2]
    assert query.dump_files(catalog, f"timestamp < '{middle.timestamp}' and run = '{middle.run}'") == [
        (row.path, row.bytes) for row in found if row.timestamp < middle.timestamp and row.run == middle.run
    ]
