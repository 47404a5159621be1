"""Replays made up for the curves' tests: inputs of chosen lengths whose memory and time follow a law that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from catalogcases import append, write_spec
from reportcases import dump_id

from actordbg.config.replay_config import ReplayConfig
from actordbg.records.replay_record import ReplayInput, ReplaySpec, ResultRecord
from actordbg.replay.replay_data import ReplayData
from actordbg.store.layout import Store

LENGTHS = (128, 256, 512, 1024, 1536, 2048)
Law = Callable[[int], float]


def gigabytes(n: int) -> float:
    """1 GB and 1 MB for each position: 2048 positions take 3.048 GB, 80 GB are 79,000 positions."""
    return 1e9 + 1e6 * n


def square(n: int) -> float:
    """20 ms, and a microsecond for n^2: 1024 positions take 1.07 s."""
    return 0.02 + 1e-6 * n * n


def run(
    replay_id: str = "r1",
    lengths: Sequence[int] = LENGTHS,
    batch: int = 2,
    memory: Law = gigabytes,
    forward: Law = square,
    backward: Law | None = None,
    oom: Sequence[int] = (),
    config: ReplayConfig | None = None,
    **resolved: Any,
) -> ReplayData:
    """A replay with two inputs of each length, after one of length 64 that warms up, and one that runs out of memory for each of `oom`."""
    order = [64, *(n for n in lengths for _ in range(2)), *oom]
    inputs = tuple(ReplayInput(dump_id(i), "-", 0, batch, n, batch * n - 10) for i, n in enumerate(order))
    results = []
    for index, n in enumerate(order):
        result = ResultRecord(
            replay_id, dump_id(index), "passed", slot=index, started_at=f"2025-06-19T05:30:{index:02d}.000000Z",
            forward_s=10 * forward(n) if not index else forward(n), backward_s=backward(n) if backward else None,
            peak_memory_bytes=int(memory(n)), tokens=batch * n - 10,
        )  # fmt: skip
        if index > 2 * len(lengths):
            unknown = dict.fromkeys(("forward_s", "backward_s", "peak_memory_bytes"))
            result = replace(result, status="failed", signature="cuda-out-of-memory", **unknown)
        results.append(result)
    known = {"model": "tiny", "num_layers": 2, "backend": "plain", "zero_stage": 0, "dtype": "fp32", "attn": "sdpa",
             "packing": False, "compile": False, "deepcompile": False, "world_size": 1, "device_name": "cpu"}  # fmt: skip
    spec = ReplaySpec(replay_id, "2025-06-19T05:30:00.000000Z", config or ReplayConfig(), inputs)
    return ReplayData(spec, known | resolved, "complete", tuple(results))


def keep(store: Store, data: ReplayData) -> str:
    """Write a replay as supervisor and worker would, and return its id."""
    folder = write_spec(store, data.spec)
    append(folder / "rank0.jsonl", {"event": "ready", "pid": 1, "attempt": 1, "resolved": data.resolved}, *data.results)
    append(folder / "supervisor.jsonl", {"event": "finished", "status": data.status})
    return data.spec.replay_id
