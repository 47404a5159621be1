"""A column is declared once, in `tables`; a field of a record that becomes a column, once there and once in the record."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import catalogcases as cases
import pytest
from sqlmodel import Session, select

from actordbg.catalog import dump_rows, query
from actordbg.catalog import sqlmodels as models
from actordbg.catalog.connections import make_engine
from actordbg.catalog.indexer import refresh
from actordbg.catalog.replay_rows import RESULT_COLUMNS
from actordbg.catalog.tables import TABLES, Caller, Column, DumpColumns, IndexedDump, Replay, Result, columns_of
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.replay_record import ResultRecord
from actordbg.store.layout import Store

IN_THE_FILE_ONLY = {
    "format_version", "monotonic_ns", "arguments", "tensors", "process_groups", "extra", "actor", "origin", "trigger_facts",
    "rng", "versions", "payload_sha256",
}  # fmt: skip
"""Fields of a dump's record that are no columns: objects, and what nobody selects by."""
COMPUTED = {"padding", "with_outputs", "with_rng", "bytes", "pack", "last_result"}


def _difference(fields_: dict[str, Column], columns: dict[str, Column]) -> list[str]:
    """What a record and a table do not both have, or have of another type; a list of names."""
    found = [f"{name} has no column" for name in fields_ if name not in columns]
    found += [f"{name} is no field of the record" for name in columns if name not in fields_]
    return found + [
        f"{name} is {one.kind} in the record and {columns[name].kind} in the table"
        for name, one in fields_.items()
        if name in columns and columns[name].kind != one.kind
    ]


def _without(columns: dict[str, Column], *names: str) -> dict[str, Column]:
    return {name: one for name, one in columns.items() if name not in names}


def test_every_field_of_a_dumps_record_is_a_column_of_its_type_or_stays_in_the_file() -> None:
    record = _without(columns_of(DumpRecord), *IN_THE_FILE_ONLY)
    taken = [name for name, one in columns_of(DumpColumns).items() if one.source]
    assert _difference(record, _without(columns_of(DumpColumns), *COMPUTED, *taken)) == []
    assert columns_of(Caller).keys() | columns_of(IndexedDump).keys() == {*columns_of(DumpColumns), "id", "caller", "last_result"}
    assert not columns_of(Caller).keys() & columns_of(IndexedDump).keys()
    assert {*dump_rows.DUMP_COLUMNS} == {*columns_of(DumpColumns)}
    assert dump_rows.RECORD_FIELDS[:4] == ("dump_id", "run", "rank", "timestamp")


def test_every_field_of_a_result_is_a_column_of_its_type() -> None:
    assert _difference(columns_of(ResultRecord), _without(columns_of(Result), "id")) == []
    assert {*RESULT_COLUMNS} == {*columns_of(ResultRecord)}


def test_every_setting_of_a_replay_is_a_column_of_its_type() -> None:
    declared = {one.stored: one.kind.__name__ for one in SETTINGS.values()}
    assert declared == {name: columns_of(Replay)[name].kind for name in declared}


def test_a_field_without_a_column_is_named() -> None:
    watts = {"watts": Column("", kind="float")}
    assert _difference(watts, {}) == ["watts has no column"]
    assert _difference({}, watts) == ["watts is no field of the record"]
    assert _difference(watts, {"watts": Column("", kind="int")}) == ["watts is float in the record and int in the table"]


@pytest.mark.parametrize("row", TABLES)
def test_every_column_says_what_it_holds_and_has_a_type(row: Any) -> None:
    for column in columns_of(row).values():
        assert column.comment and column.kind in ("str", "int", "float", "bool", "dict"), column
    assert list(columns_of(row)) == list(models.table_of(row).columns.keys())


def test_the_sqlmodel_classes_read_what_was_indexed(store: Store) -> None:
    (described,) = cases.fill(store, 1)
    folder = cases.write_spec(store, cases.spec("r", [described]))
    cases.append(folder / "rank0.jsonl", cases.result("r", described.dump_id, "failed"))
    refresh(store)
    with Session(make_engine(store.catalog_path)) as session:
        (failed,) = session.exec(select(models.Result).where(models.Result.status == "failed")).all()
        assert (failed.dump_id, failed.replay_id) == (described.dump_id, "r")
        dump = session.get(models.MODELS[IndexedDump], described.dump_id)
        assert dump.last_result == failed.id and dump.seq_len == described.seq_len
    row = query.get_dump(store, described.dump_id)
    assert {f.name for f in fields(row)} > set(columns_of(DumpColumns))
    assert (row.status, row.training, row.replayable) == ("failed", described.training, True)
