"""Queries: a condition selects the rows that it means, in the asked order, inside the sandbox."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import catalogcases as cases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import TickingClock, counted

from actordbg.base.errors import UsageError, WhereError
from actordbg.catalog import connections as engine
from actordbg.catalog import query, where
from actordbg.catalog.indexer import IndexSummary, refresh
from actordbg.catalog.tables import FUNCTIONS, WHERE_COLUMNS
from actordbg.store.layout import Store

Row = query.DumpRow


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> query.Catalog:
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
def rows(catalog: query.Catalog) -> list[Row]:
    return query.select_dumps(catalog)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("seq_len>20 and rank=0", lambda r: r.seq_len > 20 and r.rank == 0),
        ("rank in (1, 3) or role='reference'", lambda r: r.rank in (1, 3) or r.role == "reference"),
        ("not training", lambda r: not r.training),
        ("training=1", lambda r: r.training),
        ("step is null", lambda r: r.step is None),
        ("coalesce(step, -1) < 1", lambda r: (r.step if r.step is not None else -1) < 1),
        ("run like 'PPO%'", lambda r: r.run.startswith("ppo")),
        ("run not like 'ppo%'", lambda r: not r.run.startswith("ppo")),
        ("tokens / batch_size > 10.4", lambda r: r.tokens / r.batch_size > 10.4),
        ("padding * 2 = 6", lambda r: r.padding == 3),
        ("timestamp >= '2025-06-19 05:26:09'", lambda r: r.timestamp >= "2025-06-19T05:26:09"),
        ("timestamp > now() - '1h'", lambda r: False),
        ("timestamp < now()", lambda r: True),
        ("status = 'failed'", lambda r: r.status == "failed"),
        ("status is null and rank = 2", lambda r: r.status is None and r.rank == 2),
        ("error = 'RuntimeError' and status <> 'failed'", lambda r: r.error and r.status != "failed"),
        ("forward_s > 0.55", lambda r: (r.forward_s or 0) > 0.55),
        ("replay = 'r1'", lambda r: r.replay == "r1"),
        ("bytes > 0 and source = 'capture'", lambda r: True),
        ("1 = 0", lambda r: False),
    ],
)
def test_a_condition_selects_what_it_means(
    catalog: query.Catalog, rows: list[Row], text: str, means: Callable[[Row], bool]
) -> None:
    wanted = [row for row in rows if means(row)]
    assert query.select_dumps(catalog, text) == wanted
    assert query.count_dumps(catalog, text) == len(wanted)
    assert query.select_dumps(catalog, text, limit=3, offset=1) == wanted[1:4]


NUMBERS = ("rank", "seq_len", "batch_size", "tokens", "step", "action_len")
TEXTS = ("run", "role", "host")
Evaluate = Callable[[Row], object]


def _numbers() -> st.SearchStrategy[tuple[str, Evaluate]]:
    column = st.sampled_from(NUMBERS).map(lambda name: (name, lambda row: getattr(row, name)))
    literal = st.integers(0, 60).map(lambda n: (str(n), lambda row: n))

    def combine(inner: st.SearchStrategy[tuple[str, Evaluate]]) -> st.SearchStrategy[tuple[str, Evaluate]]:
        def build(item: tuple[tuple[str, Evaluate], str, tuple[str, Evaluate]]) -> tuple[str, Evaluate]:
            (a, fa), sign, (b, fb) = item
            compute = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}[sign]
            return f"({a} {sign} {b})", lambda row: None if None in (fa(row), fb(row)) else compute(fa(row), fb(row))

        return st.tuples(inner, st.sampled_from("+-*"), inner).map(build)

    return st.recursive(column | literal, combine, max_leaves=3)


def _comparisons() -> st.SearchStrategy[tuple[str, Evaluate]]:
    signs = {
        "=": lambda x, y: x == y, "<": lambda x, y: x < y, "<=": lambda x, y: x <= y,
        ">": lambda x, y: x > y, ">=": lambda x, y: x >= y,
    }  # fmt: skip

    def build(item: tuple[tuple[str, Evaluate], str, tuple[str, Evaluate]]) -> tuple[str, Evaluate]:
        (a, fa), sign, (b, fb) = item
        if sign == "<>":  # what is not there is unequal to what is
            return f"{a} <> {b}", lambda row: fa(row) != fb(row)
        return f"{a} {sign} {b}", lambda row: None if None in (fa(row), fb(row)) else signs[sign](fa(row), fb(row))

    texts = st.sampled_from(TEXTS).map(lambda name: (name, lambda row: getattr(row, name)))
    words = st.sampled_from(["ppo-1", "policy", "node-1", "it's", "ü", ""]).map(
        lambda word: ("'" + word.replace("'", "''") + "'", lambda row: word)
    )
    sign = st.sampled_from(sorted([*signs, "<>"]))
    nulls = st.sampled_from(NUMBERS + TEXTS).map(lambda name: (f"{name} is null", lambda row: getattr(row, name) is None))
    return st.tuples(_numbers(), sign, _numbers()).map(build) | st.tuples(texts, sign, words).map(build) | nulls


def _conditions() -> st.SearchStrategy[tuple[str, Evaluate]]:
    def both(x: object, y: object) -> object:
        return False if x is False or y is False else None if None in (x, y) else True

    def combine(inner: st.SearchStrategy[tuple[str, Evaluate]]) -> st.SearchStrategy[tuple[str, Evaluate]]:
        def negate(item: tuple[str, Evaluate]) -> tuple[str, Evaluate]:
            text, f = item
            return f"not ({text})", lambda row: None if f(row) is None else not f(row)

        def build(item: tuple[tuple[str, Evaluate], str, tuple[str, Evaluate]]) -> tuple[str, Evaluate]:
            (a, fa), word, (b, fb) = item
            if word == "and":
                return f"({a}) and ({b})", lambda row: both(fa(row), fb(row))
            return f"(({a}) or ({b}))", lambda row: _not(both(_not(fa(row)), _not(fb(row))))

        return st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(build) | inner.map(negate)

    return st.recursive(_comparisons(), combine, max_leaves=4)


def _not(value: object) -> object:
    return None if value is None else not value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(condition=_conditions())
def test_any_simple_condition_selects_what_python_would(
    catalog: query.Catalog, rows: list[Row], condition: tuple[str, Evaluate]
) -> None:
    text, evaluate = condition
    wanted = [row for row in rows if evaluate(row) is True]
    assert query.select_dumps(catalog, text) == wanted, text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query, "_PROBE", 1)
        assert query.select_dumps(catalog, text) == wanted, f"{text}, as if it had many matches"


@pytest.mark.parametrize("text", ["'a'{{=}}", "{{ : || from }}"])
def test_what_the_parser_itself_falls_over_is_refused(catalog: query.Catalog, text: str) -> None:
    with pytest.raises(WhereError, match="cannot be understood"):
        query.select_dumps(catalog, text)


def test_every_documented_column_and_function_works(catalog: query.Catalog) -> None:
    for name in WHERE_COLUMNS:
        assert query.count_dumps(catalog, f"{name} is null or {name} is not null") == 40
    texts = {"abs": "abs(rank)=1", "coalesce": "coalesce(step,0)=1", "length": "length(run)=5", "lower": "lower(run)='x'",
             "now": "timestamp<now()", "round": "round(rank)=1 and round(rank, 1)=1", "upper": "upper(run)='X'"}  # fmt: skip
    assert texts.keys() == FUNCTIONS.keys()
    for text in texts.values():
        query.select_dumps(catalog, text)


def test_orders(catalog: query.Catalog, rows: list[Row]) -> None:
    assert [r.timestamp for r in rows] == sorted(r.timestamp for r in rows)
    by_length = query.select_dumps(catalog, order="length")
    assert by_length == sorted(rows, key=lambda r: (r.seq_len, r.timestamp, r.dump_id))
    with pytest.raises(UsageError):
        query.select_dumps(catalog, order="colour")


def test_a_dump_is_found_by_the_beginning_of_its_id(catalog: query.Catalog, rows: list[Row]) -> None:
    assert query.get_dump(catalog, rows[3].dump_id[:23]) == rows[3]
    assert query.get_dump(catalog, rows[3].dump_id) == rows[3]
    for text in ("2025", "1999", "", "%", "\0", "20250619'"):
        with pytest.raises(UsageError) as caught:
            query.get_dump(catalog, text)
        assert caught.value.hint


def test_listing_twice_as_many_replays_takes_twice_the_work(store: Store) -> None:
    """In SQLite's own steps. Each replay looked through the results of all."""
    refresh(store)
    took = []
    for number in range(40):
        with engine.plain_transaction(store.catalog_path) as connection:
            sql = "INSERT INTO replay (replay_id, created_at, status, inputs) VALUES (?, '2025', 'complete', 1)"
            connection.execute(sql, (f"r{number}",))
            sql = "INSERT INTO result (replay_id, dump_id, status, attempt, worker, slot, started_at, finished_at) "
            values = [(f"r{number}", f"d{index}") for index in range(100)]
            connection.executemany(f"{sql} VALUES (?, ?, 'passed', 1, 0, 0, '2025', '2025')", values)
        with engine.one_reader(store.catalog_path), engine.connect_readonly(store.catalog_path) as reader:
            steps: list[None] = []
            reader.set_progress_handler(lambda steps=steps: steps.append(None), 10)  # type: ignore[misc]
            assert {row.passed for row in query.list_replays(query.Catalog(store, IndexSummary()))} == {100}
            took.append(len(steps))
    assert took[39] < 2.2 * took[19]


