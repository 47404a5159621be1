"""Records that are one JSON file each: a replay's specification, comparison, noise floor, matrix. The first byte says which."""

import contextlib
import json
import sqlite3

from fuzzing import damage, mutate_json, same_json

from actordbg.catalog.record_rows import _compared_dump, _comparison_run, setting_columns, spec_columns
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.comparison_record import (
    ComparisonRecord,
    DumpComparison,
    DumpNoise,
    Figures,
    NoiseRecord,
    NoiseVariant,
    ParameterFigures,
    SideInfo,
    WorstToken,
)
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.records.stored_record import StoredRecord

PARSERS = (ReplaySpec.from_json, StoredRecord.from_json, ReplayConfig.from_dict)
KINDS = {b"R": ReplaySpec, b"C": ComparisonRecord, b"N": NoiseRecord, b"M": MatrixRecord}
_SQLITE = sqlite3.connect(":memory:")
_AT, _ID = "2025-06-19T05:26:08.430740Z", "20250619T052608-9f3a2c"


def seeds():
    figures = Figures(3, 0.5, 0.1)
    compared = DumpComparison(
        "d-1", "mismatch", ("max-abs",), (), 30, figures, figures, 0.5, parameters=(ParameterFigures("w", figures, True),),
        worst_tokens=(WorstToken(0, 1, -1.5, None, None, 7),), not_compared={"entropy": "not recorded"},
    )  # fmt: skip
    spec = ReplaySpec(
        _ID, _AT, ReplayConfig(), (ReplayInput("d-1", "dumps/r/rank0000/d-1", 0, 2, 30, 55),), "rank=0", versions={"torch": "2"}
    )
    side = SideInfo("replay", _ID, "fp32", "fp32", {"zero_stage": 3})
    comparison = ComparisonRecord(_ID, _AT, side, side, {"max_abs": 0.1}, "mismatch", (compared,), reasons=("far",))
    noise = NoiseRecord(
        _ID, _AT, _ID, {"tp": 1}, "fp32", None, (NoiseVariant("repeat", _ID, figures),), (DumpNoise("d-1", {"max_abs": 0.1}),), {"max_abs": 0.1},
    )  # fmt: skip
    cell = MatrixCell(0, "ZeRO 3", {"zero_stage": 3}, "passed", {"tp": 1}, _ID, counts={"passed": 1}, known=("rule",))
    matrix = MatrixRecord(_ID, _AT, "complete", {"zero_stage": [3]}, (cell,), ("d-1",), options={"runner": [1, 2.5]})
    made = {"spec": spec, "comparison": comparison, "noise": noise, "matrix": matrix}
    return {name: key + one.to_json().encode() for (name, one), key in zip(made.items(), KINDS, strict=True)}


def one_input(data):
    kind = KINDS.get(data[:1])
    record = None
    with damage():
        if kind is not None:
            record = kind.from_json(data[1:])
    if record is not None:
        _in_the_catalog(record)
        again = kind.from_json(record.to_json())
        assert same_json(json.loads(again.to_json()), json.loads(record.to_json()))


def _in_the_catalog(record):
    """The record makes rows, and every value of them fits into SQLite."""
    rows = []
    if isinstance(record, ReplaySpec):
        rows = [spec_columns(record) | setting_columns(record.config.to_dict(), None)]
    elif isinstance(record, ComparisonRecord):
        rows = [_comparison_run(record), *(_compared_dump(record, dump) for dump in record.dumps)]
    for value in (value for row in rows for value in row.values()):
        plain = json.dumps(value) if isinstance(value, dict | list | tuple) else value
        _SQLITE.execute("SELECT ?", (plain,)).fetchall()


def mutate(data, chance, havoc):
    with contextlib.suppress(IndexError):
        return data[:1] + mutate_json(data[1:], chance, havoc)
    return havoc(data)
