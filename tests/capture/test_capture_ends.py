"""What a process cannot write before it ends stays in its ring, and the books say so: exactly, everywhere, until it is
recovered."""

import os
import sys
import time

import pytest
import torch
from capturekit import AdaptedRecording, LaterDevice, Recording, StuckStore
from commandline import invoke
from deathcases import mounted
from plainkit import all_same
from roots import ROOT, SUPPORT, json_of, run_program
from soaking import Actor
from victims import inputs, wait_for

from actordbg.capture.control import WRITERS
from actordbg.capture.snapshot import Copier
from actordbg.dumps import recover
from actordbg.formats import ringfile
from actordbg.records.run_files import read_counters
from actordbg.store import payload
from actordbg.store.layout import Store

OWN = ("dump_id", "timestamp", "monotonic_ns", "instance", "recovered", "versions", "trigger_facts", "payload_sha256", "tensors")
"""What differs between two recordings of the same calls. `trigger_facts` and payloads name dumps."""


class SlowStore(Store):
    """A store whose disk takes a while for each dump. Guarantees: `written` counts dumps."""

    written = 0

    def __init__(self, root, seconds):
        super().__init__(root)
        self.seconds = seconds

    def publish_dump(self, record, blob):
        time.sleep(self.seconds)
        self.written += 1
        return super().publish_dump(record, blob)


def train(recording, calls, actor=None):
    """Calls of many shapes. Those of an actor that was there before are all good."""
    moods = actor is None
    actor = actor or Actor()
    for seed in range(calls):
        mood = "good" if not moods else "nan" if seed % 11 == 7 else "broken" if seed % 13 == 9 else "good"
        try:
            recording.forward(actor, **inputs(seed), mood=mood)
        except ValueError:
            assert mood == "broken"


def end(recording, seconds):
    """End as a process does that has so much time to write, on a machine that is as busy as it likes."""
    writer = recording.recorder.writer
    writer._deadline, writer._give_up = time.monotonic() + seconds, time.monotonic() + 60
    assert recording.close(60)


def status(store):
    """The total of `dump status`, and its words."""
    answers = [invoke(store, "dump status", *more) for more in (("--json",), ())]
    assert [answer.exit_code for answer in answers] == [0, 0], answers[0].output
    return json_of(answers[0])["total"], answers[1].output


def balanced(total):
    return total["calls"] == total["captured"] + total["dropped"] + total["sampled_out"] + total["pending"]


def recovered(store, *more):
    answer = invoke(store, "dump recover --json", *more)
    assert answer.exit_code == 0, answer.output


def dumps(store):
    return {dump.record.call_index: dump for dump in map(payload.load, store.iter_dumps())}


