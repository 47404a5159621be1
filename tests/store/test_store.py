"""The store: every file arrives whole or not at all, and nobody but its owner can read it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.dumps.recover import remove_unfinished_files
from actordbg.formats.store_files import atomic_write
from actordbg.store.layout import Store


def test_creating_twice_is_creating_once(tmp_path: Path):
    Store(tmp_path / "a" / "b").create().create()
    assert Store(tmp_path / "a" / "b").require().format_path.read_text() == '{"format": 1}\n'


def test_a_folder_without_a_store_is_said_so_with_the_way_to_make_one(tmp_path: Path):
    with pytest.raises(StoreProblem) as caught:
        Store(tmp_path).require()
    assert "dump enable" in caught.value.hint


def test_a_newer_store_is_refused(tmp_path: Path):
    (tmp_path / "FORMAT").write_text(json.dumps({"format": 2}))
    with pytest.raises(NewerFormat):
        Store(tmp_path).require()


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_damaged_format_file_is_a_store_problem(tmp_path: Path, text: str):
    (tmp_path / "FORMAT").write_text(text)
    with pytest.raises(StoreProblem):
        Store(tmp_path).require()


def test_files_and_folders_are_private(store: Store):
    atomic_write(store.dumps / "run" / "rank0000" / "x", b"x")
    path = store.dumps / "run" / "rank0000" / "x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, store.dumps)} == {0o700}


def test_a_write_that_fails_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    atomic_write(store.root / "x", b"old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError):
        atomic_write(store.root / "x", b"new")
    assert (store.root / "x").read_bytes() == b"old"
    assert sorted(path.name for path in store.root.iterdir()) == ["FORMAT", "x"]


def test_who_is_killed_while_it_looks_for_room_leaves_nothing_that_recover_does_not_take(store: Store):
    """The process ends in the middle of the write, and once in the call that takes the name away."""
    start = "import os, sys; from actordbg.store import layout; from pathlib import Path"
    for patched, left in (("layout.bytes = lambda size: os._exit(9)", 0), ("Path.unlink = lambda *_: os._exit(9)", 1)):
        code = f"{start}\n{patched}\nlayout.Store(Path(sys.argv[1])).require_writable()"
        assert subprocess.run([sys.executable, "-c", code, store.root], timeout=60).returncode == 9
        assert len([*store.root.glob(".tmp-*")]) == left
    remove_unfinished_files(store)
    assert not [*store.root.glob(".tmp-*")]


def test_unfinished_and_foreign_files_are_not_dumps(store: Store):
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


def test_many_processes_write_one_store_at_once(tmp_path: Path):
    root = tmp_path / "s"
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(root), str(n)]) for n in range(8)]
    assert [writer.wait(60) for writer in writers] == [0] * 8
    store = Store(root)
    assert len(set((store.root / "shared").read_bytes())) == 1
    assert len(list(store.iter_dumps())) == 240
