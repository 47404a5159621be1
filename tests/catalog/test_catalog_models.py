"""What is written into the catalog and read from it fits its tables."""

from __future__ import annotations

from actordbg.catalog import dump_rows as headers
from actordbg.catalog import query
from actordbg.catalog import tables as models
from actordbg.catalog.columns import COLUMNS
from actordbg.catalog.replay_rows import RESULT_COLUMNS, SETTINGS


def test_rows_that_are_written_and_read_fit_the_tables() -> None:
    tables = models.metadata.tables
    assert {*headers.DUMP_COLUMNS, "last_result"} == set(tables["dump"].columns.keys())
    assert {*RESULT_COLUMNS, "id"} == set(tables["result"].columns.keys())
    assert set(SETTINGS) <= set(tables["replay"].columns.keys())
    assert set(query.PatchEventRow.__dataclass_fields__) == set(tables["patch_event"].columns.keys())
    for column in COLUMNS.values():
        if column.sql.startswith("(SELECT c."):
            assert column.name in tables["comparison"].columns
            continue
        table = tables["result" if column.of_result else "dump"]
        assert column.sql[2:] in table.columns