SWITCHES = {
    "every call": {},
    "armed": {"every": 0, "triggers": ("nan", "exception"), "before": 2, "with_rng": True},
    "one in three, with outputs": {"every": 3, "with_outputs": True, "triggers": ("nan",)},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_slow_disk_leaves_in_the_ring_is_recovered_as_it_would_have_been_written(tmp_path, name, caplog):
    quick, slow = Store(tmp_path / "quick").create(), Store(tmp_path / "slow").create()
    recording = Recording(quick, **SWITCHES[name])
    train(recording, 60)
    assert recording.close(60)
    recovered(quick)  # what raised keeps a ring, too
    wanted = dumps(quick)

    disk = SlowStore(slow.root, 0.3)
    recording = Recording(disk, **SWITCHES[name])
    train(recording, 60)
    end(recording, 0.25)
    total, words = status(slow)
    left = total["pending"]
    assert balanced(total) and total["calls"] == 60 and left > 5 and total["dropped"] == 0
    assert total["captured"] == disk.written and f"{left} in ring" in words
    assert f"actordbg: {left} calls are still in the ring" in caplog.text
    assert f"{left} calls are still in the ring of pid {os.getpid()}: run `actordbg dump recover`" in words
    (data,) = map(read_counters, slow.counters.rglob("*.json"))
    assert (data["pending"], data["state"]) == (left, "ended")
    for _ in range(2):  # and again
        recovered(slow)
        total, words = status(slow)
        assert balanced(total) and total["pending"] == total["dropped"] == 0 and "still in" not in words
        found = dumps(slow)
        assert found.keys() == wanted.keys()
    for number, one in found.items():
        mine, theirs = ({k: v for k, v in vars(dump.record).items() if k not in OWN} for dump in (one, wanted[number]))
        assert mine == theirs and all_same(one.inputs, wanted[number].inputs)
        assert one.outputs.keys() in ({}.keys(), wanted[number].outputs.keys()), (
            "outputs of a call that is left are lost, and counted"
        )
    (data,) = map(read_counters, slow.counters.rglob("*.json"))
    (other,) = map(read_counters, quick.counters.rglob("*.json"))
    assert data["triggered"] == other["triggered"] and data["state"] == "ended"
    lost = sum(1 for dump, full in zip(found.values(), wanted.values(), strict=True) if full.outputs and not dump.outputs)
    assert data["outputs_dropped"] == lost


def test_without_a_ring_file_what_is_not_written_is_dropped_and_said(store):
    recording = Recording(SlowStore(store.root, 0.3), ring=0)
    train(recording, 40)
    end(recording, 0.25)
    total, words = status(store)
    assert balanced(total) and total["pending"] == 0 and total["dropped"] == 40 - total["captured"] > 5
    assert f"exit {total['dropped']}" in words


def test_copies_that_a_device_still_has_land_in_the_ring_at_the_end(store, monkeypatch):
    device = LaterDevice()
    recording = Recording(SlowStore(store.root, 0.3), copier=Copier(lambda _: device))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.dtype == torch.int64))
    train(recording, 20)
    end(recording, 0.2)
    monkeypatch.undo()
    total, _ = status(store)
    assert balanced(total) and total["pending"] > 3
    recovered(store)
    found = dumps(store)
    assert len(found) == 20
    assert all(torch.equal(found[n].inputs["sequences"], inputs(n)["sequences"]) for n in range(20))


def test_a_ring_is_left_alone_while_its_process_still_writes(store):
    disk = StuckStore(store.root)
    recording = Recording(disk)
    train(recording, 10)
    assert disk.entered.wait(30) and not recording.close(0.05)
    recovered(store)
    assert not dumps(store), "the process holds its ring as long as its writer may write"
    disk.free.set()
    thread = recording.recorder.writer._thread
    thread.join(30)
    assert recording.close()
    recovered(store)
    total, _ = status(store)
    assert balanced(total) and total["pending"] == 0 and len(dumps(store)) == total["captured"] == 10


@pytest.mark.parametrize("how", ["discarded", "reduced to their books"])
def test_rings_that_go_leave_exact_books(store, tmp_path, monkeypatch, how):
    monkeypatch.setenv("ACTORDBG_RING_DIR", str(tmp_path / "rings"))
    recording = Recording(SlowStore(store.root, 0.2))
    train(recording, 20)
    end(recording, 0.1)
    before, _ = status(store)
    (path,) = recover.find_rings(store)
    if how != "discarded":
        foreign = path.with_name(path.name.replace(ringfile.host_name(), "elsewhere", 1))
        foreign.write_bytes(path.read_bytes()[: ringfile.DATA])
        ringfile.forget_old(path.parent, most=0)
        assert path.stat().st_size == ringfile.SLOTS_AT and foreign.stat().st_size == ringfile.DATA
        foreign.unlink()
        assert status(store)[0] == before
    recovered(store, *["--discard"] * (how == "discarded"))
    total, words = status(store)
    assert balanced(total) and (total["pending"], total["dropped"]) == (0, before["pending"]) and before["pending"] > 5
    assert f"killed {before['pending']}" in words and not path.exists()


# --- a full disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """An empty file system of a megabyte."""
    with mounted(tmp_path / "small", "size=1m"):
        yield tmp_path / "small"


