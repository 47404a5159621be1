"""A pack gives back exactly what went into it, dump by dump, or a CorruptDump: never other tensors, never a traceback."""

import os
import random
import shutil
import struct
import subprocess
import threading
import tracemalloc
from pathlib import Path

import catalogcases
import packcases
import pytest
import torch
import zstandard
from plainkit import all_same

from actordbg.base.errors import CorruptDump, NewerFormat, Refused
from actordbg.formats import dumpfile
from actordbg.formats.encoding import compress
from actordbg.store import pack_build as build, pack_bytes as layout, payload, places
from actordbg.store.places import Pack


def encoded(tensors, number=0):
    return payload.encode(catalogcases.record(number), tensors)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Three dumps: two that share rows, one with everything odd (without the large tensor)."""
    odd = packcases.odd_tensors()
    del odd["large"]
    rows = packcases.samples(4)
    batches = (packcases.batch(rows, 9, 4), packcases.batch(rows[:2], 0, 3), odd)
    return packcases.write_pack(tmp_path_factory.mktemp("small"), [encoded(one, n) for n, one in enumerate(batches)])


def test_everything_that_a_dump_may_hold_comes_back_and_no_block_is_large(tmp_path):
    tensors = packcases.odd_tensors() | {"long": torch.randint(-(2**62), 2**62, (2, 300_000))}
    record, blob = encoded(tensors)
    pack = packcases.write_pack(tmp_path, [(record, blob)])
    assert pack.read(record.dump_id) == (dumpfile.line_of(blob), dumpfile.unpack(blob)[1])
    dump = payload.load(places.packed_place(pack.path, record.dump_id))
    assert dump.record == record and all_same(dump.tensors, tensors)
    assert max(block.content for block in index_of(pack).blocks) <= build.BLOCK


@pytest.mark.parametrize("left, right", [(0, 0), (5, 0), (13, 40)])
def test_the_same_sample_padded_differently_is_stored_once(left, right, tmp_path):
    rows = packcases.samples(4)
    first, second = encoded(packcases.batch(rows, 3, 2)), encoded(packcases.batch(rows[:2], left, right), 1)
    alone, both = (packcases.write_pack(tmp_path, dumps) for dumps in ([first], [first, second]))
    assert sum(index_of(both).piece_bytes) - sum(index_of(alone).piece_bytes) < 30, "only runs of padding are new"


def test_shares_sum_to_the_file_and_follow_the_size_of_a_dump(pack):
    shares, sizes = pack.shares(), [sum(map(len, pack.read(dump_id))) for dump_id in pack.dump_ids]
    assert sum(shares) == os.path.getsize(pack.path)
    assert [share / sum(shares) for share in shares] == pytest.approx([size / sum(sizes) for size in sizes], rel=0.02)


# ---- the file ----


@pytest.mark.skipif(not shutil.which("zstd"), reason="no zstd on this machine")
def test_ordinary_zstd_lists_checks_and_decompresses_a_pack(pack):
    done = [subprocess.run(["zstd", tool, pack.path], check=True, capture_output=True).stdout for tool in ("-l", "-t", "-dc")]
    assert len(done[2]) == sum(block.content for block in index_of(pack).blocks) + foot_of(pack).content


def index_of(pack):
    content = zstandard.ZstdDecompressor().decompress(Path(pack.path).read_bytes()[foot_of(pack).offset :])
    return layout.decode_index(content, foot_of(pack), pack.path)


def foot_of(pack):
    data = Path(pack.path).read_bytes()
    return layout.parse_foot(data[-layout.FOOT_BYTES :], len(data), pack.path)


def resealed(pack, change, dumps=None):
    """The pack's bytes with a change in the content of its index, under right checksums."""
    data, foot = Path(pack.path).read_bytes(), foot_of(pack)
    content = bytearray(zstandard.ZstdDecompressor().decompress(data[foot.offset :]))
    change(content)
    index = compress(bytes(content), 3)
    return data[: foot.offset] + index + layout.foot(foot.offset, index, len(content), dumps or foot.dumps)


