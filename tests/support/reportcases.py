"""Replays made up for the report's tests: every figure is chosen, so every expected figure can be worked out by hand."""

from catalogcases import append, write_spec

from actordbg.config.replay_config import ReplayConfig
from actordbg.records.replay_record import ReplayInput, ReplaySpec, ResultRecord
from actordbg.replay.replay_data import ReplayData

NOW = "2025-06-19T06:00:00.000000Z"


def dump_id(index):
    return f"20250619T0526{index:02d}.430740Z-{index:06d}-4711-{index:08x}"


def given(index, seq_len, rank=0, batch_size=2):
    """An input whose real tokens are exactly its seq_len (half of 2 x seq_len)."""
    return ReplayInput(dump_id(index), f"dumps/run/rank0000/{dump_id(index)}", rank, batch_size, seq_len, seq_len)


def result(index, replay_id="r1", **figures):
    """A passed result that started at second `index`, unless `figures` say otherwise."""
    values = {
        "status": "passed", "slot": index, "started_at": f"2025-06-19T05:30:{index:02d}.000000Z", "forward_s": 1.0,
        "backward_s": 2.0, "peak_memory_bytes": 2**30, "logprob_count": 10, "logprob_mean": -2.0, "logprob_min": -9.0,
        "logprob_max": -0.5, "nonfinite": 0, "output_digest": f"digest-{index}",
    }  # fmt: skip
    return ResultRecord(replay_id, dump_id(index), **(values | figures))


def replay(
    inputs,
    results,
    replay_id="r1",
    status="complete",
    **resolved,
):
    """A replay that asked for nothing in particular, and resolved to sdpa in float32 unless `resolved` says otherwise."""
    spec = ReplaySpec(replay_id, "2025-06-19T05:30:00.000000Z", ReplayConfig(), tuple(inputs), where="seq_len>100",
                      command="actordbg replay --where 'seq_len>100'", versions={"torch": "2.13.0"})  # fmt: skip
    known = {"model": "tiny", "backend": "plain", "dtype": "fp32", "attn": "sdpa", "packing": False, "compile": False}
    return ReplayData(spec, known | resolved, status, tuple(results))


def keep(store, data):
    """Write a replay as supervisor and worker would, and return its id."""
    folder = write_spec(store, data.spec)
    append(folder / "rank0.jsonl", {"event": "ready", "pid": 1, "attempt": 1, "resolved": data.resolved}, *data.results)
    append(folder / "supervisor.jsonl", {"event": "finished", "status": data.status})
    return data.spec.replay_id


def said_once(verdict):
    """Whether no line under the first says what the first says: it neither equals nor contains it, nor the clause of the finding."""
    assert verdict is not None
    first = verdict.findings[0]
    clause = first.said if first.what == first.said else verdict.brief
    return not any(verdict.brief in line or clause in line or line in verdict.brief for line in verdict.details)
