"""Find the processes to watch, and what each is doing: by pid, of a run, or of a Ray cluster.

A run's counters name its recording processes and count their calls. The steps of other processes are unknown.

On a cluster, Ray's state API lists the live actors with their nodes and pids. A small actor per node reads their memory: it
reserves no CPU, and carries the code of `process_memory` with it, so actordbg need not be installed there. (Tasks would work
as well, but Ray starts a process for each when no CPU is free, which takes seconds.)
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from actordbg.base.errors import CorruptDump, EnvironmentProblem, UsageError
from actordbg.base.units import grouped, listed
from actordbg.formats.ringfile import host_name
from actordbg.measure import process_memory
from actordbg.measure.process_memory import Reading, read_memory, started
from actordbg.records.run_files import read_counters
from actordbg.store.layout import Store

Readings = list[tuple["WatchedProcess", Reading]]


@dataclass(frozen=True)
class WatchedProcess:
    """A process, by node and pid. ticks: its start in clock ticks since boot, 0 if unknown. step: steps so far."""

    node: str
    pid: int
    ticks: int
    rank: int | None = None
    name: str = ""
    step: int | None = None


class Watched:
    """Processes to watch. By default they run on this machine, and watching ends when all have ended.

    unshared: also read USS.
    """

    unshared = True

    def poll(self) -> list[WatchedProcess]:
        """List the processes that are known now."""
        return []

    def read(self, processes: Collection[WatchedProcess]) -> Readings:
        """Read the memory of these processes."""
        return alive(processes, read_memory([process.pid for process in processes], self.unshared))

    def over(self, sampled: int) -> bool:
        """Return whether watching is over. sampled: number of processes that were alive in this round."""
        return not sampled

    def notes(self) -> list[str]:
        """List what could not be watched, and why."""
        return []


def alive(processes: Collection[WatchedProcess], readings: Collection[Reading]) -> Readings:
    """Pair each process with its reading, skipping processes whose pid another process has reused."""
    by_pid = {reading[0]: reading for reading in readings}
    pairs = ((process, by_pid.get(process.pid)) for process in processes)
    return [(process, reading) for process, reading in pairs if reading and process.ticks in (0, reading[1])]


class OfPids(Watched):
    """Processes by pid, until all have ended."""

    def __init__(self, pids: list[int]) -> None:
        node = socket.gethostname()
        self._processes = [WatchedProcess(node, pid, started(pid)) for pid in pids]
        if gone := [str(process.pid) for process in self._processes if not process.ticks]:
            raise UsageError(f"no process {listed(gone)} on this machine", hint="list processes with `ps`")

    def poll(self) -> list[WatchedProcess]:
        return self._processes

    def notes(self) -> list[str]:
        return ["steps are unknown, growth is per second; --run NAME has the steps of a job that records"]


class OfRun(Watched):
    """The recording processes of a run on this machine (or anywhere), until they end. A step is a call of the actor."""

    def __init__(self, store: Store, run: str, *, anywhere: bool = False) -> None:
        self._folder, self._node, self._anywhere = store.counters / run, host_name(), anywhere
        self._elsewhere: set[str] = set()
        if not self.poll():
            known = f"; it recorded on {listed(sorted(self._elsewhere))}" if self._elsewhere else ""
            raise UsageError(
                f"no process of run {run} records on this machine{known}", hint="run `actordbg dump status` to list them"
            )

    def poll(self) -> list[WatchedProcess]:
        processes: dict[tuple[str, int, int, str], WatchedProcess] = {}
        for path in sorted(self._folder.glob("[!.]*.json")):
            try:
                data = read_counters(path)
            except CorruptDump:
                continue  # `dump status` counts it
            host, pid, rank, role, calls = data["host"], data["pid"], data["rank"], data.get("role") or "", data["calls"]
            if host != self._node:
                self._elsewhere.add(host)
            ticks = started(pid) if host == self._node else 0
            if data["state"] != "ended" and (ticks or (self._anywhere and host != self._node)):
                key = host, pid, rank, role
                if key in processes:  # the process restarted recording
                    calls = max(calls, processes[key].step or 0)
                processes[key] = WatchedProcess(host, pid, ticks, rank, role, calls)
        return list(processes.values())

    def notes(self) -> list[str]:
        hosts = listed(sorted(self._elsewhere))
        return [f"processes on {hosts} were not sampled; use --ray to reach other nodes"] if hosts else []


JOB = "actordbg memory"
_LOOK_AGAIN_S = 5.0
_PATIENCE_S = 30.0
_MOST_ACTORS = 10_000
_TRIES = 5


class OfRay(Watched):
    """Every live actor of a cluster. `marks`: the source of steps and ranks."""

    def __init__(self, address: str | None, marks: OfRun | None = None) -> None:
        from actordbg.cluster.ray_engine import join_cluster

        ray = join_cluster(address, JOB, namespace=JOB, ignore_reinit_error=True)
        ray.cloudpickle.register_pickle_by_value(process_memory)
        self._ray, self._marks = ray, marks
        self._address = ray.get_runtime_context().gcs_address
        self._reader_class = ray.remote(num_cpus=0, max_restarts=0)(process_memory.MemoryReader)
        self._readers: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        """Ray's id of each node, by the name shown to users."""
        self._actors: list[WatchedProcess] = []
        self._looked, self._silent = -_LOOK_AGAIN_S, set[str]()

    def poll(self) -> list[WatchedProcess]:
        if time.monotonic() - self._looked >= _LOOK_AGAIN_S:
            self._look()
        known = self._marks.poll() if self._marks else []
        return [_marked(actor, known) for actor in self._actors]

    def _look(self) -> None:
        """Refresh the lists of nodes and actors."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        names = {}
        for node in nodes:
            host = str(node["NodeManagerHostname"])
            names[node["NodeID"]] = host if hosts[host] == 1 else f"{host}-{node['NodeID'][:6]}"
        self._nodes = {name: node_id for node_id, name in names.items()}
        for name in self._nodes:
            self._reader(name)  # Ray takes a while to start readers
        self._actors = [
            WatchedProcess(names[actor.node_id], actor.pid, 0, None, actor.class_name)
            for actor in self._list_actors()
            if actor.pid and actor.node_id in names and actor.class_name != process_memory.MemoryReader.__name__
        ]
        self._looked = time.monotonic()

    def _list_actors(self) -> list[Any]:
        """List the live actors. Ray's state API goes through the dashboard, which may be busy, so retry a few times."""
        from ray.util.state import list_actors
        from ray.util.state.exception import RayStateApiException

        for _ in range(_TRIES):
            try:
                return list(list_actors(self._address, filters=[("state", "=", "ALIVE")], limit=_MOST_ACTORS, detail=True))
            except (self._ray.exceptions.RayError, RayStateApiException, OSError, ValueError) as error:
                problem = error
                time.sleep(1.0)
        hint = "run the head with the dashboard: `pip install 'ray[default]'`, and drop --include-dashboard=false"
        raise EnvironmentProblem(f"the Ray cluster at {self._address} lists no actors: {problem}", hint=hint)

    def read(self, processes: Collection[WatchedProcess]) -> Readings:
        """Read the memory of these processes on their nodes; nodes that do not respond are skipped and noted."""
        by_node = grouped((process.node, process) for process in processes)
        pending = {
            node: self._reader(node).read.remote([process.pid for process in there], self.unshared)
            for node, there in by_node.items()
        }
        readings: Readings = []
        for node, answer in pending.items():
            try:
                readings += alive(by_node[node], self._ray.get(answer, timeout=_PATIENCE_S))
            except self._ray.exceptions.RayError:
                self._silent.add(node)
                del self._readers[node]
        return readings

    def _reader(self, node: str) -> Any:
        """Return the actor that reads on this node, started anew if the last actor did not respond."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._readers:
            there = NodeAffinitySchedulingStrategy(self._nodes[node], soft=False)
            self._readers[node] = self._reader_class.options(scheduling_strategy=there).remote()
        return self._readers[node]

    def over(self, sampled: int) -> bool:
        return not sampled and not self._silent

    def notes(self) -> list[str]:
        silent = listed(sorted(self._silent))
        lines = [f"{silent} did not respond within {_PATIENCE_S:.0f} s, at least once"] if silent else []
        return lines if self._marks else [*lines, "steps are unknown, growth is per second; use --run NAME"]


def _marked(actor: WatchedProcess, known: list[WatchedProcess]) -> WatchedProcess:
    """Return the actor with the rank and step of the process in `known` that has its pid and host."""
    for process in known:
        if process.pid == actor.pid and actor.node.startswith(process.node):
            return replace(process, node=actor.node, ticks=0, name=process.name or actor.name)
    return actor
