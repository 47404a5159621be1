"""Run a campaign: many trials, one record, and one process that runs them.

    class MatrixRun(Campaign[MatrixRecord]): ...
    record = MatrixRun(store, record, ...).run()

A *trial* is any callable with a key: trials with one key run in sequence and share warm processes. Each trial limits its cost and
handles its resumption: it keeps its results in its folder, and puts each state of its cell into the record. The record's file is
replaced at each `put`. So running an interrupted or killed campaign again continues it: finished cells are no longer trials.

If the engine has several groups, trials run in parallel: one thread per engine part (`GroupEngine.parts`) runs trials in
sequence, so each Actor is loaded once per group and key. A trial's events go through a queue to the caller's thread, which alone
touches the terminal and the catalog. A Ctrl-C there, or an error in a trial, stops all other trials at their next tick.
"""

import os
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from actordbg.base.errors import Conflict, GroupsLost, MachineFault
from actordbg.base.processes import ALIVE, STOPPED, start_ticks, state_of
from actordbg.formats.dump_record import now_timestamp
from actordbg.replay.group_engine import GroupEngine, WarmGroups, using
from actordbg.replay.supervise import COMPLETE, INTERRUPTED, STOPPED_EARLY, interruptible, undisturbed
from actordbg.store.layout import Store

T = TypeVar("T")
Record = TypeVar("Record", bound=Any)
Call = Callable[[], None]
RUNNER = "runner"
"""Key of a record's options: pid and start time of the process that runs it."""


@dataclass(frozen=True)
class Trial:
    """A part of a campaign. key: what its processes have loaded. run: run or continue the trial."""

    key: Hashable
    run: Callable[[WarmGroups], None]


def claimed(record: Record, called: str) -> Record:
    """Claim the record for this process; Conflict while another process runs it. called: "matrix <id>"."""
    runner, me = record.options.get(RUNNER), [os.getpid(), start_ticks(os.getpid())]
    if runner and runner != me and state_of(*runner)[0] in (ALIVE, STOPPED):
        raise Conflict(f"{called} is being run by process {runner[0]}", hint="wait for it, or end it with Ctrl-C")
    running: Record = replace(record, options=record.options | {RUNNER: me}, status="running", finished_at=None)
    return running


class Campaign(Generic[Record]):
    """Runs the trials of a record. `record` always equals the file `path`.

    called: the name in messages, "matrix <id>". resume: the command that continues it.
    """

    def __init__(self, store: Store, record: Record, path: Path, called: str, resume: str) -> None:
        self.store, self.record, self.path, self.called, self.resume = store, record, path, called, resume
        self._writing = threading.Lock()

    def work(self) -> None:
        """Run every remaining trial."""

    def close(self, complete: bool) -> None:
        """End the worker processes. complete: whether every trial has run."""

    def run(self) -> Record:
        """Run until every cell is decided. KeyboardInterrupt passes through after every process has ended."""
        self.record = claimed(self.record, self.called)
        self.save()
        status = STOPPED_EARLY
        try:
            with interruptible():
                self.work()
            status = COMPLETE
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        except (GroupsLost, MachineFault) as fault:
            fault.hint = f"fix that, then `actordbg {self.resume}` continues"
            raise
        finally:
            with undisturbed():
                self.close(status == COMPLETE)
                options = self.record.options | {RUNNER: None}
                self.record = replace(self.record, options=options, status=status, finished_at=now_timestamp())
                self.save()
        return self.record

    def put(self, cell: Any, **changed: Any) -> None:
        """Put a cell, and other changed fields, into the record and its file."""
        with self._writing:
            cells = tuple(cell if other.index == cell.index else other for other in self.record.cells)
            self.record = replace(self.record, cells=cells, **changed)
            self.save()

    def save(self) -> None:
        self.store.publish_text(self.path, self.record.to_json())


def run_trials(trials: Iterable[Trial], warm: WarmGroups) -> None:
    """Run trials in sequence; trials with equal keys share processes."""
    for trial in trials:
        warm.share(trial.key)
        trial.run(warm)


class CellRunners:
    """Runs jobs on several engines. `tell` passes a call to the caller's thread; `tick` ends a job that has to stop."""

    def __init__(self, engines: Sequence[GroupEngine]) -> None:
        self._engines = engines
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.tell = self._calls.put
        self._stopped = threading.Event()

    def tick(self) -> None:
        """Raise KeyboardInterrupt if all jobs must stop. Every job calls this often."""
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def run(self, jobs: Sequence[T], work: Callable[[T], None]) -> None:
        """Run every job, and raise the first error of any. Calls from `tell` are made in this thread."""
        left = iter(jobs)

        def work_on(engine: GroupEngine) -> None:
            with using(engine):
                for job in left:
                    self.tick()
                    work(job)

        with ThreadPoolExecutor(len(self._engines), thread_name_prefix="cells") as pool:
            running = {pool.submit(work_on, engine) for engine in self._engines}
            try:
                while running:
                    ended, running = wait(running, 0.05, FIRST_EXCEPTION)
                    while not self._calls.empty():
                        self._calls.get()()
                    for thread in ended:
                        thread.result()
            finally:
                self._stopped.set()
