"""The reference page of the catalog is what the code says."""

from __future__ import annotations

from pathlib import Path

from actordbg.catalog import headers, models, query
from actordbg.catalog.columns import COLUMNS
from actordbg.catalog.replays import RESULT_COLUMNS, SETTINGS
from actordbg.catalog.schema_doc import catalog_markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "catalog.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == catalog_markdown(), "run `python docs/generate.py`"


def test_the_page_names_every_table_and_every_column() -> None:
    page = catalog_markdown()
    for table in models.metadata.tables.values():
        assert f"### {table.name}\n" in page
        assert all(f"`{column.name}`" in page for column in table.columns)
    assert all(f"| `{name}` |" in page for name in COLUMNS)


def test_rows_that_are_written_and_read_fit_the_tables() -> None:
    tables = models.metadata.tables
    assert {*headers.DUMP_COLUMNS, "last_result"} == set(tables["dump"].columns.keys())
    assert {*RESULT_COLUMNS, "id"} == set(tables["result"].columns.keys())
    assert set(SETTINGS) <= set(tables["replay"].columns.keys())
    assert set(query.PatchEventRow.__dataclass_fields__) == set(tables["patch_event"].columns.keys())
    for column in COLUMNS.values():
        table = tables["result" if column.of_result else "dump"]
        assert column.sql[2:] in table.columns
