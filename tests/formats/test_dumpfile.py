"""A dump file gives back exactly what was captured, or a CorruptDump: never other tensors, never a traceback."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from actordbg.base.errors import StoreProblem, Unsupported
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import MAX_RECORD, DumpRecord
from actordbg.store import payload
from actordbg.store.layout import Store

BASE = DumpRecord("d-1", "run", 0, "2025-06-19T05:26:08.430740Z", 4, 250, 1000)


def typical() -> dict[str, torch.Tensor]:
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
        "log_probs": torch.randn(4, 99, generator=generator),
        "bf16": torch.randn(3, 4, generator=generator).bfloat16(),
        "signed_zero": torch.tensor([0.0, -0.0]),
        "nan": torch.tensor([float("nan"), float("inf"), 1.0]),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}
    if left.dtype != right.dtype or left.shape != right.shape or left.stride() != right.stride():
        return False
    if left.is_floating_point() and left.numel():
        kind = bits[left.element_size()]
        return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))
    return torch.equal(left, right)


def test_values_dtypes_shapes_and_strides_come_back_exactly(store: Store):
    record, blob = payload.encode(BASE, typical())
    dump = payload.load(store.publish_dump(record, blob))
    assert dump.record == record
    assert {name for name, tensor in typical().items() if not same(tensor, dump.tensors[name])} == set()


def test_ids_and_masks_are_stored_narrow_and_wide_ids_are_not():
    record, _ = payload.encode(BASE, typical())
    stored = {name: spec.stored for name, spec in record.tensors.items()}
    assert stored["sequences"] == "uint24" and stored["attention_mask"] == "bool" and stored["float_mask"] == "bool"
    assert stored["negative"] == "int32" and stored["small_ids"] == "uint16" and stored["scalar"] == "uint16"
    assert stored["wide"] == "int64" and stored["signed_zero"] == "float32"


def test_the_header_alone_gives_the_record(store: Store):
    record, blob = payload.encode(BASE, typical())
    path = store.publish_dump(record, blob)
    assert dumpfile.read_record(path) == record


def test_a_record_longer_than_the_first_read_is_read_whole(store: Store):
    record, blob = payload.encode(replace(BASE, extra={"x": "y" * 20_000}), {"sequences": torch.ones(1, 2).long()})
    assert dumpfile.read_record(store.publish_dump(record, blob)) == record


@pytest.mark.parametrize("tool", ["library", "zstd"])
def test_ordinary_zstd_turns_a_dump_into_a_safetensors_file(tool: str, tmp_path: Path):
    record, blob = payload.encode(BASE, typical())
    (tmp_path / "dump.zst").write_bytes(blob)
    if tool == "zstd" and shutil.which("zstd"):
        plain = subprocess.run(["zstd", "-dc", tmp_path / "dump.zst"], check=True, capture_output=True).stdout
    else:
        plain = zstandard.ZstdDecompressor().decompressobj().decompress(blob[8 + struct.unpack("<I", blob[4:8])[0] :])
    tensors = safetensors.torch.load(plain)
    ids = tensors["sequences.lo"].long() + 65536 * tensors["sequences.hi"].long()
    assert torch.equal(ids, typical()["sequences"])
    assert record.dump_id in plain[:4000].decode(errors="replace")


UNREADABLE = {
    "over the limit": replace(BASE, arguments={"images": ["x" * 4096] * 1100}),
    "not a plain name": replace(BASE, run="../up"),
    "out of range": replace(BASE, rank=-1),
    "not a timestamp": replace(BASE, timestamp="yesterday"),
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_a_record_that_no_reader_would_accept_is_not_written(why: str):
    with pytest.raises(Unsupported, match=why) as refused:
        payload.encode(UNREADABLE[why], {"sequences": torch.ones(2, 3).long()})
    assert refused.value.hint and "d-1" in refused.value.message


@pytest.mark.parametrize("temperature", [-1, -(2**63), 2**63 - 1, -0.5, 1e300])
def test_a_temperature_that_a_reader_accepts_is_written(temperature: float):
    record, blob = payload.encode(replace(BASE, temperature=temperature), {"sequences": torch.ones(2, 3).long()})
    assert dumpfile.unpack(blob)[0] == record and record.temperature == temperature
    with pytest.raises(Unsupported, match="out of range"):
        payload.encode(
            replace(BASE, temperature=2**63 if temperature > 0 else -(2**63) - 1), {"sequences": torch.ones(2, 3).long()}
        )


def test_more_tensors_than_a_reader_accepts_are_not_written():
    header = b"{" + b" " * MAX_RECORD + b"}"
    with pytest.raises(Unsupported, match="list of tensors"):
        dumpfile.pack(BASE, len(header).to_bytes(8, "little") + header)


def test_two_tensors_that_would_be_stored_under_one_name_are_not_written():
    ids = torch.tensor([[70_000]])
    with pytest.raises(Unsupported, match="both be stored"):
        payload.encode(BASE, {"sequences": ids, "sequences.lo": torch.tensor([[7]])})


def test_a_missing_file_is_a_store_problem(tmp_path: Path):
    with pytest.raises(StoreProblem):
        dumpfile.read_record(tmp_path / "nothing")


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.uint8]),
    high=st.sampled_from([2, 100, 2**20]),
    order=st.randoms(use_true_random=False),
)
def test_any_layout_comes_back(shape: list[int], dtype: torch.dtype, high: int, order: random.Random):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = torch.randint(0, high if dtype in (torch.int64, torch.int32) else 2, shape).to(dtype).permute(dims)
    _, blob = payload.encode(BASE, {"x": tensor})
    assert same(payload.widen(*dumpfile.unpack(blob)).tensors["x"], tensor)
