"""The record at the head of a dump: the strict parser, and the fast path that makes rows of the catalog."""

import json

import catalogcases
from fuzzing import damage, mutate_json

from actordbg.catalog.dump_rows import columns_of_one
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.formats.dump_record import DumpRecord, TensorSpec
from actordbg.formats.record_reading import parse_record, parse_timestamp, strict_json

PARSERS = (parse_record, parse_timestamp, strict_json, columns_of_one)
WORDS = tuple(f'"{name}":'.encode() for name in DumpRecord.__dataclass_fields__)
mutate = mutate_json
FIELDS = [name for name, column in DUMP_COLUMNS.items() if not column.of]
_COLUMNS = {*FIELDS, "arguments", "actor", "versions", "format_version"}


def seeds():
    spec = TensorSpec("int64", (2, 30), (33, 1), "uint24")
    full = catalogcases.record(4, tensors={"sequences": spec, "output.log_probs": spec}, pinned=True, triggered="nan")
    return {"plain": catalogcases.record(1).to_json().encode(), "full": full.to_json().encode()}


def one_input(data):
    record, row = None, None
    with damage():
        record = parse_record(data)
    with damage():
        row = columns_of_one(data, len(data))
    if record is not None:
        assert parse_record(record.to_json()) == record and parse_timestamp(record.timestamp).year
        fits = record.batch_size * record.seq_len < 2**63
        assert not fits or row is not None, "the fast path refuses a sound record"
    if row is not None:
        _agrees(row, parse_record(_about_columns(data)) if record is None else record)


def _agrees(row, record):
    """The catalog holds a temperature as a double, so a whole number over 2^53 as the nearest one."""
    found = {name: row[name][0] for name in FIELDS}
    said = {name: getattr(record, name) for name in FIELDS}
    for one in (found, said):
        if one["temperature"] is not None:
            one["temperature"] = float(one["temperature"])
    assert found == said, "a row that is not the record's"


def _about_columns(data):
    """A record without what makes no column: there the fast path leaves the check to whoever reads the dump."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AssertionError("a row of what is not JSON") from error
    return json.dumps({name: value for name, value in said.items() if name in _COLUMNS}).encode()
