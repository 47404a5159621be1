"""Rotation: the newest dumps of a run within a size, pinned ones beside them, and never a file that somebody else wrote."""

from __future__ import annotations

import torch
from capturekit import Recording, SignatureH, balanced, ids

from actordbg.capture.ledger import Identity, Ledger, Rotation
from actordbg.store.layout import Store


class Watched(SignatureH):
    def forward(self, sequences: torch.Tensor, bad: bool = False) -> torch.Tensor:
        return torch.full((2, 8), float("nan") if bad else 0.0)


def size_of_one(tmp_store: Store) -> int:
    recording = Recording(tmp_store)
    recording.forward(Watched(), ids(2, 300, 1))
    recording.close()
    (path,) = tmp_store.iter_dumps()
    return path.stat().st_size


def test_the_oldest_go_and_the_books_say_so(store, tmp_path):
    one = size_of_one(Store(tmp_path / "other").create())
    recording, actor = Recording(store, keep_bytes=5 * one + one // 2), Watched()
    for seed in range(20):
        recording.forward(actor, ids(2, 300, seed))
    kept = recording.dumps()
    assert 3 <= len(kept) <= 6
    newest = [dump.tensors["sequences"] for dump in kept]
    assert all(torch.equal(a, ids(2, 300, 20 - len(kept) + n)) for n, a in enumerate(newest))
    ledger = recording.ledger
    assert balanced(ledger) and ledger.captured == 20, "captured says what was written, rotated what made room since"
    assert ledger.rotated == 20 - len(kept) and ledger.rotated_bytes > ledger.rotated * one // 2


def test_what_a_trigger_keeps_stays(store, tmp_path):
    one = size_of_one(Store(tmp_path / "other").create())
    recording, actor = Recording(store, keep_bytes=3 * one, triggers=("nan",), before=1), Watched()
    for seed in range(30):
        recording.forward(actor, ids(2, 300, seed), seed in (5, 6))
    kept = recording.dumps()
    pinned = [dump for dump in kept if dump.record.pinned]
    assert [dump.record.triggered for dump in pinned] == ["before", "nan", "nan"]
    assert all(torch.equal(dump.tensors["sequences"], ids(2, 300, 4 + n)) for n, dump in enumerate(pinned))
    assert len(kept) - len(pinned) <= 4


def test_actors_share_the_size(store, tmp_path):
    folder = store.counters / "r"
    folder.mkdir(parents=True)
    for rank in range(3):
        (folder / f"{rank:04d}-host-1-x.json").write_text("{}")
    ledger = Ledger(Identity("r", 3, 4, "host", 1, "x"))
    rotation = Rotation(store, ledger)
    for n in range(10):
        path = tmp_path / str(n)
        path.write_bytes(b"x" * 100)
        rotation.add(path, 100)
    rotation.apply(1200)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["6", "7", "8", "9"]
    assert (rotation.bytes, ledger.rotated) == (400, 6)


def test_the_newest_stays_however_large_and_a_vanished_file_is_no_trouble(store, tmp_path):
    rotation = Rotation(store, Ledger(Identity("r", 0, 1, "host", 1, "x")))
    rotation.add(tmp_path / "gone", 50)
    (tmp_path / "large").write_bytes(b"x")
    rotation.add(tmp_path / "large", 10**9)
    rotation.apply(10)
    assert (tmp_path / "large").exists() and rotation.bytes == 10**9
