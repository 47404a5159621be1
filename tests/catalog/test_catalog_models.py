"""A column is declared once, in `models`; a field of a record that becomes a column, once there and once in the record."""

from __future__ import annotations

from dataclasses import fields

import catalogcases as cases
from sqlmodel import Session, create_engine, select

from actordbg.catalog import dump_rows, models, query
from actordbg.catalog.indexer import refresh
from actordbg.catalog.tables import COLUMNS, DUMP_COLUMNS
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.replay_record import ResultRecord
from actordbg.store.layout import Store

IN_THE_FILE_ONLY = {
    "format_version", "monotonic_ns", "arguments", "tensors", "process_groups", "extra", "actor", "origin", "trigger_facts",
    "rng", "versions", "payload_sha256",
}  # fmt: skip
"""Fields of a dump's record that are not columns: objects, and what nobody selects by."""
COMPUTED = {"padding", "with_outputs", "with_rng", "bytes", "pack"}
OUT_OF_OBJECTS = {name for _, names in dump_rows._MEMBERS.values() for name in names}


def types_of(record: type) -> dict[str, str]:
    """The type of each field of a record, by name."""
    return {field.name: str(field.type).partition(" | ")[0].partition("[")[0] for field in fields(record)}


def test_every_field_of_a_dumps_record_is_a_column_of_its_type_or_stays_in_the_file() -> None:
    said = {name: kind for name, kind in types_of(DumpRecord).items() if name not in IN_THE_FILE_ONLY}
    of_objects = OUT_OF_OBJECTS | {*dump_rows.VERSIONS}
    taken = {name: one.type for name, one in DUMP_COLUMNS.items() if name not in COMPUTED | of_objects}
    assert taken | {"timestamp": "str"} == said  # which the catalog holds as a number
    assert {*dump_rows.DUMP_COLUMNS} == {*DUMP_COLUMNS} and not {*COLUMNS["caller"]} & {*COLUMNS["dump"]}


def test_every_field_of_a_result_and_every_setting_is_a_column_of_its_type() -> None:
    assert types_of(ResultRecord) == {name: one.type for name, one in COLUMNS["result"].items() if name != "id"}
    settings = {setting.stored: setting.kind.__name__ for setting in SETTINGS.values()}
    assert settings == {name: COLUMNS["replay"][name].type for name in settings}
    assert all(column.comment for columns in COLUMNS.values() for column in columns.values())


def test_the_sqlmodel_classes_read_what_was_indexed(store: Store) -> None:
    (described,) = cases.fill(store, 1)
    folder = cases.write_spec(store, cases.spec("r", [described]))
    cases.append(folder / "rank0.jsonl", cases.result("r", described.dump_id, "failed"))
    refresh(store)
    with Session(create_engine(f"sqlite:///{store.catalog_path}")) as session:
        (failed,) = session.exec(select(models.Result).where(models.Result.status == "failed")).all()
        assert (failed.dump_id, failed.replay_id) == (described.dump_id, "r")
        replay = session.get(models.Replay, "r")
        assert replay is not None and replay.config == cases.spec("r", [described]).config.to_dict()
    row = query.get_dump(store, described.dump_id)
    assert vars(row).keys() == models.DumpRow.model_fields.keys()
    assert vars(query.get_replay(store, "r")).keys() == models.ReplayRow.model_fields.keys()
    assert (row.status, row.training, row.replayable) == ("failed", described.training, True)
