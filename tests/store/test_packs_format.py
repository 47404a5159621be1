"""A pack gives back exactly what went into it, dump by dump, or a CorruptDump: never other tensors, never a traceback."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
import subprocess
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import catalogcases
import packcases
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actordbg.base.errors import CorruptDump, NewerFormat, Refused, StoreProblem
from actordbg.dumps.importer import import_paths
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import DumpRecord
from actordbg.store import pack_build as build
from actordbg.store import pack_build as pieces
from actordbg.store import pack_bytes as layout
from actordbg.store import payload, places
from actordbg.store import places as reader
from actordbg.store.layout import Store
from actordbg.store.places import Pack

BASE = catalogcases.record(0)


def encoded(tensors: dict[str, torch.Tensor], number: int = 0) -> tuple[DumpRecord, bytes]:
    return payload.encode(catalogcases.record(number), tensors)


def small_pack(folder: Path) -> Pack:
    """Three dumps: two that share rows, one with everything odd (without the large tensor)."""
    odd = packcases.odd_tensors()
    del odd["large"]
    rows = packcases.samples(4)
    return packcases.write_pack(
        folder,
        [encoded(packcases.batch(rows, 9, 4)), encoded(packcases.batch(rows[:2], 0, 3), 1), encoded(odd, 2)],
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if left.dtype != right.dtype or left.shape != right.shape or left.stride() != right.stride():
        return False
    return left.numel() == 0 or torch.equal(
        left.contiguous().view(bits[left.element_size()]), right.contiguous().view(bits[right.element_size()])
    )


def test_everything_that_a_dump_may_hold_comes_back(tmp_path: Path):
    record, blob = encoded(packcases.odd_tensors())
    pack = packcases.write_pack(tmp_path, [(record, blob)])
    assert pack.read(record.dump_id) == (dumpfile.line_of(blob), dumpfile.unpack(blob)[1])
    dump = payload.load(places.packed_place(pack.path, record.dump_id))
    assert dump.record == record
    assert [n for n, t in packcases.odd_tensors().items() if not same(t, dump.tensors[n])] == []


def test_all_real_dumps_come_back_and_are_27_times_smaller(store: Store, shared_dumps: Path, tmp_path: Path):
    import_paths(store, [shared_dumps])
    paths = sorted(store.iter_dumps(), key=lambda path: path.name)
    pack = packcases.write_pack(tmp_path, [(dumpfile.read_record(p), p.read_bytes()) for p in paths], level=19)
    for path in paths:
        place = places.packed_place(pack.path, places.dump_id_of(path))
        packed, loose = payload.load(place), payload.load(path)
        assert packed.record == loose.record
        assert all(same(packed.tensors[name], loose.tensors[name]) for name in loose.tensors)
        assert pack.read(packed.record.dump_id)[1] == dumpfile.read_payload(path)[1]
    pickles = sum(path.stat().st_size for path in shared_dumps.glob("*.pkl"))
    assert pickles / pack.bytes > 38, "solid blocks of each kind of row; measured: 39.5"


def test_a_run_with_repeated_samples_gets_much_smaller_by_deduplication_and_by_compression(store: Store):
    packcases.fill_ppo(store)
    writer = packcases.PackWriter(store.packs / "ppo-1")
    for path in store.iter_dumps():
        record, data = dumpfile.read_payload(path)
        writer.add(record, dumpfile.line_of(path.read_bytes()), data)
    _, figures = writer.publish()
    files = sum(path.stat().st_size for path in store.iter_dumps())
    assert figures.dumps == 36 and figures.rows == 96 * 4
    assert figures.content / figures.distinct > 2.2 and figures.distinct / figures.stored > 2.2
    assert files / figures.stored > 2


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (0, 1), (1, 1), (5, 0), (13, 40)])
def test_the_same_sample_padded_differently_is_stored_once(left: int, right: int, tmp_path: Path):
    rows = packcases.samples(4)
    alone = packcases.write_pack(tmp_path, [encoded(packcases.batch(rows, 3, 2))])
    cores = sum(index_of(alone).piece_bytes)
    both = packcases.write_pack(
        tmp_path, [encoded(packcases.batch(rows, 3, 2)), encoded(packcases.batch(rows[:2], left, right), 1)]
    )
    assert sum(index_of(both).piece_bytes) - cores < 30, "only runs of padding are new"


def test_shares_sum_to_the_file_and_follow_what_a_dump_needs(tmp_path: Path):
    pack = small_pack(tmp_path)
    shares = pack.shares()
    assert sum(shares) == os.path.getsize(pack.path) and min(shares) > 0
    assert shares[2] > shares[0] > shares[1]


# ---- pieces ----


@given(st.binary(max_size=80), st.sampled_from([1, 2, 4, 8]), st.integers(0, 40), st.integers(0, 40))
def test_runs_are_measured_exactly(middle: bytes, width: int, before: int, after: int):
    element = bytes(range(width))
    data = element * (before + 1) + middle[: len(middle) // width * width] + element * (after + 1)
    cells = [data[at : at + width] for at in range(0, len(data), width)]
    lead = next((n for n, cell in enumerate(cells) if cell != cells[0]), len(cells))
    trail = next((n for n, cell in enumerate(reversed(cells)) if cell != cells[-1]), len(cells))
    assert pieces.leading_run(data, width) == lead * width
    assert pieces.trailing_run(data, width) == trail * width


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), max_size=12), st.sampled_from([1, 2, 4]))
def test_pieces_put_together_are_the_row(runs: list[tuple[int, int]], width: int):
    row = b"".join(bytes([value]) * width * count for value, count in runs)
    for cut in pieces.Cutter().cut([row, row[::-1]], width)[:1]:
        assert b"".join(data * times for data, times in cut) == row


def test_long_cores_are_cut_so_that_no_block_is_large(tmp_path: Path):
    tensors = {"sequences": torch.randint(-(2**62), 2**62, (2, 900_000))}
    record, blob = encoded(tensors)
    pack = packcases.write_pack(tmp_path, [(record, blob)])
    assert max(block.content for block in index_of(pack).blocks) <= build.BLOCK
    assert pack.read(record.dump_id)[1] == dumpfile.unpack(blob)[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16, torch.uint8]),
    high=st.sampled_from([2, 100, 2**20]),
    order=st.randoms(use_true_random=False),
)
def test_any_dumps_come_back(tmp_path: Path, shapes: list[list[int]], dtype: torch.dtype, high: int, order: random.Random):
    dumps = []
    for number, shape in enumerate(shapes):
        dims = list(range(len(shape)))
        order.shuffle(dims)
        tensor = torch.randint(0, high if dtype in (torch.int64, torch.int32) else 2, shape).to(dtype).permute(dims)
        dumps.append(encoded({"x": tensor, "sequences": torch.ones(2, 70).long()}, number))
    pack = packcases.write_pack(tmp_path / str(order.random()), dumps)
    for record, blob in dumps:
        assert pack.read(record.dump_id) == (dumpfile.line_of(blob), dumpfile.unpack(blob)[1])


# ---- the file ----


@pytest.mark.parametrize("tool", ["-l", "-t", "-dc"])
def test_ordinary_zstd_lists_checks_and_decompresses_a_pack(tool: str, tmp_path: Path):
    if not shutil.which("zstd"):
        pytest.skip("no zstd on this machine")
    pack = small_pack(tmp_path)
    done = subprocess.run(["zstd", tool, pack.path], check=True, capture_output=True)
    if tool == "-dc":
        index = index_of(pack)
        assert len(done.stdout) == sum(block.content for block in index.blocks) + foot_of(pack).content


def test_a_pack_of_a_newer_format_is_refused_with_the_remedy(tmp_path: Path):
    pack = small_pack(tmp_path)
    data = Path(pack.path).read_bytes()
    newer = data[:20] + struct.pack("<I", 2) + data[24:]
    (tmp_path / "newer.pack").write_bytes(newer)
    with pytest.raises(NewerFormat, match="format 2") as refused:
        Pack(tmp_path / "newer.pack")
    assert "upgrade" in refused.value.hint


def index_of(pack: Pack) -> layout.Index:
    content = zstandard.ZstdDecompressor().decompress(Path(pack.path).read_bytes()[foot_of(pack).offset :])
    return layout.decode_index(content, foot_of(pack), pack.path)


def foot_of(pack: Pack) -> layout.Foot:
    data = Path(pack.path).read_bytes()
    return layout.parse_foot(data[-layout.FOOT_BYTES :], len(data), pack.path)


def resealed(pack: Pack, change: Callable[[bytearray], None], dumps: int | None = None) -> bytes:
    """The pack's bytes with a change in the content of its index, under right checksums."""
    data, foot = Path(pack.path).read_bytes(), foot_of(pack)
    content = bytearray(zstandard.ZstdDecompressor().decompress(data[foot.offset :]))
    change(content)
    index = layout.compress(bytes(content), 3)
    return data[: foot.offset] + index + layout.foot(foot.offset, index, len(content), dumps or foot.dumps)


