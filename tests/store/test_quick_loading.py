"""The two short cuts of a load, beside the full checks: they are taken for what our recorder writes, and for nothing else."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import pytest
import torch

import actordbg.store
from actordbg.base.errors import CorruptDump, StoreProblem
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.dumpfile import entries_as_written
from actordbg.formats.record_reading import parse_record
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.store.quick_record import quick_record, quickly

RECORD = DumpRecord(
    "d-1", "run", 0, "2025-06-19T05:26:08.430740Z", 2, 3, 6, temperature=1, replayable=False, extra={"images": "a list"},
    arguments={"return_output": True, "packed_seq_lens": None, "sizes": [1, 2.5, {"a": "b"}], "big": 2**70},
    process_groups={"ring_attn_group": {"size": 2, "ranks": [0, 1]}},
)  # fmt: skip
TENSORS = {
    "sequences": torch.tensor([[70_000, 3, 1], [5, 128_255, 2]]),
    "a_mask": torch.ones(2, 3, dtype=torch.int64),
    "b_mask": torch.ones(2, 3, dtype=torch.bool),
    '100%d "done"': torch.tensor([-1, 2**40]),
    "slice": torch.arange(8.0).view(2, 4)[:, :3],
    "scalar": torch.tensor(7.5),
    "bf16": torch.ones(3).bfloat16() / 3,
}


def made(tensors: dict[str, torch.Tensor] = TENSORS) -> tuple[DumpRecord, bytes]:
    """A record as it is read, and its payload."""
    return dumpfile.unpack(payload.encode(RECORD, tensors)[1])


def test_the_header_of_a_payload_that_we_wrote_is_known_and_no_changed_one_is():
    record, data = made()
    entries = entries_as_written(record, data)
    assert entries is not None and entries == dumpfile.payload_entries(data)
    assert entries_as_written(replace(record, rank=1), data) is None, "another dump's"
    end = 8 + int.from_bytes(data[:8], "little")
    for place in range(end):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        assert entries_as_written(record, changed) is None
    assert entries_as_written(record, data + b"x") is None and entries_as_written(record, data[:-1]) is None
    for name, spec in record.tensors.items():
        for other in (replace(spec, shape=(*spec.shape, 1)), replace(spec, stored="int16"), replace(spec, stored="text")):
            assert entries_as_written(replace(record, tensors=record.tensors | {name: other}), data) is None


def test_a_header_that_is_put_otherwise_is_parsed_and_says_the_same():
    record, data = made()
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8:end]), indent=1).encode()
    other = len(text).to_bytes(8, "little") + text + data[end:]
    assert entries_as_written(record, other) is None
    loaded = payload.widen(record, other).tensors
    assert all(torch.equal(loaded[name], tensor) and loaded[name].stride() == tensor.stride() for name, tensor in TENSORS.items())


def test_a_tensor_without_elements_is_loaded_however_it_was_laid_out_and_stored():
    empty = torch.empty(1, 0).expand(5, 0)
    record, data = made(
        {"of.lo": torch.empty(0, 2, dtype=torch.uint16), "of.hi": torch.empty(0, 2, dtype=torch.uint8), "e": empty}
    )
    assert payload.widen(record, data).tensors["e"].stride() == empty.stride() == (0, 1)
    ids = replace(record.tensors["of.lo"], dtype="int64", stored="uint24")
    apart = replace(record, tensors={"e": record.tensors["e"], "of": ids})
    assert payload.widen(apart, data).tensors["of"].shape == (0, 2)
    with pytest.raises(CorruptDump, match="cannot be stored"):
        payload.widen(replace(apart, tensors=apart.tensors | {"of": replace(ids, dtype="uint24")}), data)


@pytest.mark.parametrize("mask", ["a_mask", "b_mask"])
def test_of_masks_that_lie_side_by_side_the_damaged_one_is_named(mask: str):
    record, data = made()
    entries = dumpfile.check(record, data)
    last = entries[mask].offset + 5
    assert entries["a_mask"].offset + 6 == entries["b_mask"].offset
    with pytest.raises(CorruptDump, match=f"'{mask}' holds bytes that are neither true nor false"):
        payload.widen(record, data[:last] + b"\2" + data[last + 1 :])


def test_a_record_that_we_wrote_is_read_quickly_and_is_the_one_that_the_full_check_reads():
    record, _ = made({name: tensor for name, tensor in TENSORS.items() if '"' not in name})
    quick = quickly(record.to_json().encode())
    assert quick == record and quick.to_json() == record.to_json() and vars(quick).keys() == vars(record).keys()
    assert type(quick.temperature) is int


ODD = {
    "a text with an escape": {"host": "a\tb"}, "half a pair": {"host": "\udc00"}, "no ASCII": {"host": "ä"}, "unknown": {"new": 1},
    "deep": {"actor": {"a": [[[[[1]]]]]}}, "empty": {"tensors": {"x": ["int64", "int64", [0, 3]]}},
    "strides are null": {"tensors": {"x": ["int64", "int64", [2], None]}}, "too few": {"tensors": {"x": ["int64", "int64", [2], []]}},
    "a reserved name": {"tensors": {"__metadata__": ["int64", "int64", [2]]}}, "huge": {"tensors": {"x": ["int8", "int8", [2**30] * 2]}},
    "no moment": {"timestamp": "2025-02-30T05:26:08.430740Z"}, "no name": {"dump_id": "a/b"}, "no run": {"run": ".."},
    "a number": {"rank": 1.0}, "negative": {"tokens": -1}, "too large": {"pid": 2**63}, "null": {"rank": None},
    "another version": {"format_version": 2}, "infinite": {"actor": {"x": float("inf")}},
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_an_odd_record_is_left_to_the_full_check(what: str):
    line = json.dumps(json.loads(RECORD.to_json()) | ODD[what], ensure_ascii=what != "no ASCII").encode()
    assert quickly(line) is None
    answers = []
    for read in (quick_record, parse_record):
        try:
            answers.append(read(line))
        except StoreProblem as error:
            answers.append((type(error), str(error)))
    assert answers[0] == answers[1]


def test_without_msgspec_a_dump_loads_all_the_same(store: Store, monkeypatch: pytest.MonkeyPatch):
    record, blob = payload.encode(RECORD, TENSORS)
    path = store.publish_dump(record, blob)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.setattr(actordbg.store, "payload", payload)
    for name in ("actordbg.store.payload", "actordbg.store.quick_record"):
        monkeypatch.delitem(sys.modules, name)
    without = importlib.import_module("actordbg.store.payload")
    assert without is not payload
    loaded, usual = without.load(path), payload.load(path)
    assert loaded.record == usual.record and all(torch.equal(loaded.tensors[name], usual.tensors[name]) for name in TENSORS)
