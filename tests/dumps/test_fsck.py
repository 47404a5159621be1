"""`actordbg store fsck` names every damage, by path and kind, writes nothing unless asked, and repairs without losing what is good."""

import contextlib
import json
import os
import shutil
import sqlite3
import time

import catalogcases
import packcases
import pytest
import storecases
from casefiles import cases_of
from commandline import invoke
from ownercases import give_away

from actordbg.base.errors import StoreProblem
from actordbg.base.processes import start_ticks
from actordbg.dumps.checking import check
from actordbg.dumps.finding import KINDS, Repair
from actordbg.dumps.repairing import QUARANTINE, repair
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.encoding import pack_line
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.records.journal import SUPERVISOR, Journal
from actordbg.store.layout import Store
from actordbg.store.places import Pack, places_of, read_payload

DAMAGES = cases_of("damages")
OF_CATALOG = {"damaged-catalog", "stale-catalog"}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    store = storecases.build(tmp_path_factory.mktemp("good") / "store")
    assert check(store) == []
    return store


@pytest.fixture
def store(good, tmp_path):
    shutil.copytree(good.root, tmp_path / "store")
    return Store(tmp_path / "store")


def looked(store, kind):
    """What is found; the catalog, whose check takes a second, is looked at where it is what was harmed."""
    return check(store, without=() if kind in OF_CATALOG else ("catalog", "rings"))


def names(store, findings):
    return {(os.path.relpath(one.place, store.root), one.kind) for one in findings}


def files(store):
    """Every name of the store with mode, time and content, without opening what is not a file."""
    for path in sorted(store.root.rglob("*")):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        yield os.path.relpath(path, store.root), state.st_mode, state.st_mtime_ns, content


# ---- damages ----


def dump(store, number=0):
    return sorted(store.dumps.rglob(f"*{SUFFIX}"), key=lambda path: path.name)[number]


def pack(store):
    return next(iter(store.iter_packs()))


