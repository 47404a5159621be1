"""What `--engine ray` costs against this machine: until the first input starts, and from one input's end to the next one's.

Both run the same inputs on one group, in turn, on a Ray cluster of one node that is up before: connecting, asking the node for
its versions, the placement group and the host on the node count to the start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actordbg.base.units import new_replay_id
from actordbg.cluster.order import ClusterOrder
from actordbg.cluster.ray_engine import connected
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.record_reading import parse_timestamp
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.group_engine import using
from actordbg.replay.supervise import Progress, run_replay
from actordbg.store.layout import Store
from benchmarks.bench_replay import Shape, publish
from benchmarks.rows import Row

SHAPE = Shape(batch=4, length=256, count=40)
BUDGET = 1.1
ROUNDS = 3


def run() -> list[Row]:
    """The start and one input, on Ray and here."""
    here: list[tuple[float, float]] = []
    there: list[tuple[float, float]] = []
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray sets it for who reserves one CPU
    with tempfile.TemporaryDirectory() as folder, _cluster() as address:
        store = Store(Path(folder))
        inputs = publish(store, SHAPE)
        for _ in range(ROUNDS):
            here.append(_measured(store, inputs, contextlib.nullcontext()))
            there.append(_measured(store, inputs, _on_ray(address)))
    starts = statistics.median(one[0] for one in there), statistics.median(one[0] for one in here)
    each = statistics.median(one[1] for one in there), statistics.median(one[1] for one in here)
    note = f"{ROUNDS} rounds in turn, {SHAPE.count} inputs of {SHAPE.batch} x {SHAPE.length}, tiny model, one node that is up"
    ratio = each[0] / each[1]
    return [
        Row(
            "cluster start, --engine ray against this machine",
            *starts,
            "s",
            ratio=starts[0] / starts[1],
            budget="<= 2",
            note=note,
        ),
        Row(
            "cluster input, --engine ray against this machine",
            *each,
            "s",
            ratio=ratio,
            budget=f"<= {BUDGET}",
            note=note,
            within=ratio <= BUDGET,
        ),
    ]


@contextlib.contextmanager
def _on_ray(address: str) -> Iterator[None]:
    with connected(ClusterOrder(address, groups=1), "benchmark") as engine, using(engine):
        yield


def _measured(store: Store, inputs: list[ReplayInput], engine: Any) -> tuple[float, float]:
    """Seconds until the first input starts, and the median from one input's end to the next one's."""
    spec = ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(backward=False, dtype="fp32"), tuple(inputs))
    started: list[float] = []

    def on_event(event: Progress) -> None:
        if event.kind == "start":
            started.append(time.perf_counter())

    began = time.perf_counter()
    with engine:
        outcome = run_replay(store, spec, on_event)
    if not outcome.all_passed:
        raise RuntimeError(f"the replay did not pass: {outcome.counts}, see {outcome.folder}")
    ends = sorted(parse_timestamp(record.finished_at) for record in outcome.results.values())
    walls = [(after - before).total_seconds() for before, after in itertools.pairwise(ends)]
    return started[0] - began, statistics.median(walls)


@contextlib.contextmanager
def _cluster() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
