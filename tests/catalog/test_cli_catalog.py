"""`index`, `dump ls`, `show`, `verify` and `prune` as a user types them."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import catalogcases as cases
import pytest
import torch
from commandline import invoke
from roots import json_of
from storecases import counters as counters_of

from actordbg.base.errors import CatalogProblem, UsageError, WhereError
from actordbg.base.units import with_handles
from actordbg.catalog import dump_rows as headers, migrate, query
from actordbg.catalog.indexer import refresh
from actordbg.dumps import prune
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.store_files import atomic_write
from actordbg.formats.weight_hashes import WEIGHTS
from actordbg.store import payload


def run(store, line, *words, code=0):
    """One command; an error that the command line would print is raised."""
    group = "" if line.startswith(("index", "replay", "check")) else "dump "
    result = invoke(store, group + line, *words)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_index_says_what_it_did_and_names_the_damaged(store):
    records = cases.fill(store, 5)
    store.dump_path(records[0]).write_bytes(b"junk")
    out = run(store, "index --quiet").stdout
    assert "4 dumps in the catalog: 4 added, 0 removed" in out
    assert f"damaged: {store.relative(store.dump_path(records[0]))}: " in out
    answer = json_of(run(store, "index --rebuild --json"))
    assert (answer["added"], answer["dumps"], len(answer["damaged"])) == (4, 4, 1)


def test_ls_lists_and_says_how_many_more_there_are(store):
    records = cases.fill(store, 7)
    assert "no dump matches seq_len>4096" in run(store, "ls --where seq_len>4096", code=5).stdout
    result = run(store, "ls --limit 3")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:4]] == [with_handles(r.dump_id) for r in records[:-4:-1]], (
        "the newest first"
    )
    oldest = run(store, "ls --limit 3 --order time").stdout.splitlines()
    assert [line.split()[0] for line in oldest[1:4]] == [with_handles(r.dump_id) for r in records[:3]]
    more, following = result.stderr.splitlines()
    assert "4 more; pass --limit 0 to list all" in more and following.startswith("next: actordbg dump show ")
    assert len(run(store, "ls --limit 0").stdout.strip().splitlines()) == 8
    rows = json_of(run(store, "ls --where rank=1 --json"))
    assert [row["dump_id"] for row in rows] == [r.dump_id for r in reversed(records) if r.rank == 1]
    assert (rows[-1]["path"], rows[0]["training"]) == (store.relative(store.dump_path(records[1])), True)


def test_show_tells_record_tensors_and_results_and_inputs_from_what_was_recorded_beside_them(store):
    described = cases.record(0, rng={"cpu": "0" * 64})
    tensors = {
        "rng.cpu": torch.arange(16, dtype=torch.uint8),
        "output.log_probs": -torch.ones(2, 7),
        "sequences": torch.arange(16).view(2, 8),
    }
    store.publish_dump(*payload.encode(described, tensors))
    folder = cases.write_spec(store, cases.spec("r1", [described]))
    unlike = {"golden_max_abs": 0.25, "rng_match": False, "extra": {"not_compared": {"entropies": "because"}}}
    cases.append(folder / "rank0.jsonl", cases.result("r1", described.dump_id, "failed", error_class="ValueError", **unlike))
    out = run(store, "show", described.dump_id[:30]).stdout
    for word in (described.dump_id, "2 x 8: 13 tokens, 3 padding", "int64", "[2, 8]", "r1", "failed", "ValueError",
                 "returned outputs (log_probs); RNG state before the call (cpu)", "max diff", "0.25", "same RNG", "no",
                 "not compared in r1: because"):  # fmt: skip
        assert word in out
    answer = json_of(run(store, "show", described.dump_id, "--json"))
    assert [(one["name"], one["kind"]) for one in answer["tensors"]] == [
        ("sequences", "input"), ("output.log_probs", "output"), ("rng.cpu", "generator"),
    ]  # fmt: skip
    assert (answer["record"]["rank"], answer["results"][0]["status"]) == (0, "failed")
    with pytest.raises(UsageError):
        run(store, "show nope")


def test_verify_names_every_damaged_file_and_exits_1(store):
    records = cases.fill(store, 6)
    assert "6 good, 0 damaged" in run(store, "verify --quiet").stdout
    torn, flipped, junk, untrue = (store.dump_path(r) for r in records[:4])
    torn.write_bytes(torn.read_bytes()[:-3])
    blob = bytearray(flipped.read_bytes())
    blob[-20] ^= 1
    flipped.write_bytes(blob)
    junk.write_bytes(b"junk")
    untrue.write_bytes(cases.with_record(untrue.read_bytes(), b'"sequences"', b'"sequentia"'))  # under right checksums
    out = run(store, "verify --quiet", code=1).stdout
    assert all(store.relative(path) in out for path in (torn, flipped, junk, untrue))
    assert "2 good, 4 damaged" in out and "are not those of its record" in out
    assert "next: actordbg store fsck --repair" in run(store, "verify", code=1).output, "`prune --damaged` goes by the catalog"
    answer = json_of(run(store, "verify --where", f"dump_id='{records[0].dump_id}'", "--json", code=1))
    assert (answer["checked"], answer["damaged"][0]["code"]) == (1, "corrupt-dump")


def test_prune_only_says_what_it_would_do_until_told(store):
    records = cases.fill(store, 8)
    result = run(store, "prune --where rank=0")
    assert "would remove 2 files" in result.stdout
    assert "pass --yes" in result.stderr
    assert len(list(store.iter_dumps())) == 8
    answer = json_of(run(store, "prune --where rank=0 --yes --json"))
    assert (answer["done"], len(answer["files"])) == (True, 2)
    assert [r for r in records if store.dump_path(r).exists()] == [r for r in records if r.rank != 0]
    assert refresh(store).dumps == 6
    assert not store.dump_folder("ppo-1", 0).exists(), "an emptied folder goes too"


def test_the_weights_of_a_step_go_with_the_last_dump_that_met_them(store):
    records = [cases.record(index, rank=0, pid=4711, instance="actor0-ab") for index in range(6)]
    for described in records:
        cases.publish(store, described)
    stem, folder = "0000-node-0-4711-actor0-ab", store.root / WEIGHTS / "ppo-1"
    folder.mkdir(parents=True)
    for first in (1, 3, 5):
        (folder / f"{stem}-{first:06d}.json").write_text("{}")
    weights = lambda: sorted(int(path.stem[-6:]) for path in folder.glob("*.json"))  # noqa: E731
    listed = json_of(run(store, "prune --where", "call_index in (0, 1, 3, 4)", "--json"))
    assert [item["path"] for item in listed["files"]][-1] == f"weights/ppo-1/{stem}-000003.json" and weights() == [1, 3, 5]
    answer = json_of(run(store, "prune --where", "call_index in (0, 1, 3, 4)", "--yes", "--json"))
    assert weights() == [1, 5], "the dump of call 2 met those of call 1"
    assert answer["bytes"] == sum(item["bytes"] for item in answer["files"]) and answer["failed"] == []
    counters = store.counters / "ppo-1" / f"{stem}.json"
    counters.parent.mkdir(parents=True)
    atomic_write(counters, json.dumps(counters_of("ppo-1", pid=4711, state="on", ring=None)).encode())
    run(store, "prune --where", "call_index >= 0", "--yes")
    assert weights() == [5], "its process may still meet them"


def test_of_several_conditions_each_counts_and_the_wrong_one_is_named(store):
    records = cases.fill(store, 8)
    lengths = sorted(record.seq_len for record in records)
    both = ["--where", "rank=0 or rank=1", "--where", f"seq_len>{lengths[3]}"]
    left = [record for record in records if record.rank > 1 or record.seq_len <= lengths[3]]
    assert 0 < len(left) < 8 and any(record.rank < 2 for record in left) and any(record.seq_len > lengths[3] for record in left)

    assert len(json_of(run(store, "ls", *both, "--json"))) == 8 - len(left)
    for wrong in ("rank=0) or (rank=1", "seq_lne>1"):
        with pytest.raises(WhereError, match=f"--where '{re.escape(wrong)}': "):
            run(store, "prune", *both, "--where", wrong, "--yes")
        for preset in (("replay", "--failed"), ("check", "--failed"), ("replay", "--longest", "1")):
            with pytest.raises(WhereError):
                run(store, *preset, "--where", wrong)
    run(store, "prune", *both, "--yes")
    assert [record for record in records if store.dump_path(record).exists()] == left


def test_prune_by_age_and_size_takes_the_oldest(store):
    records = cases.fill(store, 6)
    kept = run(store, "prune --older-than 7d")
    assert "nothing to remove" in kept.stdout and "6 dumps" in kept.stderr, "recorded long ago, in this store since a moment"
    before = time.time() - 8 * 86400
    for described in records:
        os.utime(store.dump_path(described), (before, before))
    assert "would remove 6 files" in run(store, "prune --older-than 7d").stdout
    for there_and_back in ("pack", "unpack"):
        run(store, there_and_back, *(["--all"] if there_and_back == "unpack" else []))
        assert json_of(run(store, "prune --older-than 7d --json"))["recent"] == 0, there_and_back
        assert len(json_of(run(store, "prune --older-than 7d --json"))["files"]) == 6, there_and_back
    assert "nothing to remove" in run(store, "prune --older-than 99999d").stdout
    sizes = [store.dump_path(r).stat().st_size for r in records]
    run(store, "prune --keep", f"{sum(sizes[2:])}B", "--yes")
    assert [r for r in records if store.dump_path(r).exists()] == records[2:]
    assert "nothing to remove" in run(store, "prune --keep 1GB").stdout
    cases.publish(store, cases.record(9, run="other"))
    run(store, "prune --where", "run='other'", "--yes")
    assert [path.parts[-3] for path in store.iter_dumps()] == ["ppo-1"] * 4


@pytest.mark.parametrize("packed", [False, True])
def test_the_turns_of_a_run_go_with_its_last_dump(store, packed):
    for number, name in enumerate(("ppo-1", "other")):
        for call in range(2):
            cases.publish(store, cases.record(2 * number + call, run=name))
        (store.root / "turns" / name).mkdir(parents=True)
        (store.root / "turns" / name / "text.json").write_text("{}")
    if packed:
        run(store, "pack --quiet")
    run(store, "prune --where", f"run='other' and dump_id='{cases.record(2, run='other').dump_id}'", "--yes")
    assert (store.root / "turns" / "other").exists()
    notes = store.root / "turns" / "ppo-1" / "my-notes.md"
    notes.write_text("by hand")
    run(store, "prune --where", "run='other'", "--yes")
    assert [path.name for path in (store.root / "turns").iterdir()] == ["ppo-1"]
    run(store, "prune --where", "run='ppo-1'", "--yes")
    assert [*(store.root / "turns").rglob("*")] == [notes.parent, notes], "what it did not make stays"


def test_prune_never_follows_a_link_out_of_the_store_and_counts_the_rest(store, tmp_path):
    cases.fill(store, 8)
    refresh(store)
    outside = tmp_path / "outside"
    store.dump_folder("ppo-1", 2).rename(outside)
    store.dump_folder("ppo-1", 2).symlink_to(outside)
    answer = json_of(run(store, "prune --where", "rank > 0", "--yes", "--json", code=1))
    assert len(list(outside.iterdir())) == 2
    assert (len(answer["files"]), len(answer["failed"])) == (4, 2) and all("leads out" in why for _, why in answer["failed"])


@pytest.mark.parametrize(
    "words",
    [
        (), ("--older-than", "soon"), ("--keep", "-1GB"), ("--where", "rank"), ("--damaged", "--where", "rank=0"),
    ],
    ids=str,
)  # fmt: skip
def test_prune_refuses_what_it_does_not_understand(store, words):
    cases.fill(store, 2)
    with pytest.raises(UsageError):
        run(store, "prune", *words, "--yes")
    assert len(list(store.iter_dumps())) == 2


def test_prune_damaged_takes_only_what_is_broken(store, monkeypatch):
    junk, newer, misplaced, mended, locked = (store.dump_path(r) for r in cases.fill(store, 5, rank=0))
    junk.write_bytes(b"junk")
    newer.write_bytes(cases.with_record(newer.read_bytes(), b'"format_version":1', b'"format_version":9'))
    misplaced = misplaced.rename(misplaced.with_name(f"renamed{SUFFIX}"))
    good = mended.read_bytes()
    mended.write_bytes(b"torn")
    really = headers.read_one

    def refused(name, *place):
        if name == os.fspath(locked):
            raise OSError(5, "Input/output error")
        return really(name, *place)

    monkeypatch.setattr(headers, "read_one", refused)
    result = run(store, "index --quiet")
    assert [line.partition(":")[0] for line in result.stdout.splitlines()[1:]].count("damaged") == 2
    assert result.stdout.count("not usable: ") == 3
    catalog = query.open_fresh(store)
    mended.write_bytes(good)
    plan = prune.plan_prune(catalog, damaged=True)
    assert [item.path for item in plan.files] == [store.relative(junk)]
    answer = json_of(run(store, "prune --damaged --yes --json"))
    assert [item["path"] for item in answer["files"]] == [store.relative(junk)] and not junk.exists()
    assert all(path.exists() for path in (newer, misplaced, mended, locked))


HOLDERS = {
    "catalog.lock": "import fcntl; file = open(sys.argv[1] + '/catalog.lock', 'a'); fcntl.flock(file, fcntl.LOCK_EX)",
    "catalog.db": "import sqlite3; db = sqlite3.connect(sys.argv[1] + '/catalog.db', isolation_level=None); db.execute('BEGIN IMMEDIATE')",
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_rebuild_behind_a_lock_says_at_once_what_it_waits_for_and_goes_on_waiting(store, name, caplog):
    cases.fill(store, 2)
    run(store, "index")
    code = f"import sys; {HOLDERS[name]}; print(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, store.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline()
        with ThreadPoolExecutor(1) as pool:
            rebuilt = pool.submit(run, store, "index", "--rebuild", "--json")
            end = time.monotonic() + 30
            while "waiting for" not in caplog.text and time.monotonic() < end:
                time.sleep(0.05)
            assert not rebuilt.done()
            holder.stdin.close()
            assert json_of(rebuilt.result(60))["dumps"] == 2
    assert f"waiting for another process, which holds {store.root / name}" in caplog.text


@pytest.mark.slow
def test_a_bad_byte_anywhere_in_the_catalog_is_named_with_the_rebuild_that_mends_it(store):
    """In the header, in each statement of the schema (which SQLite quotes in its messages), in the revision."""
    cases.fill(store, 2)
    cases.settle(store)
    run(store, "index")
    good = store.catalog_path.read_bytes()
    (version,) = (found.end() for found in re.finditer(rb"\x02\x15(?=%b)" % migrate.HEAD.encode(), good))
    statements = [found.start() for found in re.finditer(b"CREATE ", good)]
    places = [*range(0, 112, 28), *(at + 7 * step for step, at in enumerate(statements[::9])), *range(version, version + 4)]
    named = set()
    for place, bits in zip(places, itertools.cycle((0xFF, 1)), strict=False):
        bad = bytearray(good)
        bad[place] ^= bits
        for suffix in ("-wal", "-shm"):
            Path(f"{store.catalog_path}{suffix}").unlink(missing_ok=True)
        store.catalog_path.write_bytes(bad)
        try:
            run(store, "ls")
        except CatalogProblem as error:
            assert "`actordbg index --rebuild`" in error.hint, (place, bits, error)
            named.add(place)
            assert "2 dumps in the catalog" in run(store, "index --rebuild --quiet").stdout
    assert len(named) > len(places) // 2
