"""Replay, end to end, per input, against the bare forward of the same Actor in one process on the same inputs.

On a shared machine two runs, minutes apart, differ by a factor of two, so each factor is measured under equal conditions:

    replay / bare  =  (replay / its own forwards, input by input, in one replay)
                    x (those forwards / bare calls, in turn, in one process)

The first factor is a real replay (`run_replay`: supervisor, worker, journals on disk, catalog kept up to date) in steady
state: from one input's end to the next one's end, over the seconds of the Actor's forward in between. The second calls
OpenRLHF's Actor directly, and through the session that a worker uses, on the same inputs in memory. Medians of both.

The replay keeps each input's log-probs (`keep_tensors`), as it does unless told otherwise: its cost is in the first factor.

Both shapes have the same goal. Memory: the worker's resident memory (median over the last ten inputs) in a replay of 1,000
inputs against one of 10.
"""

from __future__ import annotations

import contextlib
import itertools
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

from actordbg.base.units import new_replay_id
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord, make_dump_id, now_timestamp
from actordbg.formats.record_reading import parse_timestamp
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.supervise import ReplayOutcome, run_replay
from actordbg.store import payload
from actordbg.store.layout import Store
from benchmarks.rows import Row

BUDGET = 1.03
MEMORY_BUDGET = 1.05

TWO_WAYS = """
import json, statistics, sys, time
from pathlib import Path
from actordbg.store import payload
from actordbg.actor.session import open_actor
from actordbg.config.replay_config import ReplayConfig
import torch
from actordbg.actor.models import ensure_tiny
models, paths = Path(sys.argv[1]), sys.argv[2:]
dumps = [payload.load(path) for path in paths]
pairs = []
with open_actor(ReplayConfig(backward=False, dtype="fp32"), defaults=dumps[0].record, model_cache=models) as session:
    from openrlhf.models import Actor  # the session made it importable without CUDA
    bare = Actor(str(ensure_tiny(models)), attn_implementation="sdpa", param_dtype="fp32", packing_samples=False).eval()
    for dump in dumps:
        began = time.perf_counter()
        with torch.no_grad():
            bare(**dump.tensors)
        directly = time.perf_counter() - began
        pairs.append((session.run(dump, backward=False).forward_s, directly))
print(json.dumps(pairs[1:]))
"""


@dataclass(frozen=True)
class Shape:
    """A batch [batch, length], and how many of them a run has."""

    batch: int
    length: int
    count: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}"


REAL, SMALL, MANY, FEW = Shape(2, 1861, 16), Shape(2, 512, 40), Shape(1, 64, 1000), Shape(1, 64, 10)
"""REAL: the median of the real dumps (batch 2, 1,861 positions)."""


def run() -> list[Row]:
    """Overhead at the real dumps' median size and for small inputs, and memory of 1,000 inputs."""
    with _environment():
        return [_overhead(REAL), _overhead(SMALL), _memory()]


def _overhead(shape: Shape) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store").create()
        inputs = publish(store, shape)
        ends, forwards = _timeline(_replay(store, inputs))
        pairs = _two_ways(store, inputs)
    each = [wall / forward for wall, forward in zip(ends, forwards, strict=True)]
    around = statistics.median(each)
    low, _, high = statistics.quantiles(each)
    within = statistics.median(through / directly for through, directly in pairs)
    ratio = around * within
    return Row(
        f"replay per input / bare forward, {shape}, fp32",
        statistics.median(ends),
        statistics.median(forwards) / within,
        "s",
        ratio=ratio,
        budget=f"<= {BUDGET}",
        note=f"{around:.3f} around the forward ({low:.3f} to {high:.3f}) x {within:.3f} in it; {shape.count} inputs, one thread",
        within=ratio <= BUDGET,
    )


def _memory() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store").create()
        many, few = (_resident(_replay(store, publish(store, shape))) for shape in (MANY, FEW))
    ratio = many / few
    note = "resident memory of the worker, median of the last ten inputs"
    return Row(
        "replay memory, 1,000 inputs against 10",
        many,
        few,
        "B",
        ratio=ratio,
        budget=f"<= {MEMORY_BUDGET}",
        note=note,
        within=ratio <= MEMORY_BUDGET,
    )


def _replay(store: Store, inputs: list[ReplayInput]) -> ReplayOutcome:
    spec = ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(backward=False, dtype="fp32"), tuple(inputs))
    outcome = run_replay(store, spec)
    if not outcome.all_passed:
        raise RuntimeError(f"the replay did not pass: {outcome.counts}, see {outcome.folder}")
    return outcome


def _timeline(outcome: ReplayOutcome) -> tuple[list[float], list[float]]:
    """For each input but the first: seconds since the input before it ended, and seconds of its forward."""
    records = sorted(outcome.results.values(), key=lambda record: record.finished_at)
    ends = [parse_timestamp(record.finished_at) for record in records]
    walls = [(after - before).total_seconds() for before, after in itertools.pairwise(ends)]
    return walls, [record.forward_s or 0.0 for record in records[1:]]


def _resident(outcome: ReplayOutcome) -> float:
    records = sorted(outcome.results.values(), key=lambda record: record.finished_at)
    return statistics.median(record.peak_memory_bytes or 0 for record in records[-10:])


def _two_ways(store: Store, inputs: list[ReplayInput]) -> list[tuple[float, float]]:
    """(seconds of the forward through the session, seconds of the bare call) for each input but the first."""
    paths = [str(store.root / one.path) for one in inputs]
    command = [sys.executable, "-c", TWO_WAYS, str(store.models), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(through, directly) for through, directly in json.loads(done.stdout.splitlines()[-1])]


def publish(store: Store, shape: Shape) -> list[ReplayInput]:
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
