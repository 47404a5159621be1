"""What the calls of a process share stands once; times are numbers in the catalog, and texts everywhere else."""

import re
import sqlite3
from pathlib import Path

import catalogcases as cases
import pytest
from hypothesis import given, strategies as st
from roots import ROOT

from actordbg.base.errors import CatalogProblem
from actordbg.catalog import query, selections, tables
from actordbg.catalog.indexer import IndexSummary, refresh
from actordbg.catalog.where import Sandbox, compile_where
from actordbg.formats.dump_record import format_timestamp
from benchmarks.bench_index import fill_synthetic

COLUMNS = ["dump_id", "run", "rank", "timestamp", "host", "role", "training", "call_index"]


def _asked(store, sql):
    with sqlite3.connect(store.catalog_path) as connection:
        found = connection.execute(sql).fetchall()
    connection.close()
    return found


def test_each_combination_of_what_calls_share_is_one_row(store):
    records = cases.fill(store, 48)
    wanted = {(one.rank, one.role, one.training, one.arguments["return_output"]) for one in records}
    refresh(store)
    first = _asked(store, "SELECT id, rank, role, training, return_output FROM caller")
    assert {tuple(row[1:]) for row in first} == wanted and len(first) == len(wanted) < 24
    cases.publish(store, cases.record(48))
    cases.publish(store, cases.record(49, host="node-9"))
    refresh(store)
    second = _asked(store, "SELECT id, rank, role, training, return_output FROM caller")
    assert second[: len(first)] == first and len(second) == len(first) + 1, "only what is new gets a row"
    rows = cases.dump_rows(store, COLUMNS)
    assert rows == [
        tuple(getattr(one, name) for name in COLUMNS) for one in (*records, cases.record(48), cases.record(49, host="node-9"))
    ]


def test_a_caller_goes_with_its_last_dump(store):
    kept, lost = cases.fill(store, 3), cases.record(3, run="other")
    cases.publish(store, lost)
    refresh(store)
    store.dump_path(lost).unlink()
    store.dump_path(kept[2]).unlink()
    cases.settle(store)
    refresh(store)
    assert _asked(store, "SELECT run, rank FROM caller ORDER BY rank") == [("ppo-1", 0), ("ppo-1", 1)]
    assert [row.dump_id for row in query.select_dumps(store)] == [one.dump_id for one in kept[:2]]


@given(st.datetimes())
def test_a_time_comes_back_as_it_was(moment):
    text = format_timestamp(moment)  # type: ignore[arg-type]
    assert tables.from_micros(tables.to_micros(text)) == text


def test_times_compare_as_numbers_and_read_as_texts(store):
    records = cases.fill(store, 8)
    third = records[2].timestamp
    assert [row.timestamp for row in query.select_dumps(store, f"timestamp>'{third}'")] == [one.timestamp for one in records[3:]]
    assert len(query.select_dumps(store, f"timestamp like '{third[:24]}%' and length(timestamp) = 27")) == 1
    assert query.count_dumps(store, "timestamp not like '2024%'") == 8
    assert selections.frequent_values(query.open_fresh(store), "timestamp")[0] == (records[0].timestamp, 1)
    assert len(query.dump_files(store, f"timestamp < '{third}'")) == 2
    for none in (9e18, third, b"2025"):
        with sqlite3.connect(store.catalog_path) as connection:
            connection.execute("UPDATE dump SET timestamp = ?", (none,))
        connection.close()
        with pytest.raises(CatalogProblem, match="an invalid time"):
            query.select_dumps(query.Catalog(store, IndexSummary()))
        assert query.dump_files(query.Catalog(store, IndexSummary()), f"timestamp < '{third}'") == []


def test_the_time_of_a_result_that_is_spelled_otherwise_is_the_same_moment_or_none(store):
    """A journal's times are checked by nobody."""
    plain, short, east = "2025-07-01T01:00:00.000000Z", "2025-07-01T01:00:00Z", "2025-07-01T03:00:00.000000+02:00"
    records = cases.fill(store, 5)
    journal = cases.write_spec(store, cases.spec("r", records)) / "rank0.jsonl"
    for one, moment in zip(records, (plain, short, east, "", "2025-07-01T01:00:00.0+0000Z"), strict=True):
        cases.append(journal, cases.result("r", one.dump_id, finished_at=moment))
    assert query.count_dumps(store, "replayed_at = '2025-07-01 01:00'") == 3
    assert query.count_dumps(store, "status = 'passed' and replayed_at is null") == 2
    assert selections.frequent_values(query.open_fresh(store), "replayed_at") == [(plain, 3), (None, 2)]


def test_the_query_of_the_reference_page_reads_the_catalog(store):
    cases.fill(store, 3)
    refresh(store)
    page = Path(ROOT / "docs/reference/catalog.md").read_text()
    (sql,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert _asked(store, sql)[0] == (cases.record(2).dump_id, "2025-06-19 05:26:08.505", "ppo-1", 2, "policy", 22)


@pytest.mark.parametrize(
    "where, plan",
    [
        ("host='node-1' and tokens>5000", "SEARCH d USING INDEX ix_dump_tokens"),
        ("run='r' and padding>500", "SCAN d BLOOM FILTER ON k"),
        (
            "rank=1 and role in ('policy') and seq_len>4096",
            "SEARCH d USING COVERING INDEX ix_dump_caller_seq_len (caller=? AND seq_len>?)",
        ),
        ("rank=1 and status='failed'", "SEARCH r USING COVERING INDEX ix_result_status (status=?) SEARCH d"),
    ],
)
def test_what_all_callers_have_in_common_leads_to_no_dump(store, where, plan, monkeypatch):
    """SQLite takes `host = ?` for a condition that few callers meet, and looked up every dump of each, one by one."""
    fill_synthetic(store, 20_000)
    asked, rows = [], Sandbox.rows

    def listening(box, sql, params=()):
        asked.append((sql, params))
        return rows(box, sql, params)

    monkeypatch.setattr(Sandbox, "rows", listening)
    count = query.count_dumps(query.Catalog(store, IndexSummary()), where)
    with sqlite3.connect(store.catalog_path) as connection:
        found = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {asked[-1][0]}", asked[-1][1]))
        condition = compile_where(where)
        plain = f"SELECT count(*) FROM dump AS d {condition.joins} WHERE {condition.sql}"
        assert connection.execute(plain, condition.params).fetchone() == (count,)
    connection.close()
    assert found.startswith(plan)
