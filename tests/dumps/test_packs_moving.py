"""Moving dumps into packs, out of them, and away: nothing is lost, whoever is at it and whenever it dies."""

import os
import threading
from pathlib import Path

import catalogcases
import packcases
import pytest
import torch

from actordbg.base.errors import Conflict, NewerFormat, StoreProblem
from actordbg.catalog import query
from actordbg.catalog.indexer import refresh
from actordbg.dumps import packing, prune
from actordbg.formats import dumpfile, store_files
from actordbg.store import pack_build as build, payload, places
from actordbg.store.pack_build import exclusive
from actordbg.store.places import Pack, split_place

pytestmark = pytest.mark.slow


@pytest.fixture
def ppo(store):
    """Twelve dumps on four ranks with shared samples; what they hold."""
    packcases.fill_ppo(store, calls=4)
    return packcases.contents(store)


def loose(store):
    return [places.dump_id_of(path) for path in store.iter_dumps()]


def pruned(store, **chosen):
    return prune.apply(store, prune.plan_prune(query.open_fresh(store), **chosen))


def test_packing_moves_every_dump_and_unpacking_brings_it_back_to_the_byte(store, ppo):
    odd = next(store.iter_dumps())
    odd.write_bytes(catalogcases.with_record(odd.read_bytes(), b'"rank":0', b'"rank" :  0'))
    before = {path: path.read_bytes() for path in store.iter_dumps()}
    summary = packing.pack_dumps(store)
    assert (summary.figures.dumps, summary.kept, loose(store)) == (12, [], [])
    assert packcases.contents(store) == ppo
    assert [store.root / path for path in summary.packs] == list(store.iter_packs())
    assert os.stat(store.root / summary.packs[0]).st_mode & 0o777 == 0o600
    assert packing.pack_dumps(store).figures.dumps == 0, "there is nothing left to pack"
    back = packing.unpack_dumps(store)
    assert (back.dumps, back.kept, list(store.iter_packs())) == (12, [], [])
    for path, blob in before.items():
        now = path.read_bytes()
        assert (dumpfile.line_of(now), dumpfile.unpack(now)[1]) == (dumpfile.line_of(blob), dumpfile.unpack(blob)[1])


@pytest.mark.parametrize("run", ["ppo-1", "packs", "dumps"])
def test_a_noted_place_leads_to_a_dump_that_moved_whatever_its_run_is_called(store, run):
    described = catalogcases.record(0, run=run)
    file = catalogcases.publish(store, described)
    packing.pack_dumps(store)
    (packed,) = places.places_of(store)
    assert not file.exists() and places.read_record(file).run == run
    packing.unpack_dumps(store)
    assert not places.is_there(packed) and places.read_record(packed).run == run


def test_a_condition_and_a_run_choose(store, ppo):
    packcases.fill_ppo(store, calls=1, first=20, run="other")
    assert packing.pack_dumps(store, "rank = 1 and run = 'ppo-1'").figures.dumps == 3
    assert all(split_place(row.path) for row in query.select_dumps(store, "rank = 1 and run = 'ppo-1'"))
    assert packing.pack_dumps(store).figures.dumps == 9 + 3
    assert {path.parent.name for path in store.iter_packs()} == {"ppo-1", "other"}
    assert packing.unpack_dumps(store, "rank = 1 and run = 'ppo-1'").dumps == 3
    assert len(loose(store)) == 3 and packcases.contents(store).items() >= ppo.items()


def test_packs_are_bounded(store, ppo, monkeypatch):
    monkeypatch.setattr(build, "MOST_DUMPS", 5)
    assert len(packing.pack_dumps(store).packs) == 3
    assert sorted(len(Pack(path).dump_ids) for path in store.iter_packs()) == [2, 5, 5]
    assert packcases.contents(store) == ppo


def test_what_cannot_be_read_whole_stays_a_file_and_is_named(store, ppo, monkeypatch):
    refresh(store)
    torn, hashed, moved, shut = list(store.iter_dumps())[:4]

    def opened(path):
        if path == shut:
            raise PermissionError(13, "Permission denied")
        return store_files.open_regular(path)

    monkeypatch.setattr(dumpfile, "open_regular", opened)
    unfinished = torn.with_name(".tmp-1-abc")
    unfinished.write_bytes(b"half")
    torn.write_bytes(torn.read_bytes()[:-5])
    record, blob = dumpfile.read_record(hashed), hashed.read_bytes()
    other = b"0" * 64
    hashed.write_bytes(catalogcases.with_record(blob, record.payload_sha256.encode(), other))
    moved.write_bytes(catalogcases.with_record(moved.read_bytes(), b'"rank":0', b'"rank":3'))
    summary = packing.pack_dumps(store)
    assert summary.figures.dumps == 8
    assert {item.path for item in summary.kept} == {store.relative(path) for path in (torn, hashed, moved, shut)}
    assert set(store.iter_dumps()) == {torn, hashed, moved, shut} and unfinished.read_bytes() == b"half"


