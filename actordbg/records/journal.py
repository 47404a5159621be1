"""A replay's journals: append-only JSON lines, one file for each writer, read while they grow.

Every process of a replay writes only its own file (`rank<N>.jsonl`, `supervisor.jsonl`) and may read the others'. A line is
one JSON object with the key `event`. It is written by a single `write` before the writer continues, so it outlives the process:
what a crashed worker was doing is a `start` without an `end`. It is flushed to disk at once (`append`), or by a thread while
the worker continues (`write`, see `actordbg.replay.flushing`). A crash may cut a line; the next writer closes it.

Replay, matrix, compare and catalog all read with this module, so they skip the same lines: those that are not JSON, have no
`event`, or are an `end` without a valid result. Events and fields of a newer version are kept: readers skip events that
they do not know, and `ResultRecord.extra` takes unknown fields.

    journal = Journal(folder / "rank0.jsonl")
    journal.append("start", dump_id=..., slot=0, attempt=1)

    tail = Tail(folder / "rank0.jsonl")
    for event in tail.poll(): ...           # what is new since the last poll, complete lines only

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from actordbg.formats.record_reading import strict_json
from actordbg.formats.store_files import OddFile, open_regular
from actordbg.records.replay_record import ResultRecord

Event = dict[str, Any]

SPEC = "spec.json"
SUPERVISOR = "supervisor.jsonl"
TENSORS = "tensors"
ENGINE_WAYS = "engine/"
"""Prefix of the names of tensors with a server's log-probs when asked in another way (`actordbg.actor.endpoint_session`)."""
MOST_BYTES = 2**28
"""Most bytes of a journal that are read at once (100,000 results), and of a line."""

_ENCODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_REQUIRED = {each.name for each in fields(ResultRecord) if each.default is not None}
"""Fields of a result that are never null."""


def rank_journal(folder: Path, rank: int) -> Path:
    """Return the journal's path of worker `rank` in a replay's folder."""
    return folder / f"rank{rank}.jsonl"


def rank_log(folder: Path, rank: int) -> Path:
    """Return the file that gets the standard output and standard error of worker `rank`."""
    return folder / f"rank{rank}.log"


class Journal:
    """Writer of a journal, held by one process; `append` returns when the line is on disk, `write` when others can read it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._is_cut = False
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # a crash cut the last line
            os.write(self._descriptor, b"\n")

    def append(self, event: str, /, **values: Any) -> None:
        """Write one event, and flush it. Values must be JSON; a `ResultRecord` goes in as `**record.to_dict()`."""
        self.write(event, **values)
        self.sync()

    def write(self, event: str, /, **values: Any) -> None:
        """Write one event without the flush. OSError if a full disk took only part of it."""
        left = b"\n" * self._is_cut + _ENCODE({"event": event, **values}).encode() + b"\n"
        self._is_cut = True
        while left:
            left = left[os.write(self._descriptor, left) :]
        self._is_cut = False

    def sync(self) -> None:
        """Flush all written events to disk."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class Chunk:
    """The events of a journal after an offset: complete ones, the number of skipped lines, and the `offset` to continue from.

    size, mtime_ns: bytes up to the end of the read, and the file's time. rests: whether there is more than can be read at once.
    """

    events: list[Event]
    skipped: int
    offset: int
    size: int
    mtime_ns: int
    rests: bool = False


def read_chunk(path: Path, start: int = 0) -> Chunk:
    """Read the complete lines after `start`, the `offset` of an earlier chunk. OSError if the file cannot be read."""
    with open(open_regular(path), "rb") as file:
        state = os.fstat(file.fileno())
        file.seek(start)
        data = file.read(MOST_BYTES)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == MOST_BYTES:
        raise OddFile(errno.EFBIG, f"it has a line of more than {MOST_BYTES} bytes", str(path))
    events, skipped = [], 0
    for line in data[:end].split(b"\n"):
        if event := _parse(line):
            events.append(event)
        elif line.strip():
            skipped += 1
    return Chunk(events, skipped, start + end, start + len(data), state.st_mtime_ns, len(data) == MOST_BYTES)


def read_chunks(path: Path, start: int = 0) -> Iterator[Chunk]:
    """Read all of a journal after `start`, in chunks."""
    rests = True
    while rests:
        yield (chunk := read_chunk(path, start))
        start, rests = chunk.offset, chunk.rests


class Tail:
    """Reader of a journal: `poll` returns the complete events appended since the last poll. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[Event]:
        """Return new events in order."""
        events: list[Event] = []
        with contextlib.suppress(FileNotFoundError):
            for chunk in read_chunks(self._path, self._offset):
                self._offset = chunk.offset
                events += chunk.events
        return events


def read_events(path: Path) -> list[Event]:
    """Return every complete event of a journal; an absent file has none."""
    return Tail(path).poll()


def read_results(folder: Path) -> dict[str, ResultRecord]:
    """Return the results, by dump id, from all journals of a replay's folder."""
    events = (event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path))
    return last_results(result_of(event) for event in events if event["event"] == "end")


def read_standing(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the configuration that a replay's workers reported ({} before that), and its status ("unfinished" without one)."""
    news = {event["event"]: event for event in read_events(folder / SUPERVISOR)}
    return news.get("resolved", {}).get("resolved", {}), news.get("finished", {}).get("status", "unfinished")


def last_supervisor(folder: Path) -> Event | None:
    """Return the event with the process that ran a replay last and has not finished it; None if all have."""
    events = [event for event in read_events(folder / SUPERVISOR) if event["event"] in ("supervisor", "finished")]
    return events[-1] if events and events[-1]["event"] == "supervisor" else None


def read_why(folder: Path) -> str:
    """Return why a replay ended before every input had its result, with the end of its log; "" if nothing stopped it."""
    ended = [event for event in read_events(folder / SUPERVISOR) if event["event"] == "finished"]
    return str(ended[-1].get("why") or "") if ended else ""


def last_results(records: Iterable[ResultRecord]) -> dict[str, ResultRecord]:
    """Return the effective result per dump: the last to finish; on a tie, the later attempt."""
    results: dict[str, ResultRecord] = {}
    for record in records:
        before = results.get(record.dump_id)
        if before is None or (record.finished_at, record.attempt) >= (before.finished_at, before.attempt):
            results[record.dump_id] = record
    return results


def result_of(event: Event) -> ResultRecord:
    """Return the ResultRecord inside an `end` event."""
    return ResultRecord.from_dict({key: value for key, value in event.items() if key != "event"})


def _parse(line: bytes) -> Event | None:
    try:
        event = strict_json(line, json.loads)
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return None
        if event["event"] == "end":
            _check_result(result_of(event))
    except (ValueError, TypeError, RecursionError):
        return None
    return event


def _check_result(record: ResultRecord) -> None:
    """Raise ValueError for a result with invalid values, or with values that no SQLite column can hold."""
    for name, value in vars(record).items():
        if value is None:
            if name in _REQUIRED:
                raise ValueError(f"{name} is null")
        elif isinstance(value, str):
            value.encode()
        elif name != "extra" and (not isinstance(value, (int, float)) or (isinstance(value, int) and abs(value) >= 2**63)):
            raise ValueError(f"{name} is {value!r:.60}")
    if not isinstance(record.finished_at, str) or not isinstance(record.attempt, int):
        raise ValueError("the end of a result has no time, or no attempt")