def test_replays_are_found_by_id_beginning_and_as_the_last(catalog: query.Catalog) -> None:
    assert query.get_replay(catalog, "r1") == query.get_replay(catalog, "last") == query.list_replays(catalog)[0]
    replay = query.get_replay(catalog, "r")
    assert (replay.passed, replay.failed, replay.crashed, replay.hung) == (9, 2, 1, 0)
    with pytest.raises(UsageError):
        query.get_replay(catalog, "nope")


def test_no_replay_yet_is_said(store: Store) -> None:
    with pytest.raises(UsageError, match="no replay yet"):
        query.get_replay(store, "last")


def test_asking_a_store_indexes_it_and_asking_a_catalog_does_not(store: Store) -> None:
    cases.fill(store, 1)
    opened = query.open_fresh(store)
    cases.publish(store, cases.record(1))
    assert (query.count_dumps(opened), query.count_dumps(store), query.count_dumps(opened)) == (1, 2, 2)


def test_a_condition_with_many_matches_is_answered_in_order_too(
    catalog: query.Catalog, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "_PROBE", 1)
    assert query.select_dumps(catalog, "seq_len > 10", limit=5) == [r for r in rows if r.seq_len > 10][:5]
    by_length = sorted(rows, key=lambda r: (r.seq_len, r.timestamp))
    found = query.select_dumps(catalog, "rank = 1", limit=5, order="length")
    assert found == [r for r in by_length if r.rank == 1][:5]


