"""`dump pack` and `dump unpack` as a user types them, and every other command on a store of packed dumps."""

import os
from pathlib import Path

import packcases
import pytest
from commandline import invoke
from replaycases import old_pickle
from roots import json_of

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.catalog import query
from actordbg.dumps import packing
from actordbg.dumps.importer import import_paths
from actordbg.replay.selection import defaults_of, rows_of_files
from actordbg.store.places import places_of


def run(store, *words, code=0):
    """One command; an error that the command line would print is raised."""
    result = invoke(store, *words)
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture
def ppo(store):
    packcases.fill_ppo(store, calls=6)
    return store


def test_pack_tells_deduplication_and_compression_apart_and_says_it_in_words(ppo):
    files = sum(path.stat().st_size for path in ppo.iter_dumps())
    answer = json_of(run(ppo, "dump pack --json"))
    (pack,) = ppo.iter_packs()
    assert answer["dumps"] == 18 and answer["files_bytes"] == files and answer["packed_bytes"] == pack.stat().st_size
    assert answer["distinct_rows"] < answer["rows"] == 18 * 4 * 8 / 3
    assert answer["content_bytes"] > answer["distinct_bytes"] > answer["packed_bytes"]
    assert answer["dedup_ratio"] == pytest.approx(answer["content_bytes"] / answer["distinct_bytes"], rel=1e-3)
    assert answer["compression_ratio"] == pytest.approx(answer["distinct_bytes"] / answer["packed_bytes"], rel=1e-3)
    assert min(answer["dedup_ratio"], answer["compression_ratio"], files / answer["packed_bytes"]) > 2
    run(ppo, "dump unpack --all --quiet")
    out = run(ppo, "dump pack --quiet").stdout
    assert "18 dumps in 1 pack" in out and "deduplication: " in out and "compression: " in out
    assert run(ppo, "dump pack").stdout.strip() == "nothing to pack"


def test_a_damaged_dump_stays_a_file_and_the_exit_code_says_so(ppo):
    path = next(ppo.iter_dumps())
    path.write_bytes(path.read_bytes()[:-9])
    result = run(ppo, "dump pack --quiet", code=1)
    assert "17 dumps in 1 pack" in result.stdout and "stays a file: damaged: " in result.stderr
    assert path.name in result.stderr and list(ppo.iter_dumps()) == [path]


def test_unpack_needs_to_know_what_and_brings_it_back(ppo):
    before = packcases.contents(ppo)
    run(ppo, "dump pack --where", "rank < 3", "--quiet")
    with pytest.raises(UsageError):
        run(ppo, "dump unpack")
    answer = json_of(run(ppo, "dump unpack --where", "rank = 0", "--json"))
    assert answer["dumps"] == 5 and answer["kept"] == []
    assert "9 dumps unpacked from 1 pack" in run(ppo, "dump unpack --all --quiet").stdout
    assert run(ppo, "dump unpack --all").stdout.strip() == "nothing to unpack"
    assert packcases.contents(ppo) == before


def test_ls_show_verify_export_index_and_report_read_packed_dumps_alike(ppo, tmp_path):
    def seen():
        rows = json_of(run(ppo, "dump ls --where", "seq_len > 300", "--json", "--limit", "0"))
        first = json_of(run(ppo, "dump show", rows[0]["dump_id"], "--json"))
        checked = json_of(run(ppo, "dump verify --json"))
        report = json_of(run(ppo, "report --json"))
        for row in (*rows, first):
            for name in ("path", "pack", "bytes"):
                row.pop(name, None)
        return [rows, first, checked["checked"], checked["damaged"], report["replays"], report["totals"]]

    ids = [row.dump_id for row in query.select_dumps(ppo)]
    run(ppo, "dump export", ids[3], "--out", tmp_path / "files", "--quiet")
    before = seen()
    run(ppo, "dump pack --quiet")
    assert seen() == before
    run(ppo, "dump export", ids[3][:-4], "--out", tmp_path / "packed", "--quiet")
    assert (tmp_path / "packed" / f"{ids[3]}.safetensors").read_bytes() == next((tmp_path / "files").iterdir()).read_bytes()
    run(ppo, "dump export --where", "rank = 1", "--out", tmp_path / "one-rank", "--quiet")
    assert len(list((tmp_path / "one-rank").iterdir())) == 5
    assert "18 dumps in the catalog: 18 added" in run(ppo, "index --rebuild --quiet").stdout
    pack = ppo.relative(next(ppo.iter_packs()))
    assert pack in run(ppo, "dump show", ids[0]).stdout


