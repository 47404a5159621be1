"""Journals: what was written is read, whatever crashed in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from actordbg.formats.journal import Journal, Tail, read_events, read_results
from actordbg.formats.replay_record import ResultRecord


def test_a_tail_gives_each_complete_event_once(tmp_path: Path) -> None:
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


def test_a_line_that_a_crash_cut_off_is_skipped_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b'{"event": "start"}\n{"event": "en')
    Journal(path).append("boot", pid=1)
    path.write_bytes(path.read_bytes() + b'[1, 2]\n\n{"no": "event"}\n\xff\xfe\n')
    assert [event["event"] for event in read_events(path)] == ["start", "boot"]


def test_of_several_results_for_a_dump_the_last_one_counts_whichever_file_it_is_in(tmp_path: Path) -> None:
    def result(status: str, finished_at: str) -> ResultRecord:
        return ResultRecord("r", "d", status, finished_at=finished_at)

    Journal(tmp_path / "supervisor.jsonl").append("end", **result("crashed", "2025-01-01T00:00:02.000000Z").to_dict())
    Journal(tmp_path / "rank0.jsonl").append("end", **result("passed", "2025-01-01T00:00:01.000000Z").to_dict())
    assert read_results(tmp_path)["d"].status == "crashed"
    Journal(tmp_path / "rank0.jsonl").append("end", **result("passed", "2025-01-01T00:00:03.000000Z").to_dict())
    assert read_results(tmp_path)["d"].status == "passed"


def test_journals_are_for_their_owner_only(tmp_path: Path) -> None:
    Journal(tmp_path / "rank0.jsonl").append("boot")
    assert (tmp_path / "rank0.jsonl").stat().st_mode & 0o777 == 0o600
