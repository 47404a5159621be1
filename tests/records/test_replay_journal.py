"""Journals: what was written is read, whatever crashed in the middle of a line."""

import errno
import json
import os
import sys

import catalogcases as cases
import pytest

from actordbg.catalog.indexer import refresh
from actordbg.catalog.query import results_for
from actordbg.records.journal import Journal, Tail, read_events, read_results
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.records.replay_record import ReplaySpec, ResultRecord


def test_a_tail_gives_each_complete_event_once(tmp_path):
    path = tmp_path / "rank0.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    journal = Journal(path)
    journal.append("start", dump_id="a")
    assert tail.poll() == [{"event": "start", "dump_id": "a"}]
    with open(path, "ab") as file:
        file.write(b'{"event": "st')
    assert tail.poll() == []
    with open(path, "ab") as file:
        file.write(b'art", "dump_id": "b"}\n')
    assert tail.poll() == [{"event": "start", "dump_id": "b"}]
    assert tail.poll() == []


def test_a_line_that_a_full_disk_cut_is_an_error_and_does_not_spoil_the_next(tmp_path, monkeypatch):
    journal, write, room = Journal(tmp_path / "rank0.jsonl"), os.write, 10

    def full(descriptor, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "write", full)
        journal.append("start", dump_id="a")
    journal.append("start", dump_id="b")
    assert [event.get("dump_id") for event in read_events(tmp_path / "rank0.jsonl")] == ["b"]


def test_of_several_results_for_a_dump_the_last_one_counts_whichever_file_it_is_in(tmp_path):
    for name, status, second in (("supervisor", "crashed", 2), ("rank0", "passed", 1), ("rank0", "hung", 3)):
        record = ResultRecord("r", "d", status, finished_at=f"2025-01-01T00:00:0{second}.000000Z")
        Journal(tmp_path / f"{name}.jsonl").append("end", **record.to_dict())
        assert read_results(tmp_path)["d"].status == ("hung" if second == 3 else "crashed")


GOOD = {
    "event": "end",
    "replay_id": "r",
    "dump_id": "good",
    "status": "passed",
    "finished_at": "2025-01-01T00:00:02.000000Z",
}


def end(**fields):
    """The good result as a line, but for these fields."""
    return json.dumps(GOOD | fields).encode() + b"\n"


LINES = {
    "a line that was cut, and closed by the next writer": (end()[:-10] + b"\n", 1),
    "no JSON": (b"\xff\xfe\n", 1),
    "no event": (b'{"status": "passed"}\n', 1),
    "no status": (end(status=None), 1),
    "a number that is too large": (end(tokens=2**63), 1),
    "a list for a number": (end(loss=[1]), 1),
    "half of a surrogate pair": (end(error="\ud800"), 1),
    "an attempt that is not a number": (end(attempt="two"), 1),
    "a nest without end": (b"[" * 100_000 + b"\n", 1),
    "an event of a newer version": (b'{"event": "checkpoint", "at": 7}\n', 0),
    "fields of a newer version": (end(dump_id="newer", watts=300), 0),
    "an earlier attempt that ended at the same time": (end(attempt=0, status="hung"), 0),
    "an earlier end": (end(finished_at="2025-01-01T00:00:01.000000Z", status="hung"), 0),
}


@pytest.mark.parametrize("case", LINES)
def test_the_catalog_reads_a_journal_as_the_replay_does(store, case):
    line, skipped = LINES[case]
    folder = cases.write_spec(store, cases.spec("r", []))
    (folder / "rank0.jsonl").write_bytes(end() + line)
    found = read_results(folder)
    summary = refresh(store)
    assert {one.dump_id: one for one in results_for(store, "r")} == found
    assert found["good"].status == "passed"
    assert summary.skipped_lines == skipped
    if case == "fields of a newer version":
        assert found["newer"].extra == {"watts": 300}
    with open(folder / "rank0.jsonl", "ab") as file:
        file.write(b'\n{"event": "finished", "status": "complete"}\n')
    refresh(store)
    assert {one.dump_id: one for one in results_for(store, "r")} == read_results(folder)


def test_a_worker_without_msgspec_reads_its_specification(monkeypatch):
    spec = cases.spec("r", [])
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.setitem(sys.modules, "msgspec.json", None)
    assert ReplaySpec.from_json(spec.to_json()) == spec


def test_what_a_record_does_not_say_is_there_when_it_is_read_and_written():
    cell = {"index": 0, "name": "n", "settings": {}, "status": "passed", "config": {}}
    said = {"matrix_id": "m", "created_at": "t", "status": "running", "axes": {}, "cells": [cell], "dump_ids": []}
    read = MatrixRecord.from_json(json.dumps({"format": 1} | said))
    whole = MatrixRecord(**said | {"cells": (MatrixCell(**cell),), "dump_ids": ()})
    assert read.to_json() == whole.to_json()
    assert vars(read) == vars(whole) and vars(read.cells[0]) == vars(whole.cells[0])
