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

from actordbg.base.errors import CorruptDump, StoreProblem, Unsupported
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


def damaged() -> dict[str, bytes]:
    record, blob = payload.encode(BASE, typical())
    size = 8 + struct.unpack("<I", blob[4:8])[0]
    frame = blob[size:]
    plain = dumpfile.unpack(blob)[1]
    unsized = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(plain)
    unchecked = zstandard.ZstdCompressor(write_checksum=False).compress(plain)
    bomb = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(64 * 2**20))
    other = dumpfile.pack(replace(record, payload_sha256="0" * 64), plain)
    return {
        "empty": b"", "short": blob[:6], "magic": b"PK" + blob[2:], "record cut": blob[: size // 2], "no payload": blob[:size],
        "payload cut": blob[:-100], "trailing": blob + b"x", "two frames": blob + frame, "unsized": blob[:size] + unsized,
        "unchecked": blob[:size] + unchecked, "bomb": blob[:size] + bomb, "other payload": other,
        "forged record size": blob[:4] + struct.pack("<I", 2**31) + blob[8:],
        "flipped": blob[:-300] + bytes([blob[-300] ^ 1]) + blob[-299:],
    }  # fmt: skip


@pytest.mark.parametrize("kind", damaged())
def test_damage_is_a_corrupt_dump(kind: str, tmp_path: Path):
    path = tmp_path / "dump"
    path.write_bytes(damaged()[kind])
    with pytest.raises(CorruptDump):
        dumpfile.read_payload(path, max_bytes=2**20)
    if kind != "other payload":  # a file of two valid halves: only the hash tells, and `dump verify` checks it
        with pytest.raises(CorruptDump):
            payload.load(path, max_bytes=2**20)


@pytest.mark.parametrize("offset", [12, 60, 200])
def test_a_changed_byte_of_the_record_is_found(offset: int, tmp_path: Path):
    _, blob = payload.encode(BASE, typical())
    path = tmp_path / "dump"
    path.write_bytes(blob[:offset] + bytes([blob[offset] ^ 1]) + blob[offset + 1 :])
    with pytest.raises(CorruptDump, match="CRC-32"):
        dumpfile.read_record(path)


def test_a_payload_over_the_cap_is_refused_before_it_is_decompressed(store: Store):
    record, blob = payload.encode(BASE, {"sequences": torch.zeros(1, 2**20).double() + 0.5})
    with pytest.raises(CorruptDump, match="over the limit"):
        payload.load(store.publish_dump(record, blob), max_bytes=2**20)


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2**40, 1)])
def test_forged_strides_never_allocate_or_alias(strides: tuple[int, int]):
    record, blob = payload.encode(BASE, {"x": torch.arange(6.0).reshape(2, 3)})
    _, plain = dumpfile.unpack(blob)
    forged = replace(record, tensors={"x": replace(record.tensors["x"], strides=strides)})
    with pytest.raises(CorruptDump):
        payload.widen(forged, plain)


def test_a_missing_file_is_a_store_problem(tmp_path: Path):
    with pytest.raises(StoreProblem):
        dumpfile.read_record(tmp_path / "nothing")


def test_mutated_files_are_refused():
    _, blob = payload.encode(BASE, typical())
    generator = random.Random(0)
    for _ in range(400):
        mutated = bytearray(blob)
        for _ in range(generator.randint(1, 4)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        if bytes(mutated) != blob:
            with pytest.raises(StoreProblem):
                dumpfile.unpack(bytes(mutated), max_bytes=2**24, hash_too=False)


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
