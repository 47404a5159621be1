"""The writer process writes what the thread would write, and whatever becomes of it, no call is lost and the books are exact."""

import os
import signal
import sys

import pytest
import torch
from capturekit import Recording, balanced
from commandline import invoke
from deathcases import counters, folder, recovered
from victims import inputs, is_of_seed, wait_for

from actordbg.capture import writer
from actordbg.capture.writer_process import SlotWriter
from actordbg.store import payload
from actordbg.store.layout import Store

__all__ = ["folder"]
pytestmark = pytest.mark.slow

OWN = ("dump_id", "timestamp", "monotonic_ns", "instance", "payload_sha256")
"""What two recordings of one call do not share: a payload names its dump."""


class Actor(torch.nn.Module):
    def forward(self, sequences, action_mask=None, attention_mask=None, sizes=None, **more):
        return sequences


def odd_calls():
    """Calls that are stored in every form that there is, and arguments that are not two calls' own."""
    ids = torch.arange(24).view(2, 12)
    forms = [
        ids, -ids, ids * 2_000, ids * 3_000_000, ids << 40, ids.int(), ids.short(), ids.bool(), ids.t(), ids[:, ::2], ids[:0], ids[:1].expand(3, 12),
        ids.float(), (ids > 3).bfloat16(), ids.bfloat16(), -(ids * 0.0), ids.to(torch.float8_e4m3fn), ids.double()[0, 0], ids.unfold(1, 4, 2),
    ]  # fmt: skip
    calls = [{"sequences": ids, "pixel_values": form} for form in forms]
    calls += [inputs(seed) for seed in range(24)]
    return [
        *calls,
        {"sequences": ids, "sizes": [1, {"a": 0.5}]},
        {"sequences": ids, "mood": "good"},
        {"sequences": ids, "odd": object()},
    ]


def written(store, monkeypatch, kind):
    recording = Recording(store, writer=kind)
    if kind == "process":
        monkeypatch.setattr(writer.Writer, "_describe", lambda *_: pytest.fail("the thread encodes"))
    actor = Actor()
    for call in odd_calls():
        recording.forward(actor, **call)
    dumps = recording.dumps()
    assert recording.recorder.writer.kind == kind and balanced(recording.ledger)
    assert recording.ledger.captured == recording.ledger.calls == len(dumps) == len(odd_calls())
    return dumps


def test_both_writers_write_the_same(folder, monkeypatch):
    ours, theirs = (written(Store(folder / kind).create(), monkeypatch, kind) for kind in ("thread", "process"))
    for one, other in zip(ours, theirs, strict=True):
        different = {name for name, value in vars(one.record).items() if value != getattr(other.record, name)}
        assert different <= set(OWN), (different, one.record, other.record)
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert tensor.dtype == other.tensors[name].dtype and tensor.stride() == other.tensors[name].stride()
            assert torch.equal(tensor.double(), other.tensors[name].double())


@pytest.mark.parametrize("what", ["killed", "cannot be started"])
def test_without_a_writer_process_the_thread_writes_and_status_says_so(folder, monkeypatch, what):
    store = Store(folder / "store").create()
    if what == "cannot be started":
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
    recording = Recording(store, writer="process")
    actor = Actor()
    for seed in range(10):
        recording.forward(actor, **inputs(seed))
    ledger = recording.ledger
    wait_for(lambda: ledger.captured == 10)
    if what == "killed":
        os.kill(recording.recorder.writer._scribe._process.pid, signal.SIGKILL)
    for seed in range(10, 20):
        recording.forward(actor, **inputs(seed))
    dumps = recording.dumps()
    assert balanced(ledger) and ledger.captured == 20 and ledger.dropped == {}
    assert all(is_of_seed(dump, seed) for seed, dump in enumerate(dumps))
    told = invoke(store, "dump status")
    assert "no writer process and writes in a thread: " in " ".join(told.stdout.split()), told.stdout


def test_what_a_writer_process_published_before_time_was_over_is_captured(folder):
    """Its answer comes for a whole batch: without it, what is a file already counted as waiting in the ring."""
    store = Store(folder / "store").create()
    recording = Recording(store, writer="process")
    actor, ids = Actor(), torch.randint(0, 1 << 40, (2, 400_000))
    recording.forward(actor, ids)
    ledger = recording.ledger
    wait_for(lambda: ledger.captured == 1)
    scribe = recording.recorder.writer._scribe
    for _ in range(8):
        recording.forward(actor, ids)
    wait_for(lambda: len(list(store.iter_dumps())) > 3)
    os.kill(scribe._process.pid, signal.SIGSTOP)
    assert recording.recorder.close(2.0) and scribe._process.wait(60) == -signal.SIGKILL
    published = len(list(store.iter_dumps()))
    assert 3 < published < 9 and (ledger.captured, ledger.pending, ledger.dropped) == (published, 9 - published, {})
    assert ledger.bytes == sum(path.stat().st_size for path in store.iter_dumps())
    recovered(store)
    (data,) = counters(store).values()
    assert data["captured"] == data["calls"] == len(list(store.iter_dumps())) == 9 and data["pending"] == 0


def test_a_slot_that_belongs_to_another_call_by_now_is_not_published(folder):
    store = Store(folder / "store").create()
    recording = Recording(store)
    recording.forward(Actor(), **inputs(3))
    ring = recording.ring
    (entry,) = ring.running or list(ring._recent)
    request = {"ring": str(ring.path), "store": str(folder / "other"), "versions": {}}
    slots = [[entry.slot, entry.sequence], [entry.slot, entry.sequence + 1], [entry.slot + 1, entry.sequence]]
    answer = SlotWriter(str(ring.path)).answer({**request, "slots": slots})
    assert answer[1:] == [None, None] and is_of_seed(payload.load(answer[0][0]), 3)
    assert recording.close()
