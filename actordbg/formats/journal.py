"""A replay's journals: append-only JSON lines, one file for each writer, read while they grow.

Every process of a replay writes only its own file (`rank<N>.jsonl`, `supervisor.jsonl`) and may read the others'. A line is
one JSON object with the key `event`. It is written by a single `write` and flushed to disk before the writer goes on, so
what a crashed worker was doing is on disk: a `start` without an `end`. A line that was cut by a crash is closed by
the next writer and skipped by every reader.

    journal = Journal(folder / "rank0.jsonl")
    journal.append("start", dump_id=..., slot=0, attempt=1)

    tail = Tail(folder / "rank0.jsonl")
    for event in tail.poll(): ...           # what is new since the last poll, complete lines only

Standard library only: workers, supervisor and catalog read with this.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from actordbg.formats.replay_record import ResultRecord

Event = dict[str, Any]

SPEC = "spec.json"
SUPERVISOR = "supervisor.jsonl"
TENSORS = "tensors"


def rank_journal(folder: Path, rank: int) -> Path:
    """The journal of worker `rank` in a replay's folder."""
    return folder / f"rank{rank}.jsonl"


def rank_log(folder: Path, rank: int) -> Path:
    """Where worker `rank` sends its standard output and standard error."""
    return folder / f"rank{rank}.log"


class Journal:
    """The writer's end. One process holds it; `append` returns when the line is on disk."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._descriptor = os.open(path, flags, 0o600)
        self._close_cut_line()

    def append(self, event: str, /, **values: Any) -> None:
        """Write one event. Values must be JSON; a `ResultRecord` goes in as `**record.to_dict()`."""
        line = json.dumps({"event": event, **values}, separators=(",", ":"), allow_nan=False)
        os.write(self._descriptor, line.encode() + b"\n")
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _close_cut_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")


class Tail:
    """The reader's end: `poll` gives the complete events that were appended since the last poll. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        """New events in order; lines that are not a JSON object with an `event` are skipped."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete, newline, _ = data.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return [event for line in complete.split(b"\n") if (event := _parse(line)) is not None]

    def skip_to_end(self) -> None:
        """Forget what is there: only what comes from now on is polled."""
        self.poll()


def read_events(path: Path) -> list[Event]:
    """Every complete event of a journal; an absent file has none."""
    return Tail(path).poll()


def read_results(folder: Path) -> dict[str, ResultRecord]:
    """The result of every input that has one, by dump id. For one dump the last `end` counts, by its time."""
    results: dict[str, ResultRecord] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for event in read_events(path):
            if event["event"] != "end":
                continue
            record = result_of(event)
            before = results.get(record.dump_id)
            if before is None or record.finished_at >= before.finished_at:
                results[record.dump_id] = record
    return results


def result_of(event: Event) -> ResultRecord:
    """The ResultRecord inside an `end` event."""
    return ResultRecord.from_dict({key: value for key, value in event.items() if key != "event"})


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
