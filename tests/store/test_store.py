"""The store: every file arrives whole or not at all, and nobody but its owner can read it."""

import os
import socket
import stat
import subprocess
import sys

import pytest
from commandline import tried
from comparecases import write_replay
from ownercases import give_away
from replaycases import publish

from actordbg.base.errors import ActordbgError, NewerFormat, StoreProblem
from actordbg.dumps.bundle import pack_bundle
from actordbg.dumps.create import create_dumps
from actordbg.dumps.recover import remove_unfinished_files
from actordbg.formats.store_files import OddFile, atomic_write, make_folder, open_regular, read_regular, remove
from actordbg.records.journal import Journal
from actordbg.store.layout import Store

REPLAY = "20260101T000000-aaaaaa"


def test_creating_twice_is_creating_once_and_a_folder_without_a_store_is_said_so(tmp_path):
    with pytest.raises(StoreProblem) as caught:
        Store(tmp_path).require()
    assert "dump enable" in caught.value.hint
    Store(tmp_path / "a" / "b").create().create()
    assert Store(tmp_path / "a" / "b").require().format_path.read_text() == '{"format": 1}\n'


@pytest.mark.parametrize("text", ['{"format": 2}', "", "[]", "{}", '{"format": true}', '{"format": 1.0}', "[" * 4000])
def test_a_newer_or_damaged_store_is_refused(tmp_path, text):
    (tmp_path / "FORMAT").write_text(text)
    with pytest.raises(NewerFormat if "2" in text else StoreProblem):
        Store(tmp_path).require()


def test_files_and_folders_are_private(store):
    atomic_write(store.dumps / "run" / "rank0000" / "x", b"x")
    path = store.dumps / "run" / "rank0000" / "x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, store.dumps)} == {0o700}


def test_a_write_that_fails_leaves_nothing(store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    atomic_write(store.root / "x", b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        atomic_write(store.root / "x", b"new")
    assert (store.root / "x").read_bytes() == b"old"
    assert sorted(path.name for path in store.root.iterdir()) == ["FORMAT", "x"]


def test_who_is_killed_while_it_looks_for_room_leaves_nothing_that_recover_does_not_take(store):
    """The process ends in the middle of the write, and once in the call that takes the name away."""
    start = "import os, sys; from actordbg.store import layout; from pathlib import Path"
    for patched, left in (("layout.bytes = lambda size: os._exit(9)", 0), ("Path.unlink = lambda *_: os._exit(9)", 1)):
        code = f"{start}\n{patched}\nlayout.Store(Path(sys.argv[1])).require_writable()"
        assert subprocess.run([sys.executable, "-c", code, store.root], timeout=60).returncode == 9
        assert len([*store.root.glob(".tmp-*")]) == left
    remove_unfinished_files(store)
    assert not [*store.root.glob(".tmp-*")]


def test_unfinished_and_foreign_files_are_not_dumps(store):
    folder = store.dump_folder("run", 3)
    for name in ("a.safetensors.zst", ".tmp-1-b.safetensors.zst", "notes.txt"):
        atomic_write(folder / name, b"")
    assert [path.name for path in store.iter_dumps()] == ["a.safetensors.zst"]
    assert store.relative(folder / "a.safetensors.zst") == "dumps/run/rank0003/a.safetensors.zst"


# ---- files are opened only if they are regular, never through a link, never waiting, and read up to a limit ----


def test_a_regular_file_is_read_whole_and_too_large_a_one_is_refused(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        read_regular(path)
    for data in (b"", b"x", b"x" * 65_536, b"x" * 200_000):
        path.write_bytes(data)
        assert read_regular(path) == read_regular(path, len(data)) == data
    with pytest.raises(OddFile, match="more than 100 bytes"):
        read_regular(path, 100)


def test_what_is_no_file_is_refused_at_once_and_named(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "to-a-file").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(tmp_path / "socket"))
        kinds = {"fifo": "FIFO", "link": "symbolic link", "to-a-file": "symbolic link", "folder": "folder", "socket": "socket"}
        before = len(os.listdir("/proc/self/fd"))
        for name, kind in kinds.items():
            for read in (open_regular, read_regular):
                with pytest.raises(OddFile, match=kind):
                    read(tmp_path / name)
        with pytest.raises(OddFile, match="FIFO"):
            open_regular(tmp_path / "fifo", os.O_WRONLY)
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OddFile, match="device"):
        read_regular("/dev/zero")


def test_a_folder_below_a_file_is_not_a_store(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreProblem, match="there is no store in"):
        Store(tmp_path / "file" / "store").require()


# ---- links ----


def elsewhere(store, name):
    """Move a folder of the store to another disk, with a link in its place; return the link."""
    link, disk = store.root / name, store.root.parent / "disk"
    make_folder(link)
    disk.mkdir()
    link.rename(disk / "moved")
    link.symlink_to(disk / "moved")
    return link


LED = """dumps dump prune --where rank>=0 --yes
dumps/created dump pack
packs dump pack
dumps/created dump create --count 2 --batch-size 1 --seq-len 8
dumps/created/rank0000 dump create --count 2 --batch-size 1 --seq-len 8
dumps dump import case.tar.zst
replays dump import case.tar.zst""".splitlines()
"""Of each, the folder that is a link, and a command."""


@pytest.mark.parametrize("whose", ["another's", "mine"])
@pytest.mark.parametrize("led", LED)
def test_anothers_link_in_a_store_leads_no_write_and_no_removal_out_of_it(whose, led, store, tmp_path, monkeypatch):
    """A link of one's own leads to a larger disk, and works as a folder does."""
    folder, *words = led.split()
    sender = Store(tmp_path / "sender").create()
    for place in (sender, store):
        create_dumps(place, 2, batch_size=1, seq_len=8)
    write_replay(sender, REPLAY, publish(sender, 1))
    monkeypatch.chdir(tmp_path)
    pack_bundle(sender, tmp_path / "case.tar.zst", [*sender.iter_dumps()], replays=[REPLAY])
    link = elsewhere(store, folder)
    if whose != "mine":
        give_away(link, monkeypatch)
    before = sorted(link.resolve().rglob("*"))
    done = tried(store, *words)
    assert (sorted(link.resolve().rglob("*")) == before) == (whose != "mine"), done.output
    assert (done.exit_code == 0) == (whose == "mine"), (done.output, done.exception)
    assert isinstance(done.exception, ActordbgError | SystemExit | None), "no traceback"


def test_what_is_around_a_store_may_be_anybodys(store, tmp_path, monkeypatch):
    """A colleague's link to the disk with the store was named by the user; what it leads to may look like a store of its own."""
    (tmp_path / "way").symlink_to(store.root)
    give_away(tmp_path / "way", monkeypatch)
    led = Store(tmp_path / "way").require()
    atomic_write(led.dumps / "run" / "a", b"")
    outside = Store(tmp_path / "outside").create()
    (led.dumps / "run" / "led").symlink_to(outside.root)
    give_away(led.dumps / "run" / "led", monkeypatch)
    for act in (lambda path: atomic_write(path, b""), remove, make_folder, lambda path: Journal(path)):
        with pytest.raises(OddFile, match="another user made"):
            act(led.dumps / "run" / "led" / "control.json")
    assert [path.name for path in outside.root.iterdir()] == ["FORMAT"]
