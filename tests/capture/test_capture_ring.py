"""The ring in a process that lives: threads, nesting, what does not fit, and books for more runs than there is room for."""

import random
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from capturekit import Empty, Recording, SignatureH, balanced, ids
from victims import wait_for

from actordbg.capture.hook import wrap
from actordbg.capture.recorded_call import Item
from actordbg.capture.ring import CHUNK, Arena, Ring
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats.recording_reading import RingFile, read_ring
from actordbg.formats.ringfile import DATA, MAX_LEDGERS, slot_check
from actordbg.records.run_files import read_counters
from actordbg.store import payload
from actordbg.store.layout import Store


class Calling(Empty):
    """An actor whose forward does what it is given."""

    def forward(self, sequences, inside=None):
        return inside() if inside is not None else sequences


def live(recording):
    """The inputs that are in flight now, as `dump recover --live` finds them."""
    ring = recording.ring
    (report,) = recover(recording.store, [ring.path], live=True)
    assert report.problem is None
    found = [dump for dump in report.dumps if dump.recovered == "in_flight"]
    return [payload.load(recording.store.root / dump.path) for dump in found]


def in_threads(work, calls):
    """`work` with each of these arguments, all at once."""
    threads = [threading.Thread(target=work, args=given) for given in calls]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)


def test_nested_and_recursive_calls_are_in_flight_together(store):
    recording, actor, other = Recording(store, every=0, triggers=("nan",)), Calling(), Calling()
    forward = wrap(Calling.forward, recording.slot)
    seen = []

    def look():
        seen.append(sorted(int(dump.tensors["sequences"][0, 0]) for dump in live(recording)))
        return torch.zeros(1)

    def inner():
        for n in range(20):
            forward(other, torch.full((1, 4), 100 + n))
        return forward(actor, torch.full((1, 4), 2), look)

    forward(actor, torch.full((1, 4), 1), lambda: forward(other, torch.full((1, 4), 7), inner))
    assert seen == [[1, 2, 7]]
    assert live(recording) == []
    assert recording.close() and all(balanced(ledger) for ledger in recording.ledgers)