def damaged(pack: Pack) -> dict[str, bytes]:
    data, foot = Path(pack.path).read_bytes(), foot_of(pack)

    def counts(place: int, value: int) -> Callable[[bytearray], None]:
        return lambda content: content.__setitem__(slice(4 * place, 4 * place + 4), struct.pack("<I", value))

    bomb = layout.compress(bytes(32 * 2**20), 3)
    return {
        "empty": b"", "short": data[:30], "magic": b"PK" + data[2:], "head only": data[:24], "foot lost": data[:-30],
        "index lost": data[: foot.offset] + data[-layout.FOOT_BYTES :], "trailing": data + b"x", "twice": data + data,
        "flipped foot": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "flipped index": data[: foot.offset + 40] + bytes([data[foot.offset + 40] ^ 1]) + data[foot.offset + 41 :],
        "more blocks": resealed(pack, counts(0, 2**31)), "more pieces": resealed(pack, counts(1, 2**30)),
        "more dumps": resealed(pack, counts(2, 2**20)), "more references": resealed(pack, counts(3, 2**32 - 1)),
        "longer texts": resealed(pack, counts(4, 2**32 - 1)), "longer ids": resealed(pack, counts(5, 0)),
        "too many dumps": resealed(pack, lambda content: None, dumps=2**20),
        "other id": resealed(pack, lambda content: content.__setitem__(slice(24 + texts_of(content), 27 + texts_of(content)), b"../")),
        "index bomb": data[: foot.offset] + bomb + layout.foot(foot.offset, bomb, 32 * 2**20, 3),
        "lying index size": data[: foot.offset] + bomb + layout.foot(foot.offset, bomb, 100, 3),
        "huge index size": data[: foot.offset] + bomb + layout.foot(foot.offset, bomb, 2**60, 3),
    }  # fmt: skip


