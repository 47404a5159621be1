"""A small Ray cluster of several raylets on this machine, as nodes, and scripted replays on it."""

import contextlib
import os
import time

import norename  # noqa: F401  registers the file system
from roots import FORKED, ROOT, SUPPORT
from supervised import Bench

from actordbg.cluster.order import ClusterOrder
from actordbg.cluster.ray_engine import RayEngine, connected
from actordbg.config.sources import mirror_name
from actordbg.replay.group_engine import using

QUICK = {
    "memory_monitor_refresh_ms": 0,
    "health_check_initial_delay_ms": 5000,
    "health_check_timeout_ms": 60_000,
    "health_check_period_ms": 400,
    "health_check_failure_threshold": 10,
}
"""A dead raylet, which refuses connections, is noticed in seconds (Ray's own settings take fourteen); a busy one has minutes."""


NO_ENTRY = """
import os, sys

def look(event, arguments):
    if arguments and event in AUDITED and isinstance(arguments[0], (str, bytes)):
        if os.fsdecode(arguments[0]).startswith(FORBIDDEN):
            os.write(2, f"NO ENTRY: {event} {arguments[0]}".encode())
            raise PermissionError(13, "another machine's folder", os.fsdecode(arguments[0]))

AUDITED = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.chmod", "os.truncate", "os.symlink"}
if FORBIDDEN := os.environ.get("NO_ENTRY"):
    sys.addaudithook(look)
if "TEMPLATE_OF_WORKERS" in os.environ:
    import template_of_workers
"""


class Machines:
    """Machines that share nothing but a bucket: what one has below its folder no Python process of another one can open.

    folder/site is imported by all of them: it refuses the others' folders (`NO_ENTRY`), and brings `norename://`.
    """

    def __init__(self, folder):
        self.folder, self.site, self.url = folder, folder / "site", f"norename://{folder / 'bucket'}"
        info = self.site / "norename-1.dist-info"
        info.mkdir(parents=True)
        (self.site / "sitecustomize.py").write_text(NO_ENTRY)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: norename\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[fsspec.specs]\nnorename = norename:NoRename\n")

    def environment(self, name, others):
        """Of machine `name`; those whose names begin with `others` are shut to it."""
        path = os.pathsep.join(map(str, (self.site, ROOT, SUPPORT, FORKED)))
        return {"XDG_CACHE_HOME": str(self.folder / name), "NO_ENTRY": str(self.folder / others), "PYTHONPATH": path}

    def desk(self, name):
        """The environment of commands on a machine that no node sees, and that sees no node."""
        return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | self.environment(
            f"desk-{name}", "node-"
        )

    def mirror(self, name):
        """Where such a machine mirrors the bucket."""
        return self.folder / f"desk-{name}" / "actordbg" / "staged" / mirror_name(self.url)


@contextlib.contextmanager
def ray_cluster(nodes, machines=None, **of_each):
    """A head without CPUs and `nodes` nodes; their workers can import the tests' helpers."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, ([machines.site] if machines else []) + [ROOT, SUPPORT, FORKED]))
    head = {"num_cpus": 0, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in range(nodes):
            own = {"env_vars": machines.environment(f"node-{number}", "desk-")} if machines else {}
            cluster.add_node(**({"num_cpus": 1} | own | of_each))
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


class SharedCluster:
    """A cluster of two nodes for the tests of a file, built anew where a test has left it otherwise.

    A node may be dead. Or Ray (2.55) has lost a CPU for good: it never frees a placement group that is removed between its
    preparation and its commitment, so whoever then needs that CPU waits for ever.
    """

    def __init__(self, machines):
        self._machines, self._open, self._running = machines, contextlib.ExitStack(), None

    def whole(self):
        if self._running is not None and not self._is_whole():
            self.close()
        if self._running is None:
            self._running = self._open.enter_context(ray_cluster(2, self._machines))
            self._open.enter_context(connected(ClusterOrder(self._running.address), "tests"))
        return self._running

    def _is_whole(self):
        import ray

        if len(self._running.worker_nodes) != 2 or not self._running.remaining_processes_alive():
            return False
        patience = time.monotonic() + 20.0  # what a test has released is free a moment later
        while time.monotonic() < patience:
            alive = sum(node["Alive"] for node in ray.nodes())
            if (alive, ray.cluster_resources().get("CPU"), ray.available_resources().get("CPU")) == (3, 2.0, 2.0):
                return True
            time.sleep(0.1)
        return False

    def close(self):
        self._running = None
        self._open.close()


def paused():
    """The address and the port of each of Ray's workers that its distributed debugger lists as paused."""
    import ray
    from ray.core.generated.gcs_pb2 import WorkerTableData

    table = [WorkerTableData.FromString(one) for one in ray._private.state.state._connect_and_get_accessor().get_worker_table()]
    return [(one.worker_address.ip_address, one.debugger_port) for one in table if one.is_alive and one.num_paused_threads]


def scripted(store, spec, script, cluster, order=None, **options):
    """A replay whose workers do what the script says, on the cluster."""
    asked = order or ClusterOrder(address=cluster.address)
    with on_cluster(asked, f"replay {spec.replay_id}") as engine, using(engine):
        return Bench(store).run(spec, script, launcher=fake_on(engine), **options)


@contextlib.contextmanager
def on_cluster(order, title):
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


def fake_on(engine):
    return lambda config, group, work: engine.launch(config, group, work, "fake_worker")
