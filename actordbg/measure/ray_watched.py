"""The processes of a Ray cluster on all its nodes, and a reader that reads their memory there.

A replay's journals name its ranks and their nodes. Of everything else, Ray's state API says which actors are alive, where, and
under which pid. One small actor on each node reads them: it takes no
CPU of the cluster's, and carries the code of `process_memory` with it, so actordbg need not be installed there. (Tasks would do,
but Ray starts a process for each where no CPU is free, which takes seconds.) What a
process was at comes from a replay's journals or a run's counters in the store, by node and pid.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from actordbg.base.errors import EnvironmentProblem
from actordbg.measure import process_memory
from actordbg.measure.process_memory import Reading
from actordbg.measure.watched import Mark, OfReplay, Watched, WatchedProcess

JOB = "actordbg memory"
_LOOK_AGAIN_S = 5.0
_PATIENCE_S = 30.0
_MOST_ACTORS = 10_000
_TRIES = 5


class OfRay:
    """Every live actor of a cluster, or the ranks of a replay on it. `marks`: who knows what processes are at."""

    def __init__(self, address: str, unshared: bool, marks: Watched | None = None) -> None:
        import ray
        from ray import cloudpickle
        from ray.util import state

        try:
            ray.init(address=address, namespace=JOB, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            hint = "`ray status` on this machine says which there are; --address names another one"
            raise EnvironmentProblem(f"no Ray cluster at {address}: {error}", hint=hint) from None
        cloudpickle.register_pickle_by_value(process_memory)
        self._ray, self._state, self._unshared, self._marks = ray, state, unshared, marks
        self._address = ray.get_runtime_context().gcs_address
        self._kind = ray.remote(num_cpus=0, max_restarts=0)(process_memory.MemoryReader)
        self._readers: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        self._actors: list[WatchedProcess] = []
        self._looked, self._silent = -_LOOK_AGAIN_S, set[str]()

    def poll(self) -> dict[WatchedProcess, Mark]:
        if time.monotonic() - self._looked >= _LOOK_AGAIN_S:
            self._look()
        known = self._marks.poll() if self._marks else {}
        if isinstance(self._marks, OfReplay):
            names = {one: self._name_of(one.node) for one in known}
            return {replace(one, node=name): known[one] for one, name in names.items() if name is not None}
        return dict(_marked(one, known) for one in self._actors)

    def _name_of(self, node: str) -> str | None:
        """A node of the cluster by Ray's id of it, or the beginning of one; None for one that is gone."""
        return next((name for name, node_id in self._nodes.items() if node and node_id.startswith(node)), None)

    def _look(self) -> None:
        """Ask for nodes and actors again."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        hosts = Counter(node["NodeManagerHostname"] for node in alive)
        self._nodes = {_node_name(node, hosts): node["NodeID"] for node in alive}
        for name in self._nodes:
            self._reader(name)  # it takes Ray a while to start them
        names = {node_id: name for name, node_id in self._nodes.items()}
        found = [] if isinstance(self._marks, OfReplay) else self._list_actors()
        self._actors = [
            WatchedProcess(names[one.node_id], one.pid, 0, None, one.class_name)
            for one in found
            if one.pid and one.node_id in names and one.class_name != process_memory.MemoryReader.__name__
        ]
        self._looked = time.monotonic()

    def _list_actors(self) -> list[Any]:
        """The live actors. Ray's state API answers through the dashboard, which may be busy: it is asked a few times."""
        from ray.util.state.exception import RayStateApiException

        alive = [("state", "=", "ALIVE")]
        for _ in range(_TRIES):
            try:
                return list(self._state.list_actors(self._address, filters=alive, limit=_MOST_ACTORS, detail=True))
            except (self._ray.exceptions.RayError, RayStateApiException, OSError, ValueError) as error:
                problem = error
                time.sleep(1.0)
        hint = "its head needs the dashboard: `pip install 'ray[default]'`, and no --include-dashboard=false"
        raise EnvironmentProblem(f"the Ray cluster at {self._address} lists no actors: {problem}", hint=hint)

    def read(self, processes: Collection[WatchedProcess]) -> dict[WatchedProcess, Reading]:
        """The memory of these processes, each read on its node; nodes that do not answer are left out, and named."""
        asked: dict[str, Any] = {}
        for node in {one.node for one in processes}:
            pids = [one.pid for one in processes if one.node == node]
            asked[node] = self._reader(node).read.remote(pids, self._unshared)
        found: dict[WatchedProcess, Reading] = {}
        for node, answer in asked.items():
            try:
                readings = {one[0]: one for one in self._ray.get(answer, timeout=_PATIENCE_S)}
            except self._ray.exceptions.RayError:
                self._silent.add(node)
                self._readers.pop(node, None)
                continue
            found |= {
                one: readings[one.pid]
                for one in processes
                if one.node == node and one.pid in readings and one.ticks in (0, readings[one.pid][1])
            }
        return found

    def _reader(self, node: str) -> Any:
        """The actor that reads on this node; a new one where the last one did not answer."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._readers:
            there = NodeAffinitySchedulingStrategy(self._nodes[node], soft=False)
            self._readers[node] = self._kind.options(scheduling_strategy=there).remote()
        return self._readers[node]

    def over(self, sampled: int) -> bool:
        if isinstance(self._marks, OfReplay):
            return self._marks.over(sampled)
        return not sampled and not self._silent

    def notes(self) -> list[str]:
        silent = ", ".join(sorted(self._silent))
        said = [f"{silent} did not answer within {_PATIENCE_S:.0f} s, at least once"] if silent else []
        return said if self._marks else [*said, "nobody counts steps, so growth is by second: --run NAME or --replay ID does"]


def _node_name(node: dict[str, Any], hosts: Counter[str]) -> str:
    """A node's host name; with the beginning of its id where several nodes have the same."""
    host = str(node["NodeManagerHostname"])
    return host if hosts[host] == 1 else f"{host}-{node['NodeID'][:6]}"


def _marked(actor: WatchedProcess, known: dict[WatchedProcess, Mark]) -> tuple[WatchedProcess, Mark]:
    """The actor with its rank and its mark, if the store knows its pid on a host of its name."""
    for process, mark in known.items():
        if process.pid == actor.pid and actor.node.startswith(process.node):
            return WatchedProcess(actor.node, actor.pid, 0, process.rank, process.name or actor.name), mark
    return actor, Mark()