def texts_of(content: bytearray) -> int:
    return int.from_bytes(content[16:20], "little")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return small_pack(tmp_path_factory.mktemp("small"))


def test_every_damage_of_head_index_or_foot_is_a_corrupt_dump_and_allocates_little(pack: Pack, tmp_path: Path):
    path = tmp_path / "damaged.pack"
    for kind, data in damaged(pack).items():
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(CorruptDump):
            Pack(path)
            pytest.fail(f"{kind} was not noticed")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * 2**20, kind


def test_a_damaged_block_names_the_dump_and_leaves_the_others(pack: Pack, tmp_path: Path):
    index, data = index_of(pack), bytearray(Path(pack.path).read_bytes())
    own = next(n for n, block in enumerate(index.blocks) if users(index, n) == {2})
    data[index.blocks[own].offset + index.blocks[own].stored // 2] ^= 16
    path = tmp_path / "block.pack"
    path.write_bytes(data)
    whole = Pack(path)
    for dump_id in whole.dump_ids[:2]:
        assert whole.read(dump_id) == pack.read(dump_id)
    with pytest.raises(CorruptDump, match=f"{whole.dump_ids[2]}: block {own}"):
        payload.load(places.packed_place(path, whole.dump_ids[2]))


def users(index: layout.Index, block: int) -> set[int]:
    return {
        dump
        for dump in range(len(index.dump_ids))
        for ref in index.refs[index.first_ref[dump] : index.first_ref[dump + 1]]
        if index.piece_block[ref] == block
    }


def flip(data: bytearray, generator: random.Random) -> None:
    for _ in range(generator.randint(1, 4)):
        data[generator.randrange(len(data))] = generator.randrange(256)


@pytest.mark.slow
def test_mutated_packs_never_give_other_tensors(pack: Pack, tmp_path: Path):
    """Random damage anywhere, cut or spliced; and random damage of the index under right checksums."""
    right = {dump_id: pack.read(dump_id) for dump_id in pack.dump_ids}
    whole = Path(pack.path).read_bytes()
    generator = random.Random(0)
    path = tmp_path / "mutated.pack"
    refused = 0
    for round_ in range(600):
        if round_ % 3 == 0:
            data = resealed(pack, lambda content: flip(content, generator))
        else:
            mutated = bytearray(whole)
            flip(mutated, generator)
            if round_ % 30 == 1:
                at = generator.randrange(len(mutated))
                mutated = mutated[:at] + mutated[generator.randrange(at, len(mutated)) :]
            data = bytes(mutated)
        path.write_bytes(data)
        try:
            opened = Pack(path)
        except StoreProblem:
            refused += 1
            continue
        assert sum(opened.shares()) == len(data)
        for dump_id in opened.dump_ids:
            try:
                found = opened.read(dump_id, max_bytes=2**24)
                payload.widen(dumpfile.parse_line(found[0]), found[1], max_bytes=2**24)
            except StoreProblem:
                refused += 1
            else:
                assert found in right.values()
    assert refused > 600


def test_a_payload_over_the_cap_is_refused_before_it_is_put_together(tmp_path: Path):
    record, blob = encoded({"sequences": torch.full((1, 2**24), 7)})
    pack = packcases.write_pack(tmp_path, [(record, blob)])
    assert pack.bytes < 2000
    tracemalloc.start()
    with pytest.raises(CorruptDump, match="over the limit"):
        payload.load(places.packed_place(pack.path, record.dump_id), max_bytes=2**20)
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()


@pytest.mark.slow
def test_a_dump_of_countless_small_tensors_is_refused_and_the_pack_goes_on(tmp_path: Path):
    many = {f"t{n}": torch.zeros(4096, 64, dtype=torch.uint8) for n in range(400)}
    record, blob = payload.encode(replace(BASE, dump_id="many"), many)
    writer = packcases.PackWriter(tmp_path, 3)
    with pytest.raises(Refused, match="too many small tensors"):
        writer.add(record, dumpfile.line_of(blob), dumpfile.unpack(blob)[1])
    good, data = encoded(packcases.batch(packcases.samples(2), 1, 1))
    writer.add(good, dumpfile.line_of(data), dumpfile.unpack(data)[1])
    assert Pack(writer.publish()[0]).dump_ids == [good.dump_id]


def test_no_pack_is_published_that_does_not_give_back_what_went_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = layout.compress
    monkeypatch.setattr(layout, "compress", lambda data, level: real(data.replace(b"\x11", b"\x12"), level))
    with pytest.raises(CorruptDump):
        packcases.write_pack(tmp_path, [encoded(packcases.batch(packcases.samples(4), 9, 4))])
    assert list(tmp_path.iterdir()) == []


# ---- reading many, at once, with little memory ----


def test_a_block_is_decompressed_once_for_many_dumps_and_threads(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packcases.fill_ppo(store)
    dumps = [(dumpfile.read_record(path), path.read_bytes()) for path in store.iter_dumps()]
    pack = Pack(packcases.write_pack(tmp_path, dumps).path)
    expected = {record.dump_id: hashlib.sha256(dumpfile.unpack(blob)[1]).digest() for record, blob in dumps}
    names: list[str] = []
    real = layout.decompress
    monkeypatch.setattr(layout, "decompress", lambda *words: names.append(words[2]) or real(*words))
    wrong: list[str] = []

    def read(seed: int) -> None:
        order = random.Random(seed).sample(pack.dump_ids, len(pack.dump_ids))
        wrong.extend(name for name in order if hashlib.sha256(pack.read(name)[1]).digest() != expected[name])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(names) == len(index_of(pack).blocks)


def test_blocks_are_kept_by_their_bytes_however_many_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = {f"args.x{number}": torch.rand(2, 70) for number in range(60)}
    pack = Pack(packcases.write_pack(tmp_path, [encoded(tensors)]).path)
    names: list[str] = []
    real = layout.decompress
    monkeypatch.setattr(layout, "decompress", lambda *words: names.append(words[2]) or real(*words))
    for _ in range(2):
        pack.read(pack.dump_ids[0])
    assert len(names) == len(index_of(pack).blocks) == 60
    cache = reader.BlockCache(100)
    for number in range(5):
        assert len(cache.get((0, number), lambda: bytes(40))) == 40
    assert cache.bytes == 80


def test_an_open_pack_that_is_replaced_is_read_again(tmp_path: Path):
    first, second = (
        encoded({"sequences": torch.ones(2, 70).long()}),
        encoded({"sequences": torch.ones(2, 80).long()}, 1),
    )
    one, two = packcases.write_pack(tmp_path / "1", [first]), packcases.write_pack(tmp_path / "2", [first, second])
    path = tmp_path / "x.pack"
    shutil.copy(one.path, path)
    assert reader.open_pack(path).dump_ids == one.dump_ids
    os.replace(two.path, path)
    assert reader.open_pack(path).dump_ids == two.dump_ids
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.open_pack(path)


def test_descriptors_do_not_pile_up(tmp_path: Path):
    record, blob = encoded({"sequences": torch.ones(2, 70).long()})
    source = packcases.write_pack(tmp_path, [(record, blob)]).path
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        copy = shutil.copy(source, tmp_path / f"{number}.pack")
        assert payload.load(places.packed_place(copy, record.dump_id)).record == record
    assert len(os.listdir("/proc/self/fd")) <= before + reader.OPEN_PACKS


def test_a_record_of_another_dump_in_its_place_is_noticed(pack: Pack, tmp_path: Path):
    first, second = (dump_id.encode() for dump_id in pack.dump_ids[:2])

    def swap(content: bytearray) -> None:
        at = 24 + texts_of(content)
        content[at:] = content[at:].replace(first + b"\n" + second, second + b"\n" + first)

    path = tmp_path / "swapped.pack"
    path.write_bytes(resealed(pack, swap))
    with pytest.raises(CorruptDump, match="its record is that of"):
        places.read_record(places.packed_place(path, first.decode()))
