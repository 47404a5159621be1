"""A replay's journal: lines that several programs read while they grow, and that a crash may cut anywhere."""

import json

from fuzzing import mutate_json, work_folder

from actordbg.records.journal import (
    Tail,
    last_results,
    read_chunk,
    read_chunks,
    read_events,
    read_results,
    read_standing,
    read_why,
    result_of,
)
from actordbg.records.replay_record import LAWS, LawAnswer, ResultRecord, answers_of

PARSERS = (
    read_chunk,
    read_chunks,
    read_events,
    Tail.poll,
    read_results,
    read_standing,
    read_why,
    result_of,
    ResultRecord.from_dict,
    LawAnswer.from_dict,
)
WORDS = tuple(f'"{name}":'.encode() for name in ("event", *ResultRecord.__dataclass_fields__))
_FOLDER = work_folder()


def seeds():
    result = ResultRecord(
        "20250619T052608-9f3a2c",
        "d-1",
        "passed",
        finished_at="2025-06-19T05:26:08.430740Z",
        logprob_mean=-1.5,
        extra={LAWS: [{"law": "x", "verdict": "holds"}]},
    )
    events = [
        {"event": "ready", "pid": 7, "attempt": 1, "resolved": {"dtype": "fp32"}},
        {"event": "start", "dump_id": "d-1", "slot": 0, "attempt": 1},
        {"event": "end", **result.to_dict()},
        {"event": "resolved", "resolved": {"dtype": "fp32"}},
        {"event": "finished", "status": "complete"},
    ]
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    return {"whole": lines, "cut": lines[:-30], "twice": lines[100:] + lines}


def one_input(data):
    path = _FOLDER / "supervisor.jsonl"
    path.write_bytes(data)
    chunk = read_chunk(path)
    assert 0 <= chunk.offset <= chunk.size == len(data)
    assert len(chunk.events) + chunk.skipped == sum(bool(line.strip()) for line in data[: chunk.offset].split(b"\n"))
    results = last_results(result_of(event) for event in chunk.events if event["event"] == "end")
    assert results == read_results(_FOLDER)
    for result in results.values():
        plain = result.to_dict()
        answers_of(result.extra)
        assert ResultRecord.from_dict(json.loads(json.dumps(plain))).to_dict() == plain
    read_standing(_FOLDER)
    assert isinstance(read_why(_FOLDER), str)
    assert _in_two(path, data, chunk.offset // 2) == json.dumps(chunk.events), "a tail that is asked twice sees something else"


def _in_two(path, data, cut):
    """The events as JSON, as a reader sees them that comes once in between."""
    path.write_bytes(data[:cut])
    tail = Tail(path)
    first = tail.poll()
    path.write_bytes(data)
    return json.dumps(first + tail.poll())


def mutate(data, chance, havoc):
    """One line changes, goes or comes again."""
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    lines[number : number + 1] = chance.choice(([], [lines[number]] * 2, [mutate_json(lines[number], chance, havoc)]))
    return b"\n".join(lines)
