"""A small Ray cluster of several raylets on this machine, as nodes, and scripted replays on it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from roots import ROOT, SUPPORT

from actordbg.cluster.order import ClusterOrder
from actordbg.cluster.ray_engine import RayEngine, connected
from actordbg.formats.replay_record import ReplaySpec
from actordbg.formats.store_files import make_folder
from actordbg.replay.group_engine import using
from actordbg.replay.supervise import ReplayOutcome, run_replay
from actordbg.store.layout import Store

QUICK = {
    "memory_monitor_refresh_ms": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 10,
}
"""So that a dead raylet is noticed in seconds; Ray's own settings take fourteen."""


@contextlib.contextmanager
def ray_cluster(nodes: int, **of_each: Any) -> Iterator[Any]:
    """A head without CPUs and `nodes` nodes; their workers can import the tests' helpers."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(SUPPORT)))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK})
    try:
        for _ in range(nodes):
            cluster.add_node(**({"num_cpus": 1} | of_each))
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def paused() -> list[tuple[str, int]]:
    """The address and the port of each of Ray's workers that its distributed debugger lists as paused."""
    import ray
    from ray.core.generated.gcs_pb2 import WorkerTableData

    table = [WorkerTableData.FromString(one) for one in ray._private.state.state._connect_and_get_accessor().get_worker_table()]
    return [(one.worker_address.ip_address, one.debugger_port) for one in table if one.is_alive and one.num_paused_threads]


def scripted(
    store: Store, spec: ReplaySpec, script: dict[str, Any], cluster: Any, order: ClusterOrder | None = None, **options: Any
) -> ReplayOutcome:
    """A replay whose workers do what the script says, on the cluster."""
    folder = store.replays / spec.replay_id
    make_folder(folder)
    (folder / "script.json").write_text(json.dumps(script))
    asked = order or ClusterOrder(address=cluster.address)
    with on_cluster(asked, f"replay {spec.replay_id}") as engine, using(engine):
        return run_replay(store, spec, launcher=fake_on(engine), **options)


@contextlib.contextmanager
def on_cluster(order: ClusterOrder, title: str) -> Iterator[RayEngine]:
    """An engine over the connection that is open, else over one of its own."""
    import ray

    if not ray.is_initialized():
        with connected(order, title) as engine:
            yield engine
        return
    engine = RayEngine(ray, order, title)
    try:
        yield engine
    finally:
        engine.close()


def fake_on(engine: RayEngine) -> Any:
    return lambda config, group, work: engine.launch(config, group, work, "fake_worker")
