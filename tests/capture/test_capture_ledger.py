"""The books: which calls are wanted, and that every call is in exactly one of them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from capturekit import Recording, SignatureA, balanced, ids

from actordbg.base.errors import CorruptDump
from actordbg.capture import writer
from actordbg.capture.control import Control, write_control
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.ring import Ring
from actordbg.dumps.recover import find_rings
from actordbg.formats.recording_reading import read_counters
from actordbg.formats.ringfile import MAX_LEDGERS
from actordbg.store.layout import Store


def ledger(rank: int = 0) -> Ledger:
    return Ledger(Identity("r", rank, 4, "host", 42, "actor0-abcd1234"))


def control(generation: int = 1, **limits: object) -> Control:
    return Control(True, "r", "2026-11-20T12:00:00.000000Z", generation, **limits)  # type: ignore[arg-type]


def reasons(books: Ledger, switch: Control, seq_lens: list[int]) -> list[str | None]:
    found = []
    for seq_len in seq_lens:
        _, reason = books.open(switch, seq_len)
        if reason is None:
            books.capture(100)
        found.append(reason)
    return found


@pytest.mark.parametrize(
    ("limits", "seq_lens", "expected"),
    [
        ({}, [1, 2, 3], [None] * 3),
        ({"every": 3}, [9] * 5, [None, "every", "every", None, "every"]),
        ({"every": 2, "min_seq_len": 5}, [1, 9, 1, 9, 1, 9], ["seq_len", None, "seq_len", "every", "seq_len", None]),
        ({"min_seq_len": 10, "max_seq_len": 20}, [9, 10, 20, 21], ["seq_len", None, None, "seq_len"]),
        ({"ranks": (0, 1)}, [9], ["ranks"]),
        ({"ranks": (2,)}, [9], [None]),
        ({"max_bytes": 0}, [1], ["max_bytes"]),
        ({"max_dumps": 0}, [1], ["max_dumps"]),
    ],
)
def test_a_limit_says_which_calls_are_wanted(limits: dict[str, Any], seq_lens: list[int], expected: list[str | None]):
    assert reasons(ledger(2), control(**limits), seq_lens) == expected


def test_max_dumps_counts_what_is_queued_and_starts_anew_with_the_next_enable():
    books, switch = ledger(), control(max_dumps=2)
    assert [books.open(switch, 1)[1] for _ in range(3)] == [None, None, "max_dumps"]
    books.drop("write_error")  # a lost one makes room
    assert books.open(switch, 1)[1] is None
    assert [books.open(control(2, max_dumps=1), 1)[1] for _ in range(2)] == [None, "max_dumps"]


def test_max_bytes_is_never_passed():
    books, switch = ledger(), control(max_bytes=250)
    captured = 0
    for _ in range(5):
        if books.open(switch, 1)[1] is None and not books.over_max_bytes(switch, 100):
            books.capture(100)
            captured += 1
    assert captured == 2
    assert books.bytes == 200
    assert books.sampled_out == {"max_bytes": 3}
    assert balanced(books)
    assert reasons(books, control(2, max_bytes=250), [1]) == [None]


def test_calls_from_many_threads_are_counted_exactly():
    books, switch = ledger(), control(every=2)

    def work() -> None:
        for number in range(2000):
            _, reason = books.open(switch, 5)
            if reason is None:
                books.capture(1) if number % 3 else books.drop("queue_full")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert books.calls == 8000
    assert books.sampled_out == {"every": 4000}
    assert balanced(books)


def test_counters_are_published_and_read(store: Store):
    books = ledger(3)
    books.open(control(), 5)
    books.open(control(), 5)
    books.drop("disk_full", "OSError: no space")
    books.publish(store, "on", {"queue_bytes": 17})
    assert not books.changed
    path = store.counters / "r" / "0003-host-42-actor0-abcd1234.json"
    found = read_counters(path)
    assert (found["calls"], found["captured"], found["pending"], found["queue_bytes"]) == (2, 0, 1, 17)
    assert found["dropped"] == {"disk_full": 1}
    assert found["last_error"] == "OSError: no space"
    assert found["state"] == "on"
    books.publish(store, "off", {"queue_bytes": 0})
    assert read_counters(path)["state"] == "off"
    books.closed = True
    books.publish(store, "on", {"queue_bytes": 0})
    assert read_counters(path)["state"] == "on"  # one call is still in the queue
    books.capture(5)
    books.publish(store, "on", {"queue_bytes": 0})
    assert read_counters(path)["state"] == "ended"


def test_a_publication_that_fails_is_tried_again(store: Store):
    books = ledger()
    store.counters.write_text("in the way")
    with pytest.raises(OSError):
        books.publish(store, "on", {"queue_bytes": 0})
    assert books.changed


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": 1}), json.dumps({"format": 2})])
def test_damaged_counters_are_refused(store: Store, text: str):
    path = store.root / "x.json"
    path.write_text(text)
    with pytest.raises(CorruptDump):
        read_counters(path)


def test_a_ring_that_is_being_made_when_the_process_ends_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch):
    making, create = threading.Event(), Ring.create

    def slowly(*args: Any) -> Ring:
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
    assert thread is not None
    thread.join(60)
    assert find_rings(store) == [] and recording.recorder.ring is not None and recording.recorder.ring._descriptor is None


def test_an_actor_that_is_gone_has_its_books_closed_and_leaves_room_for_others(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "PUBLISH_SECONDS", 0.01)
    recording = Recording(store)
    for number in range(MAX_LEDGERS + 2):
        actor = SignatureA()
        recording.forward(actor, ids(2, 9, number))
        assert recording.ledgers[-1].book >= 0, "what is counted in the ring outlives a kill"
        del actor
        until = time.monotonic() + 60
        while recording.recorder.writer.watched():
            assert time.monotonic() < until
            time.sleep(0.01)
    found = [read_counters(path) for path in store.counters.rglob("*.json")]
    assert [(data["state"], data["calls"], data["captured"]) for data in found] == [("ended", 1, 1)] * (MAX_LEDGERS + 2)
    assert recording.close(60)
