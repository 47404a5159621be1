"""Whose memory is watched, and what each process was doing: processes by pid, of a replay, or of a recorded run.

A replay's journals name its workers and the input that each is at. A run's counters name its recording processes and count
their calls. Of other processes nobody knows the steps, unless a file gets a line for each.
Only processes of this machine are found here; `ray_watched` finds those of a cluster.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from actordbg.base.errors import CorruptDump, UsageError
from actordbg.base.processes import GONE, ZOMBIE, state_of
from actordbg.formats.recording_reading import read_counters
from actordbg.formats.ringfile import host_name
from actordbg.measure.process_memory import started
from actordbg.records.journal import SUPERVISOR, Tail
from actordbg.store.layout import Store


@dataclass(frozen=True)
class WatchedProcess:
    """A process by its node and pid. ticks: its start, 0 if that is not known."""

    node: str
    pid: int
    ticks: int
    rank: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Mark:
    """What a process is at: steps so far, the dump that is running, and what it said last of CUDA memory in reserve."""

    step: int | None = None
    dump_id: str = ""
    cuda_reserved: int | None = None


class Watched(Protocol):
    """Processes to watch. `poll`: those that are known now, with their marks. `over`: nothing more will come."""

    def poll(self) -> dict[WatchedProcess, Mark]: ...

    def over(self, sampled: int) -> bool:
        """Whether to end, when so many of the processes were alive just now."""

    def notes(self) -> list[str]:
        """What could not be watched, and why."""


class OfPids:
    """Processes by pid, until all have ended. step_file: a file that gets a line for each step, of all of them."""

    def __init__(self, pids: list[int], step_file: Path | None = None) -> None:
        node = socket.gethostname()
        self._processes = [WatchedProcess(node, pid, started(pid)) for pid in pids]
        if gone := [str(one.pid) for one in self._processes if not one.ticks]:
            raise UsageError(f"there is no process {', '.join(gone)} on this machine", hint="`ps` lists them")
        self._steps = _LineCount(step_file) if step_file else None

    def poll(self) -> dict[WatchedProcess, Mark]:
        mark = Mark(self._steps.now()) if self._steps else Mark()
        return dict.fromkeys(self._processes, mark)

    def over(self, sampled: int) -> bool:
        return not sampled

    def notes(self) -> list[str]:
        return [] if self._steps else ["nobody counts steps, so growth is by second: --step-file FILE counts a file's lines"]


class OfReplay:
    """The workers of a replay on this machine, until it ends. A step is an input that a worker began."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._node = folder, socket.gethostname()
        self._here: set[int] = set()
        self._tails: dict[Path, Tail] = {}
        self._workers: dict[int, WatchedProcess] = {}
        self._marks: dict[int, Mark] = {}
        self._supervisor: tuple[int, int] | None = None
        self._finished = False

    def poll(self) -> dict[WatchedProcess, Mark]:
        for path in self._folder.glob("*.jsonl"):
            for event in self._tails.setdefault(path, Tail(path)).poll():
                if path.name == SUPERVISOR:
                    self._read_supervisor(event)
                elif isinstance(rank := event.get("rank", event.get("worker")), int):
                    self._read(rank, event)
        return {process: self._marks.get(rank, Mark()) for rank, process in self._workers.items()}

    def _read_supervisor(self, event: dict[str, object]) -> None:
        if event["event"] == "supervisor":
            self._supervisor, self._finished = (int(str(event["pid"])), int(str(event["ticks"]))), False
        elif event["event"] == "finished":
            self._finished = True

    def _read(self, rank: int, event: dict[str, object]) -> None:
        kind, before = event["event"], self._marks.get(rank, Mark())
        if kind == "boot":
            node = str(event.get("node") or self._node)
            worker = self._workers[rank] = WatchedProcess(node, int(str(event["pid"])), int(str(event["ticks"])), rank)
            if worker.ticks == started(worker.pid):
                self._here.add(worker.pid)
        elif kind in ("start", "fill"):
            self._marks[rank] = Mark((before.step or 0) + 1, str(event.get("dump_id") or ""), before.cuda_reserved)
        elif kind in ("end", "filled"):
            extra = event.get("extra")
            reserved = extra.get("cuda_reserved_bytes") if isinstance(extra, dict) else None
            late = kind == "end" and event.get("dump_id") != before.dump_id  # its file was lost while the next one runs
            running = before.dump_id if late else ""
            self._marks[rank] = Mark(before.step, running, reserved if isinstance(reserved, int) else before.cuda_reserved)

    def over(self, sampled: int) -> bool:
        if self._finished:
            return True
        return not sampled and (self._supervisor is None or state_of(*self._supervisor)[0] in (GONE, ZOMBIE))

    def notes(self) -> list[str]:
        elsewhere = sorted({one.node for one in self._workers.values() if one.pid not in self._here} - {self._node})
        said = [f"workers on {', '.join(elsewhere)} were not sampled: --ray reaches other nodes"] if elsewhere else []
        return said + ([] if self._workers else ["no worker of this replay ran on this machine"])


class OfRun:
    """The recording processes of a run on this machine (or anywhere), until they end. A step is a call of the actor."""

    def __init__(self, store: Store, run: str, *, anywhere: bool = False) -> None:
        self._folder, self._node, self._anywhere = store.counters / run, host_name(), anywhere
        self._elsewhere: set[str] = set()
        if not self.poll():
            hosts = ", ".join(sorted(self._elsewhere))
            known = f"; it recorded on {hosts}" if hosts else ""
            raise UsageError(f"no process of run {run} records on this machine{known}", hint="`actordbg dump status` lists them")

    def poll(self) -> dict[WatchedProcess, Mark]:
        found: dict[WatchedProcess, Mark] = {}
        for path in sorted(self._folder.glob("[!.]*.json")):
            try:
                data = read_counters(path)
            except CorruptDump:
                continue  # `dump status` counts it
            here = data["host"] == self._node
            if not here:
                self._elsewhere.add(data["host"])
            ticks = started(data["pid"]) if here else 0
            if data["state"] != "ended" and (ticks or (self._anywhere and not here)):
                process = WatchedProcess(data["host"], data["pid"], ticks, data["rank"], data.get("role") or "")
                found[process] = Mark(max(data["calls"], found.get(process, Mark(0)).step or 0))
        return found

    def over(self, sampled: int) -> bool:
        return not sampled

    def notes(self) -> list[str]:
        if not self._elsewhere:
            return []
        return [f"processes on {', '.join(sorted(self._elsewhere))} were not sampled: --ray reaches other nodes"]


class _LineCount:
    """How many lines a growing file has; it may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._lines = path, 0, 0

    def now(self) -> int:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self._lines
        except OSError as error:
            raise UsageError(f"--step-file {self._path}: {error.strerror}", hint="name a file that you may read") from None
        self._offset += len(data)
        self._lines += data.count(b"\n")
        return self._lines
