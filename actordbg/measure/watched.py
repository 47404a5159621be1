"""Whose memory is watched, and what each process was doing: processes by pid, of a replay, of a run, or of a Ray cluster.

A replay's journals name its workers and the input that each is at. A run's counters name its recording processes and count
their calls. Of other processes nobody knows the steps, unless a file gets a line for each.

On a cluster, Ray's state API says which actors are alive, where, and under which pid. One small actor on each node reads their
memory: it takes no CPU of the cluster's, and carries the code of `process_memory` with it, so actordbg need not be installed
there. (Tasks would do, but Ray starts a process for each where no CPU is free, which takes seconds.)
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump, EnvironmentProblem, UsageError
from actordbg.base.processes import GONE, ZOMBIE, state_of
from actordbg.base.units import grouped
from actordbg.formats.recording_reading import read_counters
from actordbg.formats.ringfile import host_name
from actordbg.measure import process_memory
from actordbg.measure.process_memory import Reading, read_memory, started
from actordbg.records.journal import SUPERVISOR, Event, Tail
from actordbg.store.layout import Store

Readings = list[tuple["WatchedProcess", Reading]]


@dataclass(frozen=True)
class WatchedProcess:
    """A process by its node and pid, and what it is at. ticks: its start, 0 if that is not known.

    step: steps so far. dump_id: the dump that is running. cuda_reserved: what it said last of CUDA memory in reserve, in bytes.
    """

    node: str
    pid: int
    ticks: int
    rank: int | None = None
    name: str = ""
    step: int | None = None
    dump_id: str = ""
    cuda_reserved: int | None = None


class Watched:
    """Processes to watch, on this machine and until all have ended, where a class does not say otherwise.

    unshared: ask for USS, too.
    """

    unshared = True

    def poll(self) -> list[WatchedProcess]:
        """Those that are known now."""
        return []

    def read(self, processes: Collection[WatchedProcess]) -> Readings:
        """The memory of these processes."""
        return alive(processes, read_memory([process.pid for process in processes], self.unshared))

    def over(self, sampled: int) -> bool:
        """Whether to end, when so many of the processes were alive just now."""
        return not sampled

    def notes(self) -> list[str]:
        """What could not be watched, and why."""
        return []


def alive(processes: Collection[WatchedProcess], readings: Collection[Reading]) -> Readings:
    """Pair each process with its reading; one whose pid has been taken over by another process has none."""
    by_pid = {reading[0]: reading for reading in readings}
    pairs = ((process, by_pid.get(process.pid)) for process in processes)
    return [(process, reading) for process, reading in pairs if reading and process.ticks in (0, reading[1])]


class OfPids(Watched):
    """Processes by pid, until all have ended. step_file: a file that gets a line for each step, of all of them."""

    def __init__(self, pids: list[int], step_file: Path | None = None) -> None:
        node = socket.gethostname()
        self._processes = [WatchedProcess(node, pid, started(pid)) for pid in pids]
        if gone := [str(process.pid) for process in self._processes if not process.ticks]:
            raise UsageError(f"there is no process {', '.join(gone)} on this machine", hint="`ps` lists them")
        self._step_file, self._offset, self._lines = step_file, 0, 0

    def poll(self) -> list[WatchedProcess]:
        if self._step_file is None:
            return self._processes
        try:
            with open(self._step_file, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise UsageError(f"--step-file {self._step_file}: {error.strerror}", hint="name a file that you may read") from None
        self._offset += len(data)
        self._lines += data.count(b"\n")
        return [replace(process, step=self._lines) for process in self._processes]

    def notes(self) -> list[str]:
        note = "nobody counts steps, so growth is by second: --step-file FILE counts a file's lines"
        return [] if self._step_file else [note]


class OfReplay(Watched):
    """The workers of a replay, until it ends. A step is an input that a worker began."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._node = folder, socket.gethostname()
        self._here: set[int] = set()
        self._tails: dict[Path, Tail] = {}
        self._workers: dict[int, WatchedProcess] = {}
        self._supervisor: tuple[int, int] | None = None
        self._finished = False

    def poll(self) -> list[WatchedProcess]:
        for path in self._folder.glob("*.jsonl"):
            for event in self._tails.setdefault(path, Tail(path)).poll():
                if path.name != SUPERVISOR:
                    if isinstance(rank := event.get("rank", event.get("worker")), int):
                        self._read(rank, event)
                elif event["event"] == "supervisor":
                    self._supervisor, self._finished = (int(str(event["pid"])), int(str(event["ticks"]))), False
                elif event["event"] == "finished":
                    self._finished = True
        return self._booted

    @property
    def _booted(self) -> list[WatchedProcess]:
        """The workers that said who they are; of others a journal may have events alone."""
        return [worker for worker in self._workers.values() if worker.pid]

    def _read(self, rank: int, event: Event) -> None:
        what, worker = event["event"], self._workers.get(rank, WatchedProcess("", 0, 0, rank))
        if what == "boot":
            node, pid, ticks = str(event.get("node") or self._node), int(str(event["pid"])), int(str(event["ticks"]))
            worker = replace(worker, node=node, pid=pid, ticks=ticks)
            if ticks == started(pid):
                self._here.add(pid)
        elif what in ("start", "fill"):
            worker = replace(worker, step=(worker.step or 0) + 1, dump_id=str(event.get("dump_id") or ""))
        elif what in ("end", "filled"):
            if what == "filled" or event.get("dump_id") == worker.dump_id:  # else its file was lost while the next one runs
                worker = replace(worker, dump_id="")
            extra = event.get("extra")
            reserved = extra.get("cuda_reserved_bytes") if isinstance(extra, dict) else None
            worker = replace(worker, cuda_reserved=reserved) if isinstance(reserved, int) else worker
        self._workers[rank] = worker

    def over(self, sampled: int) -> bool:
        gone = self._supervisor is None or state_of(*self._supervisor)[0] in (GONE, ZOMBIE)
        return self._finished or (not sampled and gone)

    def notes(self) -> list[str]:
        elsewhere = sorted({worker.node for worker in self._booted if worker.pid not in self._here} - {self._node})
        lines = [f"workers on {', '.join(elsewhere)} were not sampled: --ray reaches other nodes"] if elsewhere else []
        return lines + ([] if self._booted else ["no worker of this replay ran on this machine"])