@pytest.mark.slow
def test_threads_call_and_raise_while_others_are_inside(store):
    recording, actor = Recording(store), Calling()
    forward, held, go = wrap(Calling.forward, recording.slot), threading.Event(), threading.Event()

    def wait_inside():
        held.set()
        assert go.wait(30)

    waiting = threading.Thread(target=forward, args=(actor, torch.full((1, 4), 999), wait_inside))
    waiting.start()
    assert held.wait(30)

    def work(first):
        for n in range(100):
            if n % 10:
                forward(actor, torch.full((1, 4), first + n))
                continue
            with pytest.raises(ZeroDivisionError):
                forward(actor, torch.full((1, 4), first + n), lambda: 1 // 0)

    in_threads(work, [(1000 * n,) for n in range(1, 5)])
    assert 999 in [int(dump.tensors["sequences"][0, 0]) for dump in live(recording)]
    go.set()
    waiting.join()
    ledger = recording.ledger
    assert recording.close() and balanced(ledger) and ledger.calls == ledger.captured == 401


def test_threads_that_meet_an_actor_at_once_share_its_books(store):
    other = SignatureH()
    for trial in range(20):
        recording, actor, barrier = Recording(store, run=f"r{trial}"), Calling(), threading.Barrier(8)
        recording.forward(other, ids())  # the first call of a process waits for the switch; those beside it are not recorded

        def call(barrier, recording, actor):
            barrier.wait()
            recording.forward(actor, ids())

        in_threads(call, [(barrier, recording, actor)] * 8)
        assert [ledger.calls for ledger in recording.ledgers] == [1, 8] and recording.close()


def test_a_job_with_more_runs_than_books_keeps_exact_books_for_each_and_a_run_that_comes_back_goes_on_counting(store):
    recording, actor = Recording(store), SignatureH()
    for n in (*range(2 * MAX_LEDGERS), 0):
        recording.set(run=f"night{n}")
        for seed in range(1 + n % 2):
            recording.forward(actor, ids(seed=seed))
        wait_for(lambda: not any(ledger.pending for ledger in recording.ledgers))
        recording.recorder.writer._publish("on", heartbeat=True)
    assert 1 <= len(read_ring(recording.ring.path).books) <= 2 and recording.ledgers[0].book >= 0
    assert recording.close() and all(balanced(ledger) for ledger in recording.ledgers)
    books = {path.parent.name: read_counters(path)["captured"] for path in store.counters.rglob("[!.]*.json")}
    assert books == {f"night{n}": 1 + n % 2 for n in range(2 * MAX_LEDGERS)} | {"night0": 2}


def test_a_kill_at_any_line_that_closes_a_call_leaves_exact_books(store, tmp_path, monkeypatch):
    """Meanwhile the training thread has counted a call that it has not copied yet: nobody may take one for the other."""
    recording, captured, moments = Recording(store, ring_bytes=CHUNK, capacity=CHUNK), Item.captured, dict[bytes, None]()
    path, actor = recording.ring.path, SignatureH()

    def killed(frame, event, argument):
        moments[path.read_bytes()] = None
        return killed

    def traced(item, *given):
        if item.number == 2:
            item.ledger.open(item.control, None)
            sys.settrace(killed)
        captured(item, *given)
        sys.settrace(None)

    monkeypatch.setattr(Item, "captured", traced)
    for seed in range(3):
        recording.forward(actor, ids(seed=seed))
    recording.close()
    for n, ring in enumerate(moments):
        copy = Store(shutil.copytree(store.root, tmp_path / f"killed{n}"))
        (copy.root / path.name).write_bytes(ring)
        (report,) = recover(copy, [copy.root / path.name])
        (books,) = map(read_counters, copy.counters.rglob("[!.]*.json"))
        assert report.removed and len(list(copy.iter_dumps())) == 3
        assert (books["calls"], books["captured"], books["dropped"], books["pending"]) == (4, 3, {"killed": 1}, 0), n
    assert len(moments) > 3


def test_books_are_in_a_file_while_one_ring_replaces_another(store, monkeypatch):
    recording, remove, seen = Recording(store), Ring.remove, list[int]()
    recording.forward(SignatureH(), ids())
    recording.recorder.watch.stop()  # it would look at the switch, too

    def removed(ring):
        seen.extend(books.counts[0] for path in find_rings(store) for books in read_ring(path).books.values())
        remove(ring)

    monkeypatch.setattr(Ring, "remove", removed)
    recording.set(ring_bytes=CHUNK)
    assert seen == [1, 1]
    assert recording.close() and balanced(recording.ledger) and not find_rings(store)


def test_calls_of_nothing_and_of_empty_tensors_are_kept_and_an_input_larger_than_the_ring_is_dropped(store):
    recording, actor = Recording(store, ring_bytes=2**20, capacity=2**20), Calling()
    recording.forward(actor, ids(4, 200_000))  # 6.4 MB
    recording.forward(actor, torch.zeros(0, 5, dtype=torch.int64))
    recording.forward(actor, torch.zeros(3, 0, dtype=torch.int64))
    recording.forward(actor, None)
    recording.forward(actor, torch.tensor(5))
    assert len(read_ring(recording.ring.path).slots) == 4
    shapes = [{name: tuple(t.shape) for name, t in dump.tensors.items()} for dump in recording.dumps()]
    assert shapes == [{"sequences": (0, 5)}, {"sequences": (3, 0)}, {}, {"sequences": ()}]
    assert recording.ledger.dropped == {"queue_full": 1} and balanced(recording.ledger)


def test_more_kinds_of_calls_than_the_ring_has_room_for(store):
    recording, actor = Recording(store), Calling()
    forward = wrap(Calling.forward, recording.slot)
    long = 10**1200
    for n in range(120):
        actor.temperature = float(n)
        recording.forward(SignatureH() if n % 2 else actor, torch.full((1, 4), n))
        with pytest.raises(TypeError):
            forward(actor, torch.full((1, 4), n), long + n)
    ring = recording.ring
    assert DATA - ring._kinds_end < 5000
    last = read_ring(ring.path).slots[-1]
    assert last.kind["fields"]["arguments"]["inside"] == long + 119
    assert recording.close(60) and all(balanced(ledger) for ledger in recording.ledgers)
    assert len(list(store.iter_dumps())) == 240


def test_what_stopped_a_ring_is_raised_even_where_its_file_is_gone(tmp_path, monkeypatch):
    def interrupted(unfinished, path):
        unfinished.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ring.create(tmp_path, "r", {}, 0, 1000)


def test_extents_never_overlap_whatever_is_taken_and_given_back():
    import mmap

    memory = mmap.mmap(-1, DATA + 8 * CHUNK)
    arena, dice = Arena(memory, DATA, DATA + CHUNK, lambda end: None), random.Random(1)
    held = {}
    for _ in range(20_000):
        if held and dice.random() < 0.5:
            offset = dice.choice(list(held))
            arena.give_back(offset)
            del held[offset]
        else:
            size = 64 * dice.randrange(1, 4000 if dice.random() < 0.1 else 40)
            offset = arena.take(size)
            if offset is None:
                continue
            assert offset >= DATA and offset + size <= arena.limit <= len(memory)
            assert all(end <= offset or offset + size <= first for first, end in ((o, o + n) for o, n in held.items()))
            held[offset] = size
        if dice.random() < 0.01:
            arena.trim()


def test_slots_are_read_and_a_changed_bit_is_seen(store, tmp_path):
    assert slot_check(0, 1, DATA, 4096, 86016, 99, 8, (3, -1, 2**62)) == 1_361_749_812, "alike in Python 3.8 to 3.13"
    recording = Recording(store)
    for seed in range(3):
        recording.forward(SignatureH(), ids(2, 9, seed))
    changed, path = bytearray(recording.ring.path.read_bytes()), tmp_path / "x.ring"
    assert recording.close()
    path.write_bytes(changed)
    wanted = read_ring(path).slots
    changed[wanted[1].offset + 9] ^= 1
    path.write_bytes(changed)
    found = read_ring(path)
    assert found.slots == [wanted[0], wanted[2]] and len(found.damaged) == 1


ENDED_BY_RAY = {
    "it says so itself": ("python-core-worker-ab12_11.log", "Disconnect, exit_type=INTENDED_SYSTEM_EXIT", True),
    "it did not answer": (
        "raylet.out",
        "Killing leased worker because its owner died. worker_id=ab12 owner_worker_id=01ff",
        True,
    ),
    "ray.kill, and no answer": ("raylet.out", "Disconnecting worker, graceful=false, disconnect_type=1, worker_id=ab12", True),
    "it crashed": ("raylet.out", "Disconnecting worker, graceful=false, disconnect_type=0, worker_id=ab12", False),
    "its worker was ended": (
        "raylet.out",
        "Killing leased worker because its owner died. worker_id=cd34 owner_worker_id=ab12",
        False,
    ),
    "no memory was left": ("raylet.out", "Disconnecting worker, graceful=false, disconnect_type=4, worker_id=ab12", False),
}
"""Lines of Ray 2.55's logs."""


@pytest.mark.parametrize("why", ENDED_BY_RAY)
def test_whom_ray_ended_on_purpose_was_not_killed_also_if_ray_had_to_kill_it(tmp_path, why):
    log, line, ended = ENDED_BY_RAY[why]
    (tmp_path / log).write_text(f"[2026-11-30] {line} job_id=01\n")
    facts = {"pid": 11, "stderr": str(tmp_path / "worker-ab12-01-11.err")}
    assert RingFile(tmp_path / "ring", facts, alive=False).ended_by_ray is ended