def ids_at(content):
    """Where the dump ids begin in an index."""
    return 24 + int.from_bytes(content[16:20], "little")


def damaged(pack):
    data, foot = Path(pack.path).read_bytes(), foot_of(pack)
    bomb = compress(bytes(32 * 2**20), 3)

    def put(at, new):
        return data[:at] + new + data[at + len(new) :]

    def counted(place, value):
        return resealed(pack, lambda content: content.__setitem__(slice(4 * place, 4 * place + 4), struct.pack("<I", value)))

    return {
        "empty": b"", "short": data[:30], "magic": b"PK" + data[2:], "head only": data[:24], "foot lost": data[:-30],
        "index lost": data[: foot.offset] + data[-layout.FOOT_BYTES :], "trailing": data + b"x", "twice": data + data,
        "flipped foot": put(len(data) - 9, bytes([data[-9] ^ 1])), "flipped index": put(foot.offset + 40, bytes([data[foot.offset + 40] ^ 1])),
        "more blocks": counted(0, 2**31), "more pieces": counted(1, 2**30), "more dumps": counted(2, 2**20),
        "more references": counted(3, 2**32 - 1), "longer texts": counted(4, 2**32 - 1), "longer ids": counted(5, 0),
        "too many dumps": resealed(pack, lambda content: None, dumps=2**20),
        "other id": resealed(pack, lambda content: content.__setitem__(slice(ids_at(content), ids_at(content) + 3), b"../")),
        "index bomb": data[: foot.offset] + bomb + layout.foot(foot.offset, bomb, 32 * 2**20, 3),
        "lying index size": data[: foot.offset] + bomb + layout.foot(foot.offset, bomb, 100, 3),
        "huge index size": data[: foot.offset] + bomb + layout.foot(foot.offset, bomb, 2**60, 3),
    }  # fmt: skip


def test_every_damage_of_head_index_or_foot_is_a_corrupt_dump_and_allocates_little(pack, tmp_path):
    path = tmp_path / "damaged.pack"
    for kind, data in damaged(pack).items():
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(CorruptDump):
            Pack(path)
            pytest.fail(f"{kind} was not noticed")
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20, kind
        tracemalloc.stop()
    whole = Path(pack.path).read_bytes()
    path.write_bytes(whole[:20] + struct.pack("<I", 2) + whole[24:])
    with pytest.raises(NewerFormat, match="format 2") as refused:
        Pack(path)
    assert "upgrade" in refused.value.hint