def test_one_process_at_a_time_moves_dumps(store, ppo):
    with exclusive(store):
        for move in (packing.pack_dumps, packing.unpack_dumps):
            with pytest.raises(Conflict, match="another actordbg"):
                move(store)
        with pytest.raises(Conflict):
            pruned(store, where="rank=0")
    assert packing.pack_dumps(store).figures.dumps == 12


def test_a_pack_that_an_interrupted_run_left_twice_goes(store, ppo):
    packing.pack_dumps(store)
    (whole,) = store.iter_packs()
    part = packcases.write_pack(whole.parent, packcases.blobs(whole)[:5])
    refresh(store)
    strange = packcases.write_pack(whole.parent, packcases.blobs(whole, tokens=1)[5:7])
    assert len(list(store.iter_packs())) == 3
    packing.pack_dumps(store)
    assert sorted(store.iter_packs()) == sorted([whole, Path(strange.path)]) and not os.path.exists(part.path)
    assert query.count_dumps(store) == 12


# ---- a dump that moved after it was looked up ----


def test_readers_are_never_disturbed_while_dumps_move(store, ppo):
    paths = [store.root / row.path for row in query.select_dumps(store)]
    stop, failures, rounds = threading.Event(), [], []

    def read():
        while not stop.is_set():
            for path in paths:
                try:
                    record, _ = places.read_payload(path)
                    assert record.to_json() == ppo[record.dump_id][0]
                except Exception as error:  # noqa: BLE001  any is a failure
                    failures.append(f"{type(error).__name__}: {error}")
            rounds.append(1)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(3):
        packing.pack_dumps(store, "rank < 2")
        packing.pack_dumps(store)
        packing.unpack_dumps(store, "rank = 0")
        packing.unpack_dumps(store)
    stop.set()
    thread.join()
    assert failures == [] and rounds


def test_damage_of_a_whole_pack_is_said_of_the_dump(store, ppo):
    packing.pack_dumps(store)
    row = query.select_dumps(store)[0]
    path = next(store.iter_packs())
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(StoreProblem, match=f"{row.dump_id}.*CRC-32"):
        payload.load(store.root / row.path)
    path.write_bytes(data[:20] + b"\x09\0\0\0" + data[24:])
    with pytest.raises(NewerFormat, match=row.dump_id):
        payload.load(store.root / row.path)


# ---- prune ----


def test_a_dump_that_lies_in_a_file_too_is_pruned_from_both(store, ppo):
    before = {path: path.read_bytes() for path in store.iter_dumps()}
    packing.pack_dumps(store)
    for path, blob in before.items():
        path.write_bytes(blob)
    pruned(store, where="rank = 0")
    assert len(packcases.contents(store)) == 9 and len(loose(store)) == 9
    assert refresh(store).dumps == 9


def test_a_pack_with_a_damaged_dump_is_not_written_again_unless_that_one_goes(store):
    good, bad = catalogcases.record(0), catalogcases.record(4)
    catalogcases.publish(store, good)
    store.publish_dump(*payload.encode(bad, {"sequences": torch.randint(0, 2**20, (2, 900)), "odd": torch.rand(2, 90)}))
    packing.pack_dumps(store)
    path = next(store.iter_packs())
    data = bytearray(path.read_bytes())
    data[data.index(b"\x28\xb5\x2f\xfd") + 900] ^= 1  # in the middle of the first block: the large one's low bits
    path.write_bytes(data)
    with pytest.raises(StoreProblem):
        payload.load(places.packed_place(str(path), bad.dump_id))
    dropped = pruned(store, where="rank = 0 and seq_len = 8")
    assert [reason for _, reason in dropped.failed if bad.dump_id in reason] and path.exists()
    summary = packing.unpack_dumps(store)
    assert summary.dumps == 1 and bad.dump_id in summary.kept[0].path
    assert pruned(store, where=f"dump_id = '{bad.dump_id}'").failed == [] and packcases.contents(store).keys() == {good.dump_id}
