"""A column is declared once, in `columns` or `lab_columns`: rows, SQL, `--where` and the SQLModel classes have what it says."""

import os
import shutil
import sys
from dataclasses import fields

import catalogcases as cases
import pytest
from roots import ROOT, run_program
from sqlmodel import Session, create_engine, select

from actordbg.catalog import columns, dump_rows, lab_columns, migrate, models, query
from actordbg.catalog.columns import COMPUTED, CallerColumns, Dump, DumpRow, Row
from actordbg.catalog.indexer import refresh
from actordbg.catalog.lab_columns import ReplayRow, Result
from actordbg.catalog.tables import DUMP_COLUMNS, WHERE_COLUMNS
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.replay_record import ResultRecord

IN_THE_FILE_ONLY = {
    "format_version", "monotonic_ns", "arguments", "tensors", "process_groups", "extra", "actor", "origin", "trigger_facts",
    "rng", "versions", "payload_sha256",
}  # fmt: skip
"""Fields of a dump's record that are not columns: objects, and what nobody selects by."""


def types_of(record):
    """The type of each field of a record, by name."""
    return {field.name: str(field.type).partition(" | ")[0].partition("[")[0] for field in fields(record)}


def declared(row):
    """The type of each column of a row's class, by name."""
    return {name: column.type.__name__ for name, column in row.columns.items()}


def test_every_field_of_a_dumps_record_is_a_column_of_its_type_or_stays_in_the_file():
    said = {name: kind for name, kind in types_of(DumpRecord).items() if name not in IN_THE_FILE_ONLY}
    taken = {name: column.type.__name__ for name, column in DUMP_COLUMNS.items() if not column.of}
    assert taken | {"timestamp": "str"} == said  # which the catalog holds as a number
    assert {column.of for column in DUMP_COLUMNS.values()} == {"", COMPUTED, "arguments", "actor", "versions"}
    described = cases.record(0)
    (read,) = dump_rows.columns_of([described.to_json().encode()], [1])["seq_len"]
    assert read == described.seq_len and not CallerColumns.columns.keys() & Dump.columns.keys()
    assert dump_rows.columns_of([described.to_json().encode()], [1]).keys() == DUMP_COLUMNS.keys()


def test_every_field_of_a_result_and_every_setting_is_a_column_of_its_type():
    assert Result.columns.keys() == {*types_of(ResultRecord), "id"}
    settings = {setting.stored: setting.kind.__name__ for setting in SETTINGS.values()}
    assert settings == {name: declared(lab_columns.Replay)[name] for name in settings}


def test_every_column_says_what_it_holds():
    rows = [
        row
        for module in (columns, lab_columns)
        for row in vars(module).values()
        if isinstance(row, type) and issubclass(row, Row)
    ]
    tables = {row.table: row for row in rows if row.table}
    known = [*models.TABLES, models.DumpAndCaller]
    assert len(tables) == len(known)
    for model in known:
        texts = tables[model.__tablename__].meanings()
        assert all(texts[name] == field.description for name, field in model.model_fields.items())
        assert model.model_fields.keys() == tables[model.__tablename__].columns.keys()


def test_a_dumps_row_has_the_columns_of_where_with_their_types():
    """The row's class repeats the type of what it shows of the last result, for mypy."""
    for name, column in DumpRow.columns.items():
        if name != "path":
            source = WHERE_COLUMNS[name]
            assert column.type is source.row.columns[source.stored].type or name == "timestamp"


def test_the_sqlmodel_classes_read_what_was_indexed(store):
    (described,) = cases.fill(store, 1)
    folder = cases.write_spec(store, cases.spec("r", [described]))
    cases.append(folder / "rank0.jsonl", cases.result("r", described.dump_id, "failed"))
    refresh(store)
    with Session(create_engine(f"sqlite:///{store.catalog_path}")) as session:
        (failed,) = session.exec(select(models.Result).where(models.Result.status == "failed")).all()
        assert (failed.dump_id, failed.replay_id) == (described.dump_id, "r")
        replay = session.get(models.Replay, "r")
        assert replay is not None and replay.config == cases.spec("r", [described]).config.to_dict()
        where = (models.Caller.rank == described.rank, models.Dump.seq_len >= described.seq_len)
        (dump,) = session.exec(select(models.Dump).join(models.Caller).where(*where)).all()
        assert (dump.dump_id, dump.last_result) == (described.dump_id, failed.id)
    row = query.get_dump(store, described.dump_id)
    assert type(row) is DumpRow and vars(row).keys() == DumpRow.columns.keys()
    assert vars(query.get_replay(store, "r")).keys() == ReplayRow.columns.keys()
    assert (row.status, row.training, row.replayable) == ("failed", described.training, True)


ADDED = """    vllm_version: Version
    \"\"\"version of vllm in the run\"\"\"
    torch_version: Version
"""
USES_IT = """
import sys
from pathlib import Path
import catalogcases as cases
import pytest
from catalog_page import catalog_markdown, schema_sql
from actordbg.catalog import migrate, models, query
from actordbg.catalog.indexer import refresh
from actordbg.store.layout import Store
migrate.SCRIPT.write_text(schema_sql())
store = Store(sys.argv[1])
assert not migrate.look(store.catalog_path)[1] and refresh(store).dumps == 2, "the catalog of before is made anew"
(row,) = query.select_dumps(store, "vllm_version='0.11'")
assert row.vllm_version == "0.11" and row.torch_version == "2.13.0"
assert models.Caller.model_fields["vllm_version"].description == "version of vllm in the run"
assert "- `vllm_version` (text): version of vllm in the run" in catalog_markdown()
"""


@pytest.mark.slow
def test_a_column_is_added_in_one_place(store, tmp_path):
    """Follow the recipe of CONTRIBUTING in a copy of the package: the declaration, the next revision, and `make docs`."""
    cases.publish(store, cases.record(0))
    cases.publish(store, cases.record(1, versions={"torch": "2.13.0", "vllm": "0.11"}))
    refresh(store)
    shutil.copytree(ROOT / "actordbg", tmp_path / "actordbg", ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in (
        ("columns.py", "    torch_version: Version\n", ADDED),
        ("migrate.py", f'HEAD = "{migrate.HEAD}"', 'HEAD = "later"'),
    ):
        path = tmp_path / "actordbg" / "catalog" / name
        path.write_text(path.read_text().replace(before, after))
    places = [tmp_path, ROOT / "docs", ROOT / "tests" / "support"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
    words = [sys.executable, "-c", USES_IT, os.fspath(store.root)]
    done = run_program(words, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