def swapped(store):
    """Two dumps of one folder with each other's names."""
    first, second = dump(store), dump(store, 4)
    aside = first.with_name(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return store.relative(first)


def other_run(store):
    """A dump in the folder of another run."""
    path = dump(store)
    target = store.dumps / "ppo-3" / "rank0000" / path.name
    target.parent.mkdir(parents=True, mode=0o700)
    target.parent.parent.chmod(0o700)
    path.rename(target)
    return store.relative(target)


def moved_pack(store):
    """A pack in the folder of another run: each of its dumps is out of place."""
    path = pack(store)
    target = store.packs / "ppo-9" / path.name
    target.parent.mkdir(mode=0o700)
    path.rename(target)
    return f"{store.relative(target)}#{Pack(target).dump_ids[0]}"


def packed_bits(store):
    """A bit of the first block of the pack: all dumps that use it."""
    path = pack(store)
    first = Pack(path).dump_ids[0]
    flip(path, 40 / path.stat().st_size)
    return f"{store.relative(path)}#{first}"


def copied_out(store, host=b"node-"):
    """A packed dump as a file too; with another host, as another dump."""
    place = next(one for one in places_of(store) if "#" in str(one))
    record, payload = read_payload(place)
    line = Pack(pack(store)).line(record.dump_id).replace(b'"host":"node-', b'"host":"' + host)
    path = store.dump_path(record)
    make_folder(path.parent)
    path.write_bytes(pack_line(line, payload))
    path.chmod(0o600)
    return store.relative(path)


def changed_out(store):
    return copied_out(store, b"elsewhere-")


def old_temporary(store):
    path = dump(store).with_name(f".tmp-1-abc{SUFFIX}")
    path.write_bytes(b"half")
    path.chmod(0o600)
    os.utime(path, (time.time() - 7200,) * 2)
    return store.relative(path)


CALLED = (swapped, other_run, moved_pack, packed_bits, copied_out, changed_out, old_temporary)


def flip(path, part):
    """Change one bit, at this part of the file."""
    data = bytearray(path.read_bytes())
    data[min(int(part * len(data)), len(data) - 1)] ^= 0x10
    path.write_bytes(data)


def harm(store, line):
    """Harm a store as a case says, and return the path that has to be named."""
    verb, _, rest = line.partition(" ")
    if verb == "call":
        return next(each for each in CALLED if each.__name__ == rest)(store)
    if verb == "sql":
        with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as connection:
            connection.execute(rest)
        return "catalog.db"
    name, _, value = rest.encode().decode("unicode_escape").partition(" ")
    path = {"DUMP": dump, "PACK": pack}[name](store) if name.isupper() and name != "FORMAT" else store.root / name
    path = next(iter(sorted(store.root.glob(name))), path) if "*" in name else path
    old, _, new = value.partition(" -> ")
    make_folder(path.parent)
    if verb in ("unlink", "fifo", "link", "folder"):
        path.unlink(missing_ok=True)
    if verb == "flip":
        flip(path, float(value))
    elif verb == "cut":
        os.truncate(path, int(float(value) * path.stat().st_size))
    elif verb == "write":
        path.write_text(value)
    elif verb == "text":
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    elif verb == "record":
        path.write_bytes(catalogcases.with_record(path.read_bytes(), old.encode(), new.encode()))
    elif verb == "mode":
        path.chmod(int(value, 8))
    elif verb == "rename":
        path = path.rename(path.with_name(value))
    elif verb == "fifo":
        os.mkfifo(path, 0o600)
    elif verb == "link":
        path.symlink_to(value)
    elif verb == "folder":
        path.mkdir(mode=0o700)
    return os.path.relpath(path, store.root)


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_named_and_nothing_good_is_lost_by_its_repair(store, name):
    (line,), (kind, *more) = DAMAGES[name]
    before = storecases.contents(store)
    harmed = harm(store, line)
    lost, harmed = int(more[0]) if more else 0, more[1] if len(more) > 1 else harmed
    as_it_was = list(files(store))
    findings = looked(store, kind)
    assert (harmed, kind) in names(store, findings), findings
    assert list(files(store)) == as_it_was, "a check writes nothing"
    done, failed = repair(store, findings)
    assert failed == []
    assert all(one in findings for one, _ in done)
    after = storecases.contents(store)
    assert after.items() <= before.items(), "no dump has other content"
    assert len(before) - len(after) == lost
    left = looked(store, kind)
    assert all(one.repair is Repair.NOTHING for one in left), left
    if KINDS[kind].repair is Repair.NOTHING:
        assert (harmed, kind) in names(store, left), "what cannot be repaired is named again"
    kept = {path for path, *_ in files(store) if not path.startswith(f"{QUARANTINE}/")} | moved(store)
    gone = {path for path, *_ in as_it_was} - kept
    assert gone <= {harmed, *("catalog.db-wal", "catalog.db-shm")} or kind in ("misplaced-dump", "odd-name"), gone


def moved(store):
    folder = store.root / QUARANTINE
    return {os.path.relpath(path, folder) for path in folder.rglob("*")} if folder.is_dir() else set()


def test_most_kinds_are_among_the_damages():
    never = KINDS.keys() - {case.expected[0] for case in DAMAGES.values()}
    assert never == {"foreign-owner", "unreadable", "unfinished-file", "damaged-ring", "calls-in-ring"}


def test_good_dumps_come_out_of_a_pack_of_which_one_is_damaged(store):
    packed, before = pack(store), storecases.contents(store)
    dumps = packcases.blobs(packed)
    dumps[2] = packcases.blobs(packed, run="elsewhere")[2]  # its payload says that it belongs to another dump
    packed.unlink()
    harmed = packcases.write_pack(packed.parent, dumps).path
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
    path = harm(store, "flip DUMP 0.97")
    quick = invoke(*words, "--quick")
    assert (quick.exit_code, "no problems" in quick.stdout) == (0, True), "a payload is not read by --quick"
    (store.root / "another's").touch()
    found = invoke(*words)
    assert (
        found.exit_code == 1 and found.stdout.startswith(f"damage: damaged-dump: {path}: ") and "\nnote: foreign" in found.stdout
    )
    assert "--repair" in found.stderr and (store.root / path).exists()
    answer = json.loads(invoke(*words, "--repair", "--json").stdout)
    assert [one["path"] for one in answer["repaired"]] == [path] and answer["failed"] == []
    assert (store.root / QUARANTINE / path).is_file()
    assert invoke(*words).exit_code == 0
    with pytest.raises(StoreProblem, match="no store"):
        invoke(Store(store.dumps), "store fsck")
