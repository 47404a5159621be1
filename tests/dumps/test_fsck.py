"""`actordbg store fsck` names every damage, by path and kind, writes nothing unless asked, and repairs without losing what is good."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import damages
import packcases
import pytest
import storecases
from commandline import invoke
from ownercases import give_away

from actordbg.base.errors import StoreProblem
from actordbg.base.processes import start_ticks
from actordbg.dumps.checking import check
from actordbg.dumps.finding import KINDS, Repair, StoreFault
from actordbg.dumps.repairing import QUARANTINE, repair
from actordbg.formats.store_files import atomic_write
from actordbg.records.journal import SUPERVISOR, Journal
from actordbg.store.layout import Store

OF_CATALOG = {"damaged-catalog", "stale-catalog"}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = storecases.build(tmp_path_factory.mktemp("good") / "store")
    assert check(store) == []
    return store


@pytest.fixture
def store(good: Store, tmp_path: Path) -> Store:
    shutil.copytree(good.root, tmp_path / "store")
    return Store(tmp_path / "store")


def looked(store: Store, kind: str) -> list[StoreFault]:
    """What is found; the catalog, whose check takes a second, is looked at where it is what was harmed."""
    return check(store, without=() if kind in OF_CATALOG else ("catalog", "rings"))


def names(store: Store, findings: list[StoreFault]) -> set[tuple[str, str]]:
    return {(os.path.relpath(one.place, store.root), one.kind) for one in findings}


def files(store: Store) -> Iterator[tuple[str, int, int, bytes]]:
    """Every name of the store with mode, time and content, without opening what is not a file."""
    for path in sorted(store.root.rglob("*")):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        yield os.path.relpath(path, store.root), state.st_mode, state.st_mtime_ns, content


@pytest.mark.slow
@pytest.mark.parametrize("name", damages.DAMAGES)
def test_every_damage_is_named_and_nothing_good_is_lost_by_its_repair(store, name: str):
    damage = damages.DAMAGES[name]
    before = storecases.contents(store)
    harmed = damage.do(store)
    as_it_was = list(files(store))
    findings = looked(store, damage.kind)
    assert (harmed, damage.kind) in names(store, findings), findings
    assert list(files(store)) == as_it_was, "a check writes nothing"
    done, failed = repair(store, findings)
    assert failed == []
    assert all(one in findings for one, _ in done)
    after = storecases.contents(store)
    assert after.items() <= before.items(), "no dump has other content"
    assert len(before) - len(after) == damage.lost
    left = looked(store, damage.kind)
    assert all(one.repair is Repair.NOTHING for one in left), left
    if KINDS[damage.kind].repair is Repair.NOTHING:
        assert (harmed, damage.kind) in names(store, left), "what cannot be repaired is named again"
    kept = {path for path, *_ in files(store) if not path.startswith(f"{QUARANTINE}/")} | moved(store)
    gone = {path for path, *_ in as_it_was} - kept
    assert gone <= {harmed, *("catalog.db-wal", "catalog.db-shm")} or damage.kind in ("misplaced-dump", "odd-name"), gone


def moved(store: Store) -> set[str]:
    folder = store.root / QUARANTINE
    return {os.path.relpath(path, folder) for path in folder.rglob("*")} if folder.is_dir() else set()


def test_most_kinds_are_among_the_damages():
    never = KINDS.keys() - {one.kind for one in damages.DAMAGES.values()}
    assert never == {"foreign-owner", "unreadable", "unfinished-file", "damaged-ring", "calls-in-ring"}


def test_good_dumps_come_out_of_a_pack_of_which_one_is_damaged(store):
    pack, before = damages.pack(store), storecases.contents(store)
    dumps = packcases.blobs(pack)
    dumps[2] = packcases.blobs(pack, run="elsewhere")[2]  # its payload says that it belongs to another dump
    pack.unlink()
    harmed = packcases.write_pack(pack.parent, dumps).path
    findings = looked(store, "damaged-packed-dump")
    place = f"{os.path.relpath(harmed, store.root)}#{dumps[2][0].dump_id}"
    assert names(store, findings) == {(place, "damaged-packed-dump")}
    ((_, what),), failed = repair(store, findings)
    assert (failed, what.partition(";")[0]) == ([], "5 of its 6 dumps are files")
    assert storecases.contents(store).items() <= before.items() and len(storecases.contents(store)) == len(before) - 1
    assert looked(store, "damaged-packed-dump") == []


def test_what_an_earlier_version_of_patch_kept_belongs_to_a_store(store):
    for place in ("events/20260101T000000.000000Z-1-ab.json", f"backups/{'0' * 64}/actor.py"):
        atomic_write(store.root / place, b"{}")
    assert looked(store, "layout") == []


def test_a_replay_that_runs_is_left_alone(store):
    journal = Journal(store.replays / "r-01" / SUPERVISOR)
    journal.append("supervisor", pid=os.getpid(), ticks=start_ticks(os.getpid()))
    journal.close()
    (store.replays / "r-01" / "spec.json").write_text("junk")
    findings = check(store, without=("catalog",))
    done, failed = repair(store, findings)
    assert (done, [one.kind for one, _ in failed]) == ([], ["damaged-spec"])
    assert (store.replays / "r-01" / "spec.json").read_text() == "junk"


def test_a_link_of_another_user_leads_no_repair_out_of_the_store(store, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "rank0000").mkdir(parents=True, mode=0o755)
    (home / "rank0000" / "mine").symlink_to("anything")
    (home / "rank0000").chmod(0o755)
    (store.root / QUARANTINE).symlink_to(home)
    (store.dumps / "theirs").symlink_to(home)
    store.control_of(None).write_text("junk")
    before = sorted(home.rglob("*"))
    findings = check(store, without=("catalog", "rings"))
    for link in (store.root / QUARANTINE, store.dumps / "theirs"):
        give_away(link, monkeypatch)
    done, failed = repair(store, findings)
    assert done == [] and {"damaged-control", "open-mode", "odd-file"} <= {one.kind for one, _ in failed}
    assert {told for _, told in failed} == {f"another user made {name} a link" for name in (QUARANTINE, "dumps/theirs")}
    assert sorted(home.rglob("*")) == before and (home / "rank0000").stat().st_mode & 0o777 == 0o755
    monkeypatch.undo()
    for link in (store.root / QUARANTINE, store.dumps / "theirs"):
        os.chown(link, os.geteuid(), -1, follow_symlinks=False)
    assert {one.kind for one, _ in repair(store, findings)[0]} >= {"damaged-control", "open-mode"}, "your own link is your choice"


def test_the_command_says_what_it_found_and_repairs_when_asked(store):
    words = (store, "store", "fsck", "--quiet")
    path = damages.DAMAGES["a bit of a dump's payload"].do(store)
    quick = invoke(*words, "--quick")
    assert (quick.exit_code, "no problems" in quick.stdout) == (0, True), "a payload is not read by --quick"
    found = invoke(*words)
    assert found.exit_code == 1 and f"damage: damaged-dump: {path}: " in found.stdout
    assert "--repair" in found.stderr and (store.root / path).exists()
    answer = json.loads(invoke(*words, "--repair", "--json").stdout)
    assert [one["path"] for one in answer["repaired"]] == [path] and answer["findings"] == answer["failed"] == []
    assert (store.root / QUARANTINE / path).is_file()
    assert invoke(*words).exit_code == 0
    with pytest.raises(StoreProblem, match="no store"):
        invoke(Store(store.dumps), "store", "fsck")