class OfRun(Watched):
    """The recording processes of a run on this machine (or anywhere), until they end. A step is a call of the actor."""

    def __init__(self, store: Store, run: str, *, anywhere: bool = False) -> None:
        self._folder, self._node, self._anywhere = store.counters / run, host_name(), anywhere
        self._elsewhere: set[str] = set()
        if not self.poll():
            known = f"; it recorded on {', '.join(sorted(self._elsewhere))}" if self._elsewhere else ""
            raise UsageError(f"no process of run {run} records on this machine{known}", hint="`actordbg dump status` lists them")

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
                if key in processes:  # a process that began to record again
                    calls = max(calls, processes[key].step or 0)
                processes[key] = WatchedProcess(host, pid, ticks, rank, role, calls)
        return list(processes.values())

    def notes(self) -> list[str]:
        hosts = ", ".join(sorted(self._elsewhere))
        return [f"processes on {hosts} were not sampled: --ray reaches other nodes"] if hosts else []


JOB = "actordbg memory"
_LOOK_AGAIN_S = 5.0
_PATIENCE_S = 30.0
_MOST_ACTORS = 10_000
_TRIES = 5


class OfRay(Watched):
    """Every live actor of a cluster, or the ranks of a replay on it. `marks`: who knows what processes are at."""

    def __init__(self, address: str, marks: Watched | None = None) -> None:
        import ray
        from ray import cloudpickle

        try:
            ray.init(address=address, namespace=JOB, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        except (ConnectionError, RuntimeError, ValueError) as error:
            hint = "`ray status` on this machine says which there are; --address names another one"
            raise EnvironmentProblem(f"no Ray cluster at {address}: {error}", hint=hint) from None
        cloudpickle.register_pickle_by_value(process_memory)
        self._ray, self._marks = ray, marks
        self._address = ray.get_runtime_context().gcs_address
        self._reader_class = ray.remote(num_cpus=0, max_restarts=0)(process_memory.MemoryReader)
        self._readers: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}
        """Ray's id of each node, by the name that answers call it."""
        self._actors: list[WatchedProcess] = []
        self._looked, self._silent = -_LOOK_AGAIN_S, set[str]()

    def poll(self) -> list[WatchedProcess]:
        if time.monotonic() - self._looked >= _LOOK_AGAIN_S:
            self._look()
        known = self._marks.poll() if self._marks else []
        if not isinstance(self._marks, OfReplay):
            return [_marked(actor, known) for actor in self._actors]
        # a replay's journal has Ray's id of the node, or its beginning; a node that is gone is in nobody's list
        return [
            replace(worker, node=name)
            for worker in known
            for name, node_id in self._nodes.items()
            if worker.node and node_id.startswith(worker.node)
        ]

    def _look(self) -> None:
        """Ask for nodes and actors again."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        names = {}
        for node in nodes:
            host = str(node["NodeManagerHostname"])
            names[node["NodeID"]] = host if hosts[host] == 1 else f"{host}-{node['NodeID'][:6]}"
        self._nodes = {name: node_id for node_id, name in names.items()}
        for name in self._nodes:
            self._reader(name)  # it takes Ray a while to start them
        self._actors = [
            WatchedProcess(names[actor.node_id], actor.pid, 0, None, actor.class_name)
            for actor in ([] if isinstance(self._marks, OfReplay) else self._list_actors())
            if actor.pid and actor.node_id in names and actor.class_name != process_memory.MemoryReader.__name__
        ]
        self._looked = time.monotonic()

    def _list_actors(self) -> list[Any]:
        """The live actors. Ray's state API answers through the dashboard, which may be busy: it is asked a few times."""
        from ray.util.state import list_actors
        from ray.util.state.exception import RayStateApiException

        for _ in range(_TRIES):
            try:
                return list(list_actors(self._address, filters=[("state", "=", "ALIVE")], limit=_MOST_ACTORS, detail=True))
            except (self._ray.exceptions.RayError, RayStateApiException, OSError, ValueError) as error:
                problem = error
                time.sleep(1.0)
        hint = "its head needs the dashboard: `pip install 'ray[default]'`, and no --include-dashboard=false"
        raise EnvironmentProblem(f"the Ray cluster at {self._address} lists no actors: {problem}", hint=hint)

    def read(self, processes: Collection[WatchedProcess]) -> Readings:
        """The memory of these processes, each read on its node; nodes that do not answer are left out, and named."""
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
        """The actor that reads on this node; a new one where the last one did not answer."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._readers:
            there = NodeAffinitySchedulingStrategy(self._nodes[node], soft=False)
            self._readers[node] = self._reader_class.options(scheduling_strategy=there).remote()
        return self._readers[node]

    def over(self, sampled: int) -> bool:
        if isinstance(self._marks, OfReplay):
            return self._marks.over(sampled)
        return not sampled and not self._silent

    def notes(self) -> list[str]:
        silent = ", ".join(sorted(self._silent))
        lines = [f"{silent} did not answer within {_PATIENCE_S:.0f} s, at least once"] if silent else []
        return lines if self._marks else [*lines, "nobody counts steps, so growth is by second: --run NAME or --replay ID does"]


def _marked(actor: WatchedProcess, known: list[WatchedProcess]) -> WatchedProcess:
    """The actor with what the store knows of its pid on a host of its name."""
    for process in known:
        if process.pid == actor.pid and actor.node.startswith(process.node):
            return replace(process, node=actor.node, ticks=0, name=process.name or actor.name)
    return actor