def test_the_sandbox_denies_all_but_reading_four_tables(catalog: query.Catalog) -> None:
    path = catalog.store.catalog_path
    for sql in (
        "DELETE FROM dump", "PRAGMA table_info(dump)", "ATTACH ':memory:' AS x", "SELECT * FROM sqlite_master",
        "SELECT * FROM scanned_folder", "SELECT randomblob(9)", "SELECT load_extension('x')", "CREATE TEMP TABLE x (y)",
        "SELECT * FROM dump WHERE host GLOB '*'", "WITH RECURSIVE t(n) AS (SELECT 1 UNION SELECT n+1 FROM t) SELECT n FROM t",
        "SELECT * FROM pragma_table_info('dump')", "SELECT printf('%1000000d', 1)", "VACUUM", "REINDEX",
    ):  # fmt: skip
        with where.guarded(path) as box, pytest.raises(sqlite3.Error):
            list(box.rows(sql))


def test_a_query_that_gives_nothing_for_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_sqlite_cannot_compute_is_the_conditions_fault(catalog: query.Catalog, where: str) -> None:
    with pytest.raises(WhereError):
        query.select_dumps(catalog, where)
    with pytest.raises(WhereError):
        query.count_dumps(catalog, where)


def test_long_sums_and_chains_are_answered(catalog: query.Catalog, rows: list[Row]) -> None:
    for condition in ("seq_len" + " + 1" * 150 + " > 150", " or ".join(["replayable"] * 299)):
        with counted() as steps:
            assert query.count_dumps(catalog, condition) == len(rows)
        assert steps.count < 20_000 + 100 * len(condition), "work grows faster than the condition"


def test_extent_bytes_and_paths_are_those_of_the_rows(catalog: query.Catalog) -> None:
    found = query.select_dumps(catalog)
    lengths = [row.seq_len for row in found]
    assert query.dump_extent(catalog) == (len(found), min(lengths), max(lengths))
    assert query.dump_bytes(catalog) == sum(row.bytes for row in found)
    assert [path for path, _ in query.dump_files(catalog)] == [row.path for row in found]
    assert [path for path, _ in query.dump_files(catalog, "rank=0")] == [
        row.path for row in query.select_dumps(catalog, "rank=0")
    ]
    middle = found[len(found) // 2]
    assert query.dump_files(catalog, before=middle.timestamp, run=middle.run) == [
        (row.path, row.bytes) for row in found if row.timestamp < middle.timestamp and row.run == middle.run
    ]


def test_an_empty_store_has_no_extent(store: Store) -> None:
    assert query.dump_extent(store) == (0, 0, 0)
    assert (query.dump_bytes(store), query.dump_files(store)) == (0, [])
