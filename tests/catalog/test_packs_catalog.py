"""Packed dumps in the catalog: each once, from the packs' own indexes, found again after whatever happened to the files."""

import os
import shutil

import catalogcases as cases
import pytest

from actordbg.catalog import connections as engine, query
from actordbg.catalog.indexer import refresh
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.dumps import packing
from actordbg.dumps.verify import paths_to_verify, verify_files
from actordbg.store import pack_bytes as layout, places as reader
from actordbg.store.places import split_place


@pytest.fixture
def packed(store):
    """Eight dumps of one run, packed."""
    cases.fill(store, 8)
    packing.pack_dumps(store)
    return store


def rows(store):
    """Every column that does not say where a dump lies."""
    return cases.dump_rows(store, [name for name in DUMP_COLUMNS if name not in ("pack", "bytes")])


def damaged(store):
    return [(item.path, item.code) for item in refresh(store).damaged]


def test_a_packed_dump_has_the_row_of_its_file_and_its_share_of_the_pack(store):
    cases.fill(store, 8)
    refresh(store)
    before = rows(store)
    folder = cases.write_spec(store, cases.spec("r1", []))
    cases.append(folder / "rank0.jsonl", cases.result("r1", cases.record(2).dump_id, "failed"))
    packing.pack_dumps(store)
    assert rows(store) == before
    assert query.count_dumps(store, "status = 'failed' and pack is not null") == 1
    assert (refresh(store, rebuild=True).added, rows(store)) == (8, before)
    found = query.select_dumps(store)
    (pack,) = store.iter_packs()
    assert {row.pack for row in found} == {store.relative(pack)}
    assert sum(row.bytes for row in found) == pack.stat().st_size == query.dump_bytes(store)
    assert [split_place(row.path) for row in found] == [(store.relative(pack), row.dump_id) for row in found]


def test_a_settled_store_is_not_listed_again(packed, monkeypatch):
    cases.settle(packed)
    refresh(packed)
    listed = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or real(path))
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail(f"{path} was listed"))
    monkeypatch.setattr(reader.Pack, "__init__", lambda *words: pytest.fail("a pack was read"))
    assert (refresh(packed).added, refresh(packed).removed) == (0, 0)
    assert not [path for path in listed if path.endswith(("ppo-1/rank0000", "packs/ppo-1"))]


def test_a_dump_in_a_pack_and_in_a_file_is_one_row(packed):
    for number in range(8):
        cases.publish(packed, cases.record(number))
    summary = refresh(packed)
    assert (summary.added, summary.dumps) == (0, 8) and all(row.pack for row in query.select_dumps(packed))
    assert refresh(packed, rebuild=True).dumps == 8 and all(row.pack for row in query.select_dumps(packed))
    cases.settle(packed)
    refresh(packed)
    shutil.rmtree(packed.packs)
    summary = refresh(packed)
    assert summary.dumps == 8 and not any(row.pack for row in query.select_dumps(packed))


def test_rows_of_a_vanished_pack_go_and_another_pack_takes_over_what_it_holds_too(packed):
    (first,) = packed.iter_packs()
    second = first.with_name("zzz.pack")
    pack = reader.Pack(first)
    shutil.copy(first, second)
    cases.settle(packed)
    refresh(packed)
    assert {row.pack for row in query.select_dumps(packed)} == {packed.relative(first)}
    first.unlink()
    cases.settle(packed)
    summary = refresh(packed)
    assert (summary.dumps, summary.removed) == (8, 0)
    assert {row.pack for row in query.select_dumps(packed)} == {packed.relative(second)}
    second.unlink()
    summary = refresh(packed)
    assert (summary.dumps, summary.removed) == (0, 8) and len(pack.dump_ids) == 8


@pytest.mark.parametrize(
    "damage, code, reason",
    [
        (lambda data: data[:-20], "corrupt-dump", "without its foot"),
        (lambda data: data[:20] + b"\x02\0\0\0" + data[24:], "newer-format", "format 2"),
        (lambda data: data[:-200] + bytes([data[-200] ^ 1]) + data[-199:], "corrupt-dump", "CRC-32"),
    ],
)
def test_a_damaged_pack_is_noted_with_what_it_held_and_is_good_again_when_it_is_mended(packed, damage, code, reason):
    (path,) = packed.iter_packs()
    data = path.read_bytes()
    path.write_bytes(damage(data))  # type: ignore[operator]
    os.utime(path.parent)
    summary = refresh(packed)
    (item,) = summary.damaged
    assert (item.path, item.code, summary.dumps) == (packed.relative(path), code, 0) and reason in item.reason
    assert all(cases.record(number).dump_id in item.reason for number in range(8)), "the lost dumps are named"
    assert damaged(packed) == [(packed.relative(path), code)], "it is still known after the second look"
    assert [name for name, _, bad in verify_files(packed, paths_to_verify(query.open_fresh(packed), None)) if bad]
    path.write_bytes(data)
    os.utime(path.parent)
    summary = refresh(packed)
    assert (summary.added, summary.dumps, summary.damaged) == (8, 8, [])


def test_a_pack_in_the_folder_of_another_run_is_named_dump_by_dump(packed):
    (path,) = packed.iter_packs()
    shutil.move(path.parent, path.parent.with_name("other"))
    summary = refresh(packed)
    assert summary.dumps == 0 and len(summary.damaged) == 8
    assert {item.code for item in summary.damaged} == {"store"} and "belongs below packs/ppo-1" in summary.damaged[0].reason


@pytest.mark.parametrize("packed", [True, False])
def test_folders_that_vanish_while_they_are_to_be_listed_again_take_their_rows_along(store, packed):
    """A pack and the last file of a run go in one `prune`; and a run's only pack goes while its folder is not relied on."""
    cases.fill(store, 2)
    packing.pack_dumps(store, "rank = 0")
    (pack,) = store.iter_packs()
    (loose,) = store.iter_dumps()
    for path in [pack, loose] if packed else [loose]:
        path.unlink()
        path.parent.rmdir()
    if not packed:
        with engine.writing(store.catalog_path) as writer:
            writer.forget_folders_of("ppo-1")
    refresh(store)
    rows = cases.contents(store)
    refresh(store, rebuild=True)
    assert rows == cases.contents(store)


def test_indexing_a_pack_decompresses_no_rows(packed, monkeypatch):
    names = []
    real = layout.decompress
    monkeypatch.setattr(layout, "decompress", lambda *words: names.append(words[2]) or real(*words))
    reader._opened.cache_clear()
    refresh(packed, rebuild=True)
    assert len(names) == 1 and names[0].endswith(": index")
