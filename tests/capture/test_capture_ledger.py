"""The books: which calls are wanted, that every call is in exactly one of them, and the newest dumps of a run within a size."""

import threading
import time

import pytest
import torch
from capturekit import Recording, SignatureA, SignatureH, balanced, ids
from victims import wait_for

from actordbg.capture import writer
from actordbg.capture.control import Control
from actordbg.capture.ledger import Identity, Ledger, Rotation
from actordbg.capture.ring import Ring
from actordbg.capture.switch_file import write_control
from actordbg.dumps.recover import find_rings
from actordbg.formats.ringfile import MAX_LEDGERS
from actordbg.formats.weight_hashes import StepWeights
from actordbg.records.run_files import read_counters


def ledger(rank=0):
    return Ledger(Identity("r", rank, 4, "host", 42, "actor0-abcd1234"))


def control(generation=1, **limits):
    return Control(True, "r", "2026-11-20T12:00:00.000000Z", generation, **limits)  # type: ignore[arg-type]


def reasons(books, switch, seq_lens):
    found = []
    for seq_len in seq_lens:
        _, reason = books.open(switch, seq_len)
        if reason is None:
            books.capture(100)
        found.append(reason)
    return found


@pytest.mark.parametrize(
    "limits, seq_lens, expected",
    [
        ({}, [1, 2, 3], [None] * 3),
        ({"every": 2, "min_seq_len": 5}, [1, 9, 1, 9, 1, 9], ["seq_len", None, "seq_len", "every", "seq_len", None]),
        ({"min_seq_len": 10}, [9, 10], ["seq_len", None]),
        ({"ranks": (0, 1)}, [9], ["ranks"]),
        ({"ranks": (2,), "max_bytes": 0}, [1], ["max_bytes"]),
        ({"max_dumps": 0}, [1], ["max_dumps"]),
    ],
)
def test_a_limit_says_which_calls_are_wanted(limits, seq_lens, expected):
    assert reasons(ledger(2), control(**limits), seq_lens) == expected


def test_max_dumps_counts_what_is_queued_and_starts_anew_with_the_next_enable():
    books, switch = ledger(), control(max_dumps=2)
    assert [books.open(switch, 1)[1] for _ in range(3)] == [None, None, "max_dumps"]
    books.drop("write_error")  # a lost one makes room
    assert books.open(switch, 1)[1] is None
    assert [books.open(control(2, max_dumps=1), 1)[1] for _ in range(2)] == [None, "max_dumps"]


def test_counters_are_published_and_read_and_tried_again_where_that_fails(store):
    books, path = ledger(3), store.counters / "r" / "0003-host-42-actor0-abcd1234.json"

    def published(state):
        books.publish(store, state, {"queue_bytes": 17})
        return read_counters(path)

    for _ in range(2):
        books.open(control(), 5)
    books.drop("disk_full", "OSError: no space")
    store.counters.write_text("in the way")
    with pytest.raises(OSError):
        published("on")
    store.counters.unlink()
    assert books.changed
    found = published("on")
    told = {
        "calls": 2,
        "captured": 0,
        "pending": 1,
        "queue_bytes": 17,
        "dropped": {"disk_full": 1},
        "last_error": "OSError: no space",
    }
    assert not books.changed and {**found, **told, "state": "on"} == found and published("off")["state"] == "off"
    books.closed = True
    assert published("on")["state"] == "on"  # one call is still in the queue
    books.capture(5)
    assert published("on")["state"] == "ended"


def test_a_ring_that_is_being_made_when_the_process_ends_is_removed(store, monkeypatch):
    making, create = threading.Event(), Ring.create

    def slowly(*args):
        making.set()
        time.sleep(0.2)
        return create(*args)

    recording = Recording(store)
    monkeypatch.setattr(Ring, "create", slowly)
    recording.recorder.watch.start()
    recording.generation += 1
    write_control(store, Control(True, "r", "2026-11-20T12:00:00.000000Z", 2, ring_bytes=2**20, free_floor_bytes=0))
    assert making.wait(60) and recording.close()
    thread = recording.recorder.watch._thread
    thread.join(60)
    assert find_rings(store) == [] and recording.ring._descriptor is None