def test_keeping_a_size_takes_the_oldest_that_are_not_pinned_out_of_packs_too(store):
    packcases.fill_ppo(store, calls=1, pinned=True)
    packcases.fill_ppo(store, calls=5, first=3)
    run(store, "dump pack --quiet")
    ids, keep = sorted(packcases.contents(store)), query.dump_bytes(store) * 2 // 3
    run(store, "dump prune --keep", keep, "--yes")
    left = sorted(packcases.contents(store))
    assert 0 < query.dump_bytes(store) == sum(path.stat().st_size for path in store.iter_packs()) <= keep
    assert 3 < len(left) < 18 and left == ids[:3] + ids[3 - len(left) :]
    assert "keeping 3 protected dumps" in run(store, "dump prune --keep", 0).stderr


def test_prune_damaged_takes_a_pack_that_cannot_be_read(ppo):
    run(ppo, "dump pack --where", "rank = 0", "--quiet")
    (pack,) = ppo.iter_packs()
    pack.write_bytes(b"junk" * 100)
    os.utime(pack.parent)
    assert "corrupt-dump" in run(ppo, "index --json").stdout
    assert "damaged" in run(ppo, "dump verify --quiet", code=1).stdout
    run(ppo, "dump prune --damaged --yes")
    assert not pack.exists() and run(ppo, "dump verify --quiet").stdout.startswith("13 dumps checked")


def test_an_import_knows_the_dumps_that_were_packed(store, tmp_path):
    for rank in range(3):
        old_pickle(tmp_path / "old", rank)
    assert import_paths(store, [tmp_path / "old"]).added == 3
    packing.pack_dumps(store)
    assert (import_paths(store, [tmp_path / "old"]).present, len(list(places_of(store)))) == (3, 3)


@pytest.mark.parametrize("spelling", ["whole pack", "one of it"])
def test_replay_takes_packs_by_name(ppo, spelling):
    packing.pack_dumps(ppo)
    pack, paths = next(ppo.iter_packs()), [row.path for row in query.select_dumps(ppo)]
    names = [pack] if spelling == "whole pack" else [ppo.root / paths[2]]
    rows = rows_of_files(ppo, names)
    assert [row.path for row in rows] == (paths if spelling == "whole pack" else [paths[2]])
    answer = json_of(run(ppo, "replay --input-file", names[0], "--dry-run", "--max-inputs", "2", "--json"))
    assert answer["selected"] == min(2, len(rows))
    defaults = defaults_of(ppo.root, rows)
    assert defaults is not None and vars(defaults).items() <= vars(rows[0]).items()


def test_a_name_that_is_no_pack_is_refused(ppo, tmp_path):
    (tmp_path / "x.txt").write_text("")
    for name in (tmp_path / "none.pack", tmp_path / "x.txt", tmp_path / "none.pack#id"):
        with pytest.raises(UsageError):
            rows_of_files(ppo, [name])
    packing.pack_dumps(ppo)
    with pytest.raises(StoreProblem, match="no such dump"):
        rows_of_files(ppo, [Path(f"{next(ppo.iter_packs())}#nothing")])


def test_prune_takes_packed_dumps_and_spares_pinned_ones(store):
    rows = packcases.samples(2)
    for number in range(8):
        packcases.publish(store, number, packcases.batch(rows, number, 2), pinned=number % 4 == 0)
    run(store, "dump pack --quiet")
    result = run(store, "dump prune --where", "rank < 2")
    assert "would remove 2 files" in result.stdout and "keeping 2 protected dumps" in result.stderr
    assert query.count_dumps(store) == 8
    run(store, "dump prune --where", "rank < 2", "--yes")
    assert query.count_dumps(store) == 6 and len(list(store.iter_packs())) == 1
    run(store, "dump prune --where", "rank < 2", "--pinned", "--yes")
    assert query.count_dumps(store) == 4
    assert run(store, "dump verify --quiet").stdout.startswith("4 dumps checked")
