"""A dump file gives back exactly what was captured, or a CorruptDump: never other tensors, never a traceback."""

import json
import os
import struct
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings, strategies as st
from plainkit import all_same, same

from actordbg.base.errors import CorruptDump, StoreProblem, Unsupported
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import MAX_RECORD, DumpRecord
from actordbg.formats.encoding import PlainTensor, array_dtype
from actordbg.store import payload

BASE = DumpRecord("d-1", "run", 0, "2025-06-19T05:26:08.430740Z", 4, 250, 1000)
IDS = {"sequences": torch.ones(2, 3).long()}


def typical():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 128256, (4, 300), generator=generator)
    return {
        "sequences": ids[:, :250],
        "attention_mask": (ids[:, :250] > 50).long(),
        "action_mask": ids[:, 1:100] > 7,
        "float_mask": (ids[:, :9] > 9).float(),
        "expanded": torch.tensor([[True], [False]]).expand(2, 5),
        "transposed": ids.t(),
        "wide": torch.tensor([2**40, -(2**40)]),
        "negative": torch.tensor([[-1, 2**31 - 1]]),
        "small_ids": torch.tensor([[0, 65535]]),
        "highest_ids": torch.tensor([[0, 2**24 - 1]]),
        "over_ids": torch.tensor([[0, 2**24]], dtype=torch.int32),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "empty_expanded": torch.empty(1, 0).expand(5, 0),
        "log_probs": torch.randn(4, 99, generator=generator),
        "bf16": torch.randn(3, 4, generator=generator).bfloat16(),
        "bf16_mask": torch.tensor([1.0, 0.0]).bfloat16(),
        "float8": torch.randn(3, 9, generator=generator).to(torch.float8_e4m3fn),
        "signed_zero": torch.tensor([0.0, -0.0]),
        "nan": torch.tensor([float("nan"), float("inf"), 1.0]),
    }


NARROW = {
    "sequences": "uint24", "attention_mask": "bool", "float_mask": "bool", "bf16_mask": "bool", "negative": "int32",
    "small_ids": "uint16", "scalar": "uint16", "wide": "int64", "signed_zero": "float32",
}  # fmt: skip


def test_values_dtypes_shapes_and_strides_come_back_exactly_and_ids_and_masks_are_stored_narrow(store):
    record, blob = payload.encode(replace(BASE, extra={"x": "y" * 20_000}), typical())
    path = store.publish_dump(record, blob)
    dump = payload.load(path)
    assert dump.record == record == dumpfile.read_record(path) and all_same(dump.tensors, typical())
    assert {name: record.tensors[name].stored for name in NARROW} == NARROW


def test_ordinary_zstd_turns_a_dump_into_a_safetensors_file():
    record, blob = payload.encode(BASE, typical())
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(blob[8 + struct.unpack("<I", blob[4:8])[0] :])
    tensors = safetensors.torch.load(plain)
    ids = tensors["sequences.lo"].long() + 65536 * tensors["sequences.hi"].long()
    assert torch.equal(ids, typical()["sequences"]) and record.dump_id in plain[:4000].decode(errors="replace")


UNREADABLE = {
    "over the limit": replace(BASE, arguments={"images": ["x" * 4096] * 1100}),
    "more than 65536 values": replace(BASE, arguments={"sizes": [0] * 70_000}),
    "nested deeper": replace(BASE, arguments=json.loads('{"a":' * 70 + "1" + "}" * 70)),
    "surrogate": replace(BASE, host="\ud800"),
    "not a plain name": replace(BASE, run="../up"),
    "out of range": replace(BASE, rank=-1),
    "a number is out of range": replace(BASE, temperature=2**63),
    "not a timestamp": replace(BASE, timestamp="yesterday"),
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_a_record_that_no_reader_would_accept_is_not_written(why):
    with pytest.raises(Unsupported, match=why) as refused:
        payload.encode(UNREADABLE[why], IDS)
    assert refused.value.hint and "d-1" in refused.value.message


@pytest.mark.parametrize("temperature", [-(2**63), 2**63 - 1, -0.5])
def test_a_temperature_that_a_reader_accepts_is_written(temperature):
    record, blob = payload.encode(replace(BASE, temperature=temperature), IDS)
    assert dumpfile.unpack(blob)[0] == record and record.temperature == temperature


def test_tensors_that_no_reader_would_accept_are_not_written(tmp_path):
    header = b"{" + b" " * MAX_RECORD + b"}"
    with pytest.raises(Unsupported, match="list of tensors"):
        dumpfile.pack(BASE, len(header).to_bytes(8, "little") + header)
    with pytest.raises(Unsupported, match="both be stored"):
        payload.encode(BASE, {"sequences": torch.tensor([[70_000]]), "sequences.lo": torch.tensor([[7]])})
    with pytest.raises(StoreProblem):
        dumpfile.read_record(tmp_path / "nothing")


def test_a_file_larger_than_its_payload_can_be_is_refused_unread(tmp_path):
    """A foreign file may have gigabytes."""
    path = tmp_path / "d-1"
    path.write_bytes(payload.encode(BASE, IDS)[1])
    os.truncate(path, 2**28)
    with pytest.raises(CorruptDump, match="over what its payload"):
        dumpfile.read_file(path)


@pytest.mark.parametrize("mask", ["a_mask", "b_mask"])
def test_of_masks_that_lie_side_by_side_the_damaged_one_is_named(mask):
    record, blob = payload.encode(BASE, {"a_mask": torch.ones(2, 3).long(), "b_mask": torch.ones(2, 3).bool()})
    data = bytearray(dumpfile.unpack(blob)[1])
    data[dumpfile.check(record, data)[mask].offset + 5] = 2
    with pytest.raises(CorruptDump, match=f"'{mask}' holds bytes that are neither true nor false"):
        payload.widen_plain(record, bytes(data))


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.uint8]),
    high=st.sampled_from([2, 100, 2**20]),
    order=st.randoms(use_true_random=False),
)
def test_any_layout_comes_back(shape, dtype, high, order):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = torch.randint(0, high if dtype in (torch.int64, torch.int32) else 2, shape).to(dtype).permute(dims)
    _, blob = payload.encode(BASE, {"x": tensor})
    assert same(payload.as_torch(payload.widen_plain(*dumpfile.unpack(blob))["x"]), tensor)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_every_value_of_a_dtype_that_numpy_lacks_is_the_number_that_torch_reads(dtype):
    bits = np.arange(256, dtype="u1") if "float8" in dtype else np.arange(2**16, dtype="<u2")
    numbers = payload.numbers_of(PlainTensor(dtype, bits.view(array_dtype(dtype)), (1,)))
    theirs = torch.from_numpy(bits).view(getattr(torch, dtype)).float()
    assert torch.equal(torch.from_numpy(numbers.astype("float32")).nan_to_num(7.0), theirs.nan_to_num(7.0))
