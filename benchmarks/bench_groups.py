"""How throughput grows with groups on a Ray cluster: `python -m benchmarks groups` starts raylets on this machine as nodes.

Workers are real but for their forward, which sleeps. So this is the cost of what groups share: the dealing of inputs, journals,
the supervisor, Ray's calls. It is told from one and two groups what four and eight do: an input costs a group `t + o` seconds,
and W groups do W / (t + o) inputs a second. What it cannot say is what a network and a shared file system cost.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.units import new_replay_id
from actordbg.cluster.order import ClusterOrder
from actordbg.cluster.ray_engine import RayEngine, connected
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.record_reading import parse_timestamp
from actordbg.records.journal import read_events
from actordbg.records.replay_record import ReplayInput, ReplaySpec
from actordbg.replay.group_engine import using
from actordbg.replay.launch import Group, Running
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store
from benchmarks.rows import Row
from benchmarks.sleeping_worker import TAKES

ROOT = Path(__file__).parents[1]
TAKES_S, EACH, GROUPS = 0.25, 60, (1, 2, 4, 8)
"""Seconds of an input, inputs for each group, and how many groups."""


@dataclass(frozen=True)
class Measured:
    """A replay on so many groups. rate: inputs a second while all groups ran; whole_s: the call; cpu_s: the supervisor's."""

    groups: int
    rate: float
    whole_s: float
    cpu_s: float

    @property
    def overhead_s(self) -> float:
        """What an input cost its group beyond its own time."""
        return self.groups / self.rate - TAKES_S


def run() -> list[Row]:
    """Throughput of 1, 2, 4 and 8 groups."""
    nodes = os.environ.get("BENCH_CLUSTER")
    with tempfile.TemporaryDirectory() as folder:
        found = _all(Store(Path(folder)), nodes) if nodes else _on_own_nodes(Store(Path(folder)))
    overhead = sum(one.overhead_s for one in found[:2]) / 2
    rows = []
    for one in found:
        told, ideal = one.groups / (TAKES_S + overhead), one.groups / TAKES_S
        note = (
            f"{EACH * one.groups} inputs of {TAKES_S} s that sleep; {one.rate / ideal:.0%} of the ideal, told {told:.1f}, "
            f"{one.whole_s:.0f} s with its start, supervisor {1000 * one.cpu_s / (EACH * one.groups):.1f} ms of CPU an input"
        )
        name = f"groups on a cluster: inputs/s of {one.groups}, against what 1 and 2 tell"
        rows.append(Row(name, one.rate, told, "1/s", ratio=one.rate / told, note=note, within=None))
    return rows


def _on_own_nodes(store: Store) -> list[Measured]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(4):
            cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        return _all(store, cluster.address)
    finally:
        cluster.shutdown()


def _all(store: Store, address: str) -> list[Measured]:
    return [_measured(store, address, groups) for groups in GROUPS]


def _measured(store: Store, address: str, groups: int) -> Measured:
    inputs = tuple(ReplayInput(f"d{n}", f"dumps/d{n}", 0, 1, 8, 8) for n in range(EACH * groups))
    spec = ReplaySpec(new_replay_id(), now_timestamp(), ReplayConfig(), inputs)
    given = (f"PYTHONPATH={ROOT}", f"{TAKES}={TAKES_S}")
    with connected(ClusterOrder(address, groups=groups, runtime_env=given), f"benchmark {groups}") as engine, using(engine):
        began, cpu = time.perf_counter(), time.process_time()
        outcome = run_replay(store, spec, launcher=_sleeping(engine))
        whole, cpu = time.perf_counter() - began, time.process_time() - cpu
    if not outcome.all_passed:
        raise RuntimeError(f"the replay did not pass: {outcome.counts}, see {outcome.folder}")
    return Measured(groups, _rate(outcome.folder, groups), whole, cpu)


def _sleeping(engine: RayEngine) -> Callable[[ReplayConfig, Group, Path], Running]:
    return lambda config, group, work: engine.launch(config, group, work, "benchmarks.sleeping_worker")


def _rate(folder: Path, groups: int) -> float:
    """Inputs a second from when the last group had begun until the first had nothing more to do."""
    ends = [
        sorted(
            parse_timestamp(event["finished_at"])
            for event in read_events(folder / f"rank{rank}.jsonl")
            if event["event"] == "end"
        )
        for rank in range(groups)
    ]
    first, last = max(one[0] for one in ends), min(one[-1] for one in ends)
    within = sum(first < end <= last for one in ends for end in one)
    return within / (last - first).total_seconds()