def test_a_damaged_block_names_the_dump_and_leaves_the_others(pack, tmp_path):
    index, data = index_of(pack), bytearray(Path(pack.path).read_bytes())
    used = [{index.piece_block[ref] for ref in dump.refs} for dump in index.dumps.values()]
    own = min(used[2] - used[0] - used[1])
    data[index.blocks[own].offset + index.blocks[own].stored // 2] ^= 16
    path = tmp_path / "block.pack"
    path.write_bytes(data)
    *sound, harmed = pack.dump_ids
    assert [Pack(path).read(dump_id) for dump_id in sound] == [pack.read(dump_id) for dump_id in sound]
    with pytest.raises(CorruptDump, match=f"{harmed}: block {own}"):
        payload.load(places.packed_place(path, harmed))


def test_a_payload_put_together_of_other_pieces_is_noticed(pack, tmp_path):
    """One that the index names under right checksums of its own. Random damage is for `tests/fuzz/of_pack.py`."""
    references, path = sum(len(dump.refs) for dump in index_of(pack).dumps.values()), tmp_path / "other.pack"
    path.write_bytes(resealed(pack, lambda content: content.__setitem__(-4 * references, content[-4 * references] ^ 1)))
    with pytest.raises(CorruptDump, match=r"damaged \(its CRC-32 does not match\)"):
        Pack(path).read(pack.dump_ids[0])


def test_a_payload_over_the_cap_is_refused_before_it_is_put_together(tmp_path, monkeypatch):
    record, blob = encoded({"sequences": torch.full((1, 2**24), 7)})
    pack = packcases.write_pack(tmp_path, [(record, blob)])
    monkeypatch.setattr(dumpfile, "DEFAULT_CAP", 2**20)
    tracemalloc.start()
    with pytest.raises(CorruptDump, match="over the limit"):
        payload.load(places.packed_place(pack.path, record.dump_id))
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    tracemalloc.stop()


@pytest.mark.slow
def test_a_dump_of_countless_small_tensors_is_refused_and_the_pack_goes_on(tmp_path):
    many = encoded({f"t{n}": torch.zeros(4096, 64, dtype=torch.uint8) for n in range(400)}, 1)
    good = encoded(packcases.batch(packcases.samples(2), 1, 1))
    writer = packcases.PackWriter(tmp_path)
    with pytest.raises(Refused, match="too many small tensors"):
        writer.add(many[0], dumpfile.line_of(many[1]), dumpfile.unpack(many[1])[1])
    writer.add(good[0], dumpfile.line_of(good[1]), dumpfile.unpack(good[1])[1])
    assert Pack(writer.publish()[0]).dump_ids == [good[0].dump_id]


def test_no_pack_is_published_that_does_not_give_back_what_went_in(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compress", lambda data, level: compress(data.replace(b"\x11", b"\x12"), level))
    with pytest.raises(CorruptDump):
        packcases.write_pack(tmp_path, [encoded(packcases.batch(packcases.samples(4), 9, 4))])
    assert list(tmp_path.iterdir()) == []


# ---- reading many, at once ----


def test_a_block_is_decompressed_once_for_many_dumps_and_threads(tmp_path, monkeypatch):
    rows = packcases.samples(8)
    dumps = [
        encoded(packcases.batch(rows[n : n + 4], n, 2) | {f"x{i}": torch.rand(2, 70) for i in range(20 * n)}, n) for n in range(4)
    ]
    pack = Pack(packcases.write_pack(tmp_path, dumps).path)
    expected = {record.dump_id: dumpfile.unpack(blob)[1] for record, blob in dumps}
    made, wrong, real = [], [], layout.decompress
    monkeypatch.setattr(layout, "decompress", lambda *words: made.append(words[2]) or real(*words))

    def read(seed):
        order = random.Random(seed).sample(pack.dump_ids, len(pack.dump_ids))
        wrong.extend(name for name in order if pack.read(name)[1] != expected[name])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(made) == len(index_of(pack).blocks) > 60


def test_an_open_pack_that_is_replaced_is_read_again_and_descriptors_do_not_pile_up(tmp_path):
    first, second = (encoded({"sequences": torch.ones(2, 70 + n).long()}, n) for n in range(2))
    one, two = packcases.write_pack(tmp_path / "1", [first]), packcases.write_pack(tmp_path / "2", [first, second])
    path = tmp_path / "x.pack"
    shutil.copy(one.path, path)
    assert places.open_pack(path).dump_ids == one.dump_ids
    shutil.copy(two.path, tmp_path / "y")
    os.replace(tmp_path / "y", path)
    assert places.open_pack(path).dump_ids == two.dump_ids
    path.unlink()
    with pytest.raises(FileNotFoundError):
        places.open_pack(path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        copy = shutil.copy(one.path, tmp_path / f"{number}.pack")
        assert payload.load(places.packed_place(copy, first[0].dump_id)).record == first[0]
    assert len(os.listdir("/proc/self/fd")) <= before + places.OPEN_PACKS


def test_a_record_of_another_dump_in_its_place_is_noticed(pack, tmp_path):
    first, second = (dump_id.encode() for dump_id in pack.dump_ids[:2])

    def swap(content):
        content[ids_at(content) :] = content[ids_at(content) :].replace(first + b"\n" + second, second + b"\n" + first)

    path = tmp_path / "swapped.pack"
    path.write_bytes(resealed(pack, swap))
    with pytest.raises(CorruptDump, match="its record is of"):
        places.read_record(places.packed_place(path, first.decode()))
