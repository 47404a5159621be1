"""The record is the contract between processes: what it accepts, what it refuses, and with which remedy."""

import json
from datetime import datetime, timezone

import pytest
from casefiles import cases_of

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.dump_record import DumpRecord, TensorSpec, format_timestamp, is_plain_name, make_dump_id
from actordbg.formats.record_reading import parse_record, parse_timestamp
from actordbg.formats.weight_hashes import ParameterHash, WeightRecord
from actordbg.records.run_files import read_weights


def record(**changes):
    values = {
        "dump_id": "20250619T052608.430740Z-000012-4711-9f3a2c1b", "run": "r", "rank": 3, "batch_size": 2, "seq_len": 10,
        "timestamp": "2025-06-19T05:26:08.430740Z", "tokens": 15, "temperature": 0.5,
        "tensors": {"sequences": TensorSpec("int64", (2, 10), (10, 1), "int32")},
        "arguments": {"return_output": True, "packed_seq_lens": None},
    }  # fmt: skip
    return DumpRecord(**(values | changes))  # type: ignore[arg-type]


def changed(**changes):
    return json.dumps(json.loads(record().to_json()) | changes)


def test_a_record_survives_json_exactly_and_what_has_its_default_value_is_left_out():
    assert parse_record(record().to_json()) == record() == parse_record(changed(invented=1)) and record().padding == 5
    assert set(json.loads(record(temperature=None).to_json())) == {
        "format_version", "dump_id", "run", "rank", "timestamp", "batch_size", "seq_len", "tokens", "tensors", "arguments",
    }  # fmt: skip


@pytest.mark.parametrize("shape, strides", [((2, 10), (10, 1)), ((2, 1), (1, 1)), ((0, 3), (3, 1)), ((), ())])
def test_strides_of_a_contiguous_tensor_are_left_out(shape, strides):
    spec = TensorSpec("int64", shape, strides, "int32")
    assert spec.to_list() == ["int64", "int32", list(shape)]
    assert parse_record(record(tensors={"x": spec}).to_json()).tensors["x"] == spec


def test_a_newer_version_is_refused_with_the_remedy():
    with pytest.raises(NewerFormat) as caught:
        parse_record(changed(format_version=2))
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("fields", cases_of("corrupt_records"))
def test_anything_else_is_a_corrupt_dump(fields):
    with pytest.raises(CorruptDump):
        parse_record(changed(**json.loads(fields)))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "{" * 100_000, "[" * 100_000])
def test_what_is_no_record_is_a_corrupt_dump(text):
    with pytest.raises(CorruptDump):
        parse_record(text)


def test_moments_and_names_sort_by_time():
    moment = datetime(2025, 6, 19, 5, 26, 8, 430740, tzinfo=timezone.utc)
    assert format_timestamp(moment) == record().timestamp and parse_timestamp(record().timestamp) == moment
    first, second = make_dump_id(record().timestamp, 12, 4711, "ff"), make_dump_id("2025-06-19T05:26:08.430741Z", 3, 1, "00")
    assert first < second and is_plain_name(first)


@pytest.mark.parametrize("of_file", [{}, {"format": "1"}, {"format": None}, {"format": True}, {"rank": True}])
@pytest.mark.parametrize("of_parameter", [{}, {"sha256": ""}, {"sha256": 0}, {"part": []}])
def test_hashes_of_weights_are_what_they_say_or_damaged(tmp_path, of_file, of_parameter):
    whole = WeightRecord("r", 0, "h", 1, "i", 0, None, "t", 0.5, 8, {"w": ParameterHash("float32", (2,))})
    data = json.loads(whole.to_json()) | of_file
    data["parameters"]["w"] |= of_parameter
    (tmp_path / "weights.json").write_text(json.dumps(data))
    if not of_file and not of_parameter:
        assert read_weights(tmp_path / "weights.json") == whole
    else:
        with pytest.raises(CorruptDump):
            read_weights(tmp_path / "weights.json")
