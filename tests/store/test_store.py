"""The store: every file arrives whole or not at all, and nobody but its owner can read it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.dumps.recover import remove_unfinished_files
from actordbg.formats.store_files import OddFile, atomic_write, open_regular, read_regular
from actordbg.store.layout import Store


def test_creating_twice_is_creating_once_and_a_folder_without_a_store_is_said_so(tmp_path):
    with pytest.raises(StoreProblem) as caught:
        Store(tmp_path).require()
    assert "dump enable" in caught.value.hint
    Store(tmp_path / "a" / "b").create().create()
    assert Store(tmp_path / "a" / "b").require().format_path.read_text() == '{"format": 1}\n'


@pytest.mark.parametrize("text", ['{"format": 2}', "", "[]", "{}", '{"format": true}', '{"format": 1.0}'])
def test_a_newer_or_damaged_store_is_refused(tmp_path, text: str):
    (tmp_path / "FORMAT").write_text(text)
    with pytest.raises(NewerFormat if "2" in text else StoreProblem):
        Store(tmp_path).require()


def test_files_and_folders_are_private(store):
    atomic_write(store.dumps / "run" / "rank0000" / "x", b"x")
    path = store.dumps / "run" / "rank0000" / "x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, store.dumps)} == {0o700}


def test_a_write_that_fails_leaves_nothing(store, monkeypatch):
    def full(*_: object) -> None:
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


_WRITER = """
import sys
from actordbg.store.layout import Store, atomic_write
number, store = int(sys.argv[2]), Store(sys.argv[1]).create()
for turn in range(30):
    atomic_write(store.root / "shared", bytes([number]) * 10_000)
    atomic_write(store.dump_folder("run", number) / f"{turn}.safetensors.zst", b"x")
"""


def test_many_processes_write_one_store_at_once(tmp_path):
    root = tmp_path / "s"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(root), str(n)]) for n in range(8)]
    assert [writer.wait(60) for writer in writers] == [0] * 8
    store = Store(root)
    assert len(set((store.root / "shared").read_bytes())) == 1
    assert len(list(store.iter_dumps())) == 240


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