def fill(folder):
    """Leave not a page of the file system."""
    path = folder / "filler"
    with open(path, "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return path


@pytest.mark.parametrize(
    "ring, first, way",
    [(8, 8, Recording), (8, 8, AdaptedRecording), (8, 0, AdaptedRecording), (0, 8, Recording), (0, 0, Recording)],
)
def test_a_full_disk_does_not_make_the_books_old(small_disk, ring, first, way, caplog, monkeypatch):
    """`first` calls are counted in a file before the disk is full. Without any the books come into a file of their own, in
    memory."""
    monkeypatch.setattr("actordbg.capture.writer.PUBLISH_SECONDS", 0.02)
    store = Store(small_disk / "store").create()
    recording, actor = way(store, ring=ring), Actor()
    train(recording, first, actor)
    wait_for(lambda: not first or status(store)[0]["captured"] == first)
    filler = fill(small_disk)
    train(recording, 40, actor)
    wait_for(lambda: status(store)[0]["dropped"] == 40)  # while the process runs
    assert recording.close(30)
    total, words = status(store)
    assert balanced(total) and (total["calls"], total["captured"], total["dropped"]) == (first + 40, first, 40)
    assert "disk_full 40" in words and ("counters could not be published" in caplog.text) == (not first)
    assert bool(recover.find_rings(store)) == (not first), "the ring stays where nothing else has the counts"
    filler.unlink()
    recovered(store)
    assert status(store)[0] == total and not recover.find_rings(store)
    assert not list(small_disk.rglob(".tmp-*"))


def test_where_no_counters_could_be_written_status_says_why_and_at_the_end_they_are_if_there_is_room_again(
    small_disk, monkeypatch
):
    monkeypatch.setenv("ACTORDBG_RING_DIR", str(small_disk / "rings"))
    store = Store(small_disk / "store").create()
    recording = Recording(store, ring=0)
    filler = fill(small_disk)
    train(recording, 40, Actor())
    wait_for(lambda: "No process has reported yet: start the job. the store's disk is full" in " ".join(status(store)[1].split()))
    wait_for(lambda: recording.ledger.pending == 0)
    filler.unlink()
    assert recording.close(30) and not recover.find_rings(store)
    (data,) = map(read_counters, store.counters.rglob("*.json"))
    assert (data["calls"], data["state"], data["dropped"]) == (40, "ended", {"disk_full": 40})


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_full_again_and_again_is_told_of_once_a_minute(small_disk, caplog, writer):
    store, clock = Store(small_disk / "store").create(), [0.0]
    recording, actor = Recording(store, writer=writer), Actor()
    recording.recorder.notices._clock = lambda: clock[0]

    def lost(calls):
        """After so many calls, how often it was said that a dump was lost."""
        for seed in range(calls):
            recording.forward(actor, torch.randint(0, 128_000, (4, 3000), generator=torch.Generator().manual_seed(seed)))
        wait_for(lambda: recording.ledger.pending == 0)
        assert caplog.text.count("counters could not be published") <= 1
        return caplog.text.count("a dump was lost")

    assert lost(60) == 1 and 0 < (kept := recording.ledger.captured) < 60
    for path in store.iter_dumps():
        path.unlink()
    assert lost(5) == 1 and recording.ledger.captured == kept + 5, (
        "there is room again: recording continues, and says nothing more"
    )
    clock[0] += 100  # a minute later it is news when the disk is full once more
    assert lost(60) == 2
    left = list(store.iter_dumps())
    assert all(payload.load(path).record.seq_len == 3000 for path in left) and len(left) == recording.ledger.captured - kept
    left[0].unlink()  # room for the last counters
    assert recording.close(30)
    total, _ = status(store)
    assert balanced(total) and total["calls"] == 125 and recording.recorder.stray == 0


# --- faults drawn at random -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_soak_keeps_exact_books():
    """`make soak` is the long one. In a process of its own, which looks at its memory: nothing comes to stay there."""
    command = [sys.executable, str(SUPPORT / "soaking.py"), "1600"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]), "OMP_NUM_THREADS": "1"}
    done = run_program(command, env=environment)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json_of(done)
    assert told["calls"] >= 800 and told["calls_of_the_long_life"] == 800
