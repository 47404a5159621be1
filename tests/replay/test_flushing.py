"""What a worker leaves behind comes to the disk in a thread, in an order in which nothing is believed too early."""

import errno
import os
import threading
from pathlib import Path

import pytest
from supervised import make_spec

from actordbg.formats.store_files import atomic_write
from actordbg.records.journal import TENSORS, read_events, read_results
from actordbg.records.replay_record import KEPT_BYTES, PASSED
from actordbg.replay.flushing import UNFLUSHED, flush
from actordbg.replay.supervise import is_whole
from actordbg.replay.work_order import EXIT_BROKEN, WorkOrder
from actordbg.replay.worker import Worker


class Keeping:
    """An engine that keeps a file for each input, as the real one does."""

    collective, tainted, out_of_step = False, False, ""

    def __init__(self, folder):
        self.folder = folder

    def open(self):
        return {}

    def load(self, item):
        return None

    def run(self, item, loaded, *, recorded, **_):
        kept = self.folder / TENSORS / f"{item.dump_id}.safetensors"
        atomic_write(kept, b"1" * 100, flush=False)
        return {"status": PASSED, UNFLUSHED: kept, "extra": {KEPT_BYTES: 100}}

    def close(self): ...


class Disk:
    """What came to the disk, and in what order: which files were flushed whenever the journal was."""

    def __init__(self, monkeypatch, journal):
        self.journal, self.flushed, self.early = journal, set[str](), list[str]()
        self.full_for, self.gate = "", threading.Event()
        self.gate.set()
        self._fsync, self._fdatasync = os.fsync, os.fdatasync
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def fsync(self, descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        self.gate.wait(60)
        if self.full_for and name.startswith(self.full_for):
            raise OSError(errno.ENOSPC, "No space left on device")
        self._fsync(descriptor)
        self.flushed.add(name)

    def fdatasync(self, descriptor):
        if self.full_for == "journal":
            raise OSError(errno.EIO, "Input/output error")
        there = {event["dump_id"] for event in read_events(self.journal) if event["event"] == "end"}
        self._fdatasync(descriptor)
        self.early += [name for name in there if f"{name}.safetensors" not in self.flushed and name != self.full_for]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(monkeypatch, tmp_path / "rank0.jsonl")


@pytest.fixture
def worker(tmp_path):
    order = WorkOrder(1, [0], [[0], [1], [2], [3]], stay=True)
    return Worker(tmp_path, make_spec(4), order, 0, Keeping(tmp_path))


def test_no_flush_takes_a_result_ahead_of_its_tensors_and_all_are_there_at_the_end(worker, tmp_path, disk):
    assert worker.run() == 0
    assert disk.early == [] and disk.flushed >= {f"d{n}.safetensors" for n in range(4)} | {TENSORS}
    assert {one.status for one in read_results(tmp_path).values()} == {PASSED} and len(read_results(tmp_path)) == 4
    assert not any(thread.name == "flush" for thread in threading.enumerate())


def test_while_the_disk_sleeps_the_next_input_runs_and_no_more_than_one_result_waits(worker, tmp_path, disk):
    disk.gate.clear()
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        while not (tmp_path / TENSORS / "d1.safetensors").exists():  # d1 runs while d0's file is on its way
            running.join(0.005)
            assert running.is_alive()
        said = [(event["event"], event["dump_id"]) for event in read_events(disk.journal) if "dump_id" in event]
        assert said == [("start", "d0"), ("end", "d0"), ("start", "d1")], "a process that is killed now has one result"
    finally:
        disk.gate.set()
        running.join(60)
    assert len(read_results(tmp_path)) == 4 and disk.early == []


def test_a_disk_that_does_not_take_the_tensors_ends_the_worker_and_their_input_runs_again(worker, tmp_path, disk):
    disk.full_for = "d3"  # the last one: nothing comes after it but the end
    assert worker.run() == EXIT_BROKEN
    assert not (tmp_path / TENSORS / "d3.safetensors").exists()
    broken = read_events(disk.journal)[-1]
    assert (broken["event"], broken["error_class"]) == ("broken", "actordbg.base.errors.MachineFault")
    assert broken["error"].startswith(f"No space left on device ({tmp_path} has ")
    results = read_results(tmp_path)
    assert {name for name, one in results.items() if not is_whole(tmp_path, one)} == {"d3"} and len(results) == 4


def test_a_journal_that_cannot_be_flushed_ends_the_worker_and_blames_no_input(worker, tmp_path, disk):
    disk.full_for = "journal"
    assert worker.run() == EXIT_BROKEN
    said = [event["event"] for event in read_events(disk.journal)]
    assert said == ["boot", "ready", "start", "broken"], "an input without an end would count as what killed it"


def test_a_result_that_a_full_disk_does_not_take_blames_no_input(worker, tmp_path, monkeypatch, capsys):
    write = worker.journal.write

    def full(event, /, **values):
        if event in ("end", "broken"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(event, **values)

    monkeypatch.setattr(worker.journal, "write", full)
    assert worker.run() == EXIT_BROKEN, "the exit code says what the journal cannot"
    assert read_results(tmp_path) == {} and "No space left on device" in capsys.readouterr().err


def test_a_complete_file_that_a_nodes_host_has_taken_is_no_error(tmp_path):
    """The host reads a file that is complete, sends it and removes it, before or after it comes to the disk."""
    kept = tmp_path / "a.safetensors"
    kept.write_bytes(b"1" * 100)
    kept.unlink()
    flush(kept)
    with pytest.raises(OSError, match="a folder"):
        flush(tmp_path)