def test_an_actor_that_is_gone_has_its_books_closed_and_leaves_room_for_others(store, monkeypatch):
    for seconds in ("PUBLISH_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(writer, seconds, 0.01)
    recording = Recording(store)
    for number in range(MAX_LEDGERS + 2):
        actor = SignatureA()
        recording.forward(actor, ids(2, 9, number))
        assert recording.ledgers[-1].book >= 0, "what is counted in the ring outlives a kill"
        del actor
        wait_for(lambda: not recording.recorder.writer.watched())
    found = [read_counters(path) for path in store.counters.rglob("*.json")]
    assert [(data["state"], data["calls"], data["captured"]) for data in found] == [("ended", 1, 1)] * (MAX_LEDGERS + 2)
    assert recording.close(60)


class Watched(SignatureH):
    def forward(self, sequences, bad=False):
        return torch.full((2, 8), float("nan") if bad else 0.0)


def test_the_oldest_go_what_a_trigger_keeps_stays_and_the_books_say_so(store):
    recording, actor = Recording(store, keep_bytes=15_000, triggers=("nan",), before=1), Watched()
    for seed in range(30):
        recording.forward(actor, ids(2, 300, seed), seed in (5, 6))
    kept = recording.dumps()
    assert [dump.record.triggered for dump in kept[:3]] == ["before", "nan", "nan"] and 6 <= len(kept) < 15
    numbers = [4, 5, 6, *range(33 - len(kept), 30)]
    assert all(torch.equal(dump.tensors["sequences"], ids(2, 300, n)) for dump, n in zip(kept, numbers, strict=True))
    sizes, ledger = [path.stat().st_size for path in store.iter_dumps()], recording.ledger
    assert sum(sizes[3:]) <= 15_000 < sum(sizes[3:]) + max(sizes)
    assert balanced(ledger) and ledger.captured == 30, "captured says what was written, rotated what made room since"
    assert ledger.rotated == 30 - len(kept)
    assert abs(ledger.rotated_bytes + sum(sizes) - ledger.bytes) < 200, "the pinned file has a few bytes more by now"


def test_actors_share_the_size_the_newest_stays_however_large_and_a_vanished_file_is_no_trouble(store, tmp_path):
    folder = store.counters / "r"
    folder.mkdir(parents=True)
    for rank in range(3):
        (folder / f"{rank:04d}-host-1-x.json").write_text("{}")
    books = ledger()
    rotation = Rotation(store, books)
    for n in range(10):
        (tmp_path / str(n)).write_bytes(b"x" * 100)
        rotation.add(tmp_path / str(n), 100)
    (tmp_path / "0").unlink()
    rotation.apply(1200)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["6", "7", "8", "9"]
    assert (rotation.bytes, books.rotated) == (400, 6)
    rotation.add(tmp_path / "9", 10**9)
    rotation.apply(10)
    assert (tmp_path / "9").exists() and list(rotation.files) == [tmp_path / "9"]


def test_weights_of_a_step_go_with_the_last_dump_that_has_them(store, tmp_path):
    """Two dumps a step, of which one of the first step's is pinned: the files of weights count for the size."""
    store.counters.joinpath("r").mkdir(parents=True)
    rotation = Rotation(store, ledger())
    for step in range(4):
        weights = StepWeights(path=tmp_path / f"w{step}", size=50)
        weights.path.write_bytes(b"x" * 50)
        for n in range(2):
            dump = tmp_path / f"{step}-{n}"
            dump.write_bytes(b"x" * 100)
            rotation.hold(dump, weights)
            if (step, n) != (0, 1):  # that one is pinned
                rotation.add(dump, 100)
    assert rotation.bytes == 7 * 100 + 4 * 50
    rotation.apply(400)
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert left == ["0-1", "3-0", "3-1", "w0", "w3"] and rotation.bytes == 2 * 100 + 2 * 50
