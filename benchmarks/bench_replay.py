"""Replay, end to end, per input, against the bare forward of the same Actor in one process on the same inputs.

*Ours*: a real replay (`run_replay`: supervisor, worker, journals on disk, catalog kept up to date), steady state, i.e. from the
end of the first input to the end of the last, divided by the inputs in between. *Theirs*: a loop in one process over the
same inputs, already in memory, that calls OpenRLHF's Actor with the same weights and does nothing else.

Both run in turn several times and the fastest of each counts: what disturbs a run on a shared machine only ever adds.
Memory: the worker's resident memory (median over the last ten inputs) in a replay of 1,000 inputs against one of 10.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actordbg import payload
from actordbg.outcome import ReplayConfig, ReplayInput, ReplaySpec
from actordbg.record import DumpRecord, make_dump_id, now_timestamp, parse_timestamp
from actordbg.replay.live import LiveCatalog
from actordbg.replay.plan import new_replay_id
from actordbg.replay.supervise import ReplayOutcome, run_replay
from actordbg.store import Store
from benchmarks.rows import Row

REPEAT = 2
BUDGET = 1.1
MEMORY_BUDGET = 1.05

BARE = """
import json, sys, time
from pathlib import Path
from actordbg.actor.cpu import install_cpu_support
install_cpu_support()
import torch
from openrlhf.models import Actor
from actordbg import payload
from actordbg.actor.tiny import ensure_tiny
root, paths = Path(sys.argv[1]), sys.argv[2:]
actor = Actor(str(ensure_tiny(root / "models")), attn_implementation="sdpa", param_dtype="fp32", packing_samples=False).eval()
calls = [payload.load(root / path).tensors for path in paths]
with torch.no_grad():
    for call in calls[:2]:
        actor(**call)
    began = time.perf_counter()
    for call in calls[1:]:
        actor(**call)
    print(json.dumps((time.perf_counter() - began) / (len(calls) - 1)))
"""


@dataclass(frozen=True)
class Shape:
    """A batch [batch, length], and how many of them a run has."""

    batch: int
    length: int
    count: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


REAL, SMALL, MANY, FEW = Shape(2, 1861, 14), Shape(2, 512, 60), Shape(1, 64, 1000), Shape(1, 64, 10)
"""REAL: the median of the real dumps (batch 2, 1,861 positions)."""


def run() -> list[Row]:
    """Overhead at the real dumps' median size and for small inputs, and memory of 1,000 inputs."""
    with _environment():
        return [_overhead(REAL, BUDGET), _overhead(SMALL, None), _memory()]


def _overhead(shape: Shape, budget: float | None) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store").create()
        inputs = _publish(store, shape)
        runs = [(_per_input(_replay(store, inputs)), _bare(store, inputs)) for _ in range(REPEAT)]
    ours, theirs = (min(times) for times in zip(*runs, strict=True))
    return Row(
        f"replay per input, {shape}, fp32, forward",
        ours,
        theirs,
        "s",
        ours / theirs,
        f"<= {budget}" if budget else "-",
        f"{shape.count} inputs, best of {REPEAT}, one thread each",
        None if budget is None else ours / theirs <= budget,
    )


def _memory() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store").create()
        many, few = (_resident(_replay(store, _publish(store, shape))) for shape in (MANY, FEW))
    ratio = many / few
    note = "resident memory of the worker, median of the last ten inputs"
    return Row(
        "replay memory, 1,000 inputs against 10",
        many,
        few,
        "B",
        ratio,
        f"<= {MEMORY_BUDGET}",
        note,
        ratio <= MEMORY_BUDGET,
    )


def _replay(store: Store, inputs: list[ReplayInput]) -> ReplayOutcome:
    spec = ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(backward=False, dtype="fp32"), tuple(inputs))
    catalog = LiveCatalog(store)
    outcome = run_replay(store, spec, lambda event: catalog.touch(), on_tick=catalog.tick)
    if not outcome.all_passed:
        raise RuntimeError(f"the replay did not pass: {outcome.counts}, see {outcome.folder}")
    return outcome


def _per_input(outcome: ReplayOutcome) -> float:
    ends = sorted(parse_timestamp(record.finished_at) for record in outcome.results.values())
    return (ends[-1] - ends[0]).total_seconds() / (len(ends) - 1)


def _resident(outcome: ReplayOutcome) -> float:
    records = sorted(outcome.results.values(), key=lambda record: record.finished_at)
    return statistics.median(record.peak_memory_bytes or 0 for record in records[-10:])


def _bare(store: Store, inputs: list[ReplayInput]) -> float:
    command = [sys.executable, "-c", BARE, str(store.root), *(one.path for one in inputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _publish(store: Store, shape: Shape) -> list[ReplayInput]:
    generator = torch.Generator().manual_seed(0)
    return [_one(store, index, shape, generator) for index in range(shape.count)]


def _one(store: Store, index: int, shape: Shape, generator: torch.Generator) -> ReplayInput:
    size = (shape.batch, shape.length)
    tensors = {
        "sequences": torch.randint(0, 4000, size, generator=generator),
        "action_mask": torch.ones(shape.batch, shape.length // 2, dtype=torch.bool),
        "attention_mask": torch.ones(size, dtype=torch.int64),
    }
    moment = now_timestamp()
    facts: dict[str, Any] = {"batch_size": shape.batch, "seq_len": shape.length, "tokens": shape.batch * shape.length}
    record = DumpRecord(make_dump_id(moment, index, 1, f"{index:08x}"), "bench", 0, moment, **facts)
    finished, blob = payload.encode(record, tensors)
    path = store.relative(store.publish_dump(finished, blob))
    return ReplayInput(record.dump_id, path, 0, **facts)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """One thread for each process, so that worker, supervisor and the rest of the machine do not fight for cores."""
    before = dict(os.environ)
    home = str(Path(__file__).parents[1])
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (home, before.get("PYTHONPATH", "")) if part)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
