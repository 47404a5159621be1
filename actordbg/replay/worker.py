"""A worker of a replay: it opens the actor once, runs its inputs one by one, and records each step before taking it.

    python -m actordbg.replay.worker --supervisor PID --work store/replays/<id>/work-0-1.json [--local_rank N]

A launcher starts it (deepspeed, torchrun or plain python). RANK says which worker it is, and the work file what is left to do
(`WorkOrder`). It writes to its journal `rank<N>.jsonl`, in this order:

    boot    pid and its start time, before anything heavy is imported
    ready   the actor is built: its resolved configuration, and
            whether it needs its peers for an input                   (or `broken`: it could not be built, and why)
    start   dump_id, slot, attempt, where its log begins              } for each input; a filler, and the ranks of a lane
    law     the law being checked, for an input whose laws are        } that do not record its result, write `fill` for
    end     a ResultRecord                                            } `start`, and `filled` for `end`
    restart why this process cannot continue and must be replaced        (it then exits with EXIT_RESTART)
    done    nothing is left

The supervisor blames a crash or a hang on a `start` without an `end`. A thread flushes lines to the disk while the next input
runs, after the files that belong to the result (`actordbg.replay.flushing`).

An input that raises is recorded as failed, and the loop continues, unless the exception left this process unusable:

* The machine failed: its disk is full or broken, or there are no open files left. Nobody is blamed, the worker is `broken`, and
  `--resume` runs the input again.
* The CUDA context is lost, or DeepSpeed stopped in the middle of a step (`ActorEngine.tainted`).
* Several ranks compute together, and the others wait for this rank in a collective. A rank that failed reads the others'
  journals. If all finish the slot within a grace period, everybody continues; otherwise this process requests a restart.
  A rank that fails because a *peer died* records nothing: its input is innocent and runs again.

Standard library only; torch is behind `ActorEngine`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from actordbg.base.errors import MachineFault, machine_fault
from actordbg.base.processes import GONE, ZOMBIE, start_ticks, state_of
from actordbg.config import consent
from actordbg.debug import stops
from actordbg.debug.replay_stops import ERROR, ReplayStops
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import open_regular, read_regular
from actordbg.records.journal import SPEC, Journal, rank_journal, rank_log
from actordbg.records.replay_record import GOES_ON, ReplaySpec
from actordbg.replay.actor_engine import ActorEngine, Failure
from actordbg.replay.flushing import UNFLUSHED, Flusher
from actordbg.replay.instruments import AT_END, INSTRUMENTS
from actordbg.replay.plan import law_order
from actordbg.replay.rank_view import NODE, RankView
from actordbg.replay.work_order import EXIT_BROKEN, EXIT_RESTART, Duty, Task, WorkOrder, answer_fields, await_next, result_from

T = TypeVar("T")

GRACE_S = 10.0
"""Minimum seconds that a failed rank waits for its peers to finish the slot."""


class Restart(Exception):
    """This process cannot continue; the text says why."""


class Worker:
    """The loop over a rank's inputs; an `ActorEngine` runs them.

    previous: ran an earlier order in this process, whose actor is loaded: it is switched to this replay.
    """

    def __init__(
        self, folder: Path, spec: ReplaySpec, order: WorkOrder, rank: int, engine: ActorEngine, previous: Worker | None = None
    ) -> None:
        self._switches = previous is not None
        self.folder, self.spec, self.order, self.rank, self.engine = folder, spec, order, rank, engine
        self.journal = Journal(rank_journal(folder, rank))
        self.flusher = Flusher(self.journal)
        others = [other for other in order.ranks if other != rank]
        self.peers = [RankView(other, folder) for other in others]
        self._longest_input_s = 0.0
        """Seconds of the longest input so far, without stops at breakpoints."""
        self.goes_on: bool = bool(previous and (previous.goes_on or previous.has_run) and previous.folder == folder)
        """Whether this process ran inputs of this replay under an earlier work order: its first input is then not a warm-up."""
        self.has_run: bool = False
        """Whether an input ran to its end."""
        self._last_slot = -1
        first = law_order(spec.inputs)
        self._asked = {name: first[: instrument.inputs(spec)] for name, instrument in INSTRUMENTS.items()}
        """The inputs that each instrument examines."""
        self.stops = ReplayStops(folder, rank, order.stops, self._write)
        stops.in_replay = self.stops
        stops.take_over_pdb()

    def run(self) -> int:
        """Run all inputs and return the exit code."""
        try:
            return self._run_all()
        except Restart as reason:
            sys.stderr.write(f"{reason}\n")
            return self._leave(EXIT_RESTART, "restart", reason=str(reason))
        except (MachineFault, OSError) as error:  # an OSError comes from the journals: the debugged code runs in `_guarded`
            failure = Failure.of(machine_fault(error, self.folder) or MachineFault(f"{self.folder}: {error}"))
            sys.stderr.write(failure.trace)
            return self._leave(EXIT_BROKEN, "broken", **asdict(failure))
        finally:
            self.flusher.close()
            self.journal.close()

    def _run_all(self) -> int:
        pid = os.getpid()
        where = {"node": os.environ[NODE]} if NODE in os.environ else {}
        self._write("boot", pid=pid, ticks=start_ticks(pid), **where)
        opened = self._guarded(lambda: self.engine.switch(self.folder, self.spec) if self._switches else self.engine.open())
        if isinstance(opened, Failure):
            sys.stderr.write(opened.trace)
            if self._switches:  # only a process that builds it can say whether it can be built
                raise Restart(f"the loaded actor cannot take the configuration: {opened.error[:500]}")
            self._write("broken", **asdict(opened))
            return EXIT_BROKEN
        self._write("ready", pid=pid, resolved=opened, collective=self.engine.collective)
        tasks = self.order.inputs_of(self.rank)
        runs = [task.slot for task in tasks if self.engine.collective or task.duty is not Duty.FILL]
        self._last_slot = max(runs, default=-1)
        for task, load in self._loaded_ahead(tasks):
            self._take(task, load.result)
        self.flusher.settle()
        self._write("done")
        if self.order.stay:
            return 0
        while any(peer.is_alive() and not peer.done for peer in self._peers_now()):
            time.sleep(0.02)  # the first rank serves the group's key-value store: nobody leaves before all are done
        self.engine.close()
        return 0

    def _leave(self, code: int, event: str, **values: Any) -> int:
        """Record why this process leaves. If the journal cannot be written, the log and the exit code say so."""
        with contextlib.suppress(OSError):
            self.flusher.settle()
        with contextlib.suppress(OSError):
            self._write(event, **values)
        return code

    def _loaded_ahead(self, work: Sequence[Task]) -> Iterator[tuple[Task, Future[tuple[Any, float]]]]:
        """Yield each task with its input. While the caller uses an input, only the next is loaded."""
        with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
            ahead = [pool.submit(self._load, task.index) for task in work[:1]]
            for position, task in enumerate(work, 1):
                current = ahead.pop()
                ahead += [pool.submit(self._load, after.index) for after in work[position : position + 1]]
                yield task, current
                del current

    def _guarded(self, call: Callable[[], T]) -> T | Failure:
        """Run the debugged code. Any exception that a model raises is a result; a fault of the machine is raised."""
        try:
            return call()
        except Exception as error:
            if fault := machine_fault(error, self.folder):
                raise fault from error
            return Failure.of(error)

    def _load(self, index: int) -> tuple[Any, float]:
        began = time.perf_counter()
        loaded = self._guarded(lambda: self.engine.load(self.spec.inputs[index]))
        return loaded, time.perf_counter() - began

    def _take(self, task: Task, load: Callable[[], tuple[Any, float]]) -> None:
        """Run an input. The lane's first rank records its result; the others write their figures to `filled`.

        A filler records nothing: it takes part because the peers wait for this rank in their collectives.
        """
        leads, fills = task.duty is Duty.LEAD, task.duty is Duty.FILL
        follows = {"follows": True} if task.duty is Duty.FOLLOW else {}
        begun = self._begin("start" if leads else "fill", task, **follows)
        if fills and not self.engine.collective:
            return self._write("filled", slot=task.slot)
        loaded, load_s = load()
        outcome = loaded if isinstance(loaded, Failure) else self._run(task, loaded, recorded=leads)
        if isinstance(outcome, Failure):
            self._raise_if_a_peer_died()
            fields = outcome.fields()
        else:
            self.has_run, fields = True, outcome
        if self.goes_on:
            fields = {**fields, "extra": {**fields.get("extra", {}), GOES_ON: True}}
        unflushed = [fields.pop(UNFLUSHED)] if UNFLUSHED in fields else []
        if leads:
            event = {**begun, "rank": self.rank, "attempt": self.order.attempt}
            record = result_from(self.spec.replay_id, event, load_s=load_s, **fields)
            self.flusher.settle()  # the previous result and its files are on disk before this line
            self.journal.write("end", **record.to_dict())
            self.flusher.note(*unflushed)
        elif fills:
            self._write("filled", slot=task.slot)
        else:
            self._write("filled", **begun, **answer_fields(fields))
        if isinstance(loaded, Failure) and not fills:
            return self._take_part_after_all(task)
        return self._resync(task.slot, failed=isinstance(outcome, Failure))

    def _begin(self, event: str, task: Task, **values: Any) -> dict[str, Any]:
        """Record that an input starts now, and where its log begins; return the input, its slot and the time."""
        begun = {"dump_id": self.spec.inputs[task.index].dump_id, "slot": task.slot, "started_at": now_timestamp(), **values}
        sys.stdout.flush()
        self._write(event, **begun, log_at=os.fstat(2).st_size)
        return begun

    def _run(self, task: Task, loaded: Any, *, recorded: bool) -> dict[str, Any] | Failure:
        began, held_before_s, item = time.monotonic(), self.stops.held_s, self.spec.inputs[task.index]
        asked = self._asked_of(task)
        self._announce_to_breakpoints(task, item.dump_id)

        def on_step(step: str) -> None:
            self._write("law", law=step, slot=task.slot)

        fields = self._guarded(lambda: self.engine.run(item, loaded, recorded=recorded, asked=asked, on_step=on_step))
        self.stops.end()
        self._longest_input_s = max(self._longest_input_s, time.monotonic() - began - (self.stops.held_s - held_before_s))
        return fields

    def _announce_to_breakpoints(self, task: Task, dump_id: str) -> None:
        """Announce the input to the breakpoints, with the rank that gets the prompt.

        Ranks that compute together all stop if the chosen dump runs on any of them.
        """
        stop, lane_lead = self.order.stops, None
        collective = self.engine.collective
        mates = {self.spec.inputs[index].dump_id: index for index in self.order.mates(task.slot)}
        if stop.dump in mates:
            lane_lead = self.order.lead_of(task.slot, mates[stop.dump])
        first = self.rank - self.rank % self.spec.config.nproc  # groups of a cluster count on, and each is its own replay
        leader = lane_lead or first if stop.rank is None else first + stop.rank
        if collective:
            return self.stops.begin(dump_id, self.order.ranks_in(task.slot), leader, stop.dump is None or lane_lead is not None)
        if stop.rank is None and (stop.at == ERROR or stop.debugpy == 0):
            leader = self.rank
        return self.stops.begin(dump_id, [self.rank], leader, stop.dump in (None, dump_id) and leader == self.rank)

    def _asked_of(self, task: Task) -> set[str]:
        """Return which instruments examine a task's input: of all inputs of a slot, or none, if ranks compute together.

        Each step of an examination is written to the journal, so that its time does not count as a hang of the input.
        """
        collective = self.engine.collective
        if collective and self.spec.config.align == "shuffle":  # ranks are not in step there
            return set()
        here = self.order.mates(task.slot) if collective else [task.index]
        asked = {key for key, inputs in self._asked.items() if not set(inputs).isdisjoint(here)}
        return asked | {AT_END} if task.slot == self._last_slot else asked

    def _take_part_after_all(self, task: Task) -> None:
        """Run a neighbor's input after ours could not be read, so that the peers' collectives complete."""
        if len(self.order.ranks_in(task.slot)) > 1 and self.engine.collective:
            others = (index for index in (*self.order.mates(task.slot), *range(len(self.spec.inputs))) if index != task.index)
            other = next(others, None)
            if other is None:
                raise Restart("the only input cannot be read")
            self._take(Task(task.slot, other, Duty.FILL), lambda: self._load(other))

    def _resync(self, slot: int, *, failed: bool) -> None:
        """Wait until every peer has finished `slot` after a failure here.

        Raises Restart if this process is out of step or tainted, a peer died, or a peer does not finish within the grace period.
        """
        if not failed:
            if self.engine.out_of_step:
                raise Restart(self.engine.out_of_step)
            return
        if self.engine.tainted:
            raise Restart("the failure left this process in the middle of a step")
        if not (self.peers and self.engine.collective):
            return
        grace = min(max(GRACE_S, 2 * self._longest_input_s), self.spec.config.timeout_s / 2)
        deadline = time.monotonic() + grace
        while waiting := [peer.rank for peer in self._peers_now() if peer.slots_finished <= slot and not peer.done]:
            self._raise_if_a_peer_died(patience_s=0)
            if time.monotonic() > deadline:
                raise Restart(f"ranks {waiting} did not finish round {slot} within {grace:.0f} s of this rank's failure")
            time.sleep(0.05)

    def _raise_if_a_peer_died(self, patience_s: float = 0.5) -> None:
        """Raise Restart if a peer died. Waits a moment: a peer's sockets close before its process counts as dead.

        A peer on another node counts as dead once that node has written so, which takes longer.
        """
        if not self.engine.collective:
            return
        if any(peer.node != os.environ.get(NODE, "") for peer in self.peers):
            patience_s *= 6
        deadline = time.monotonic() + patience_s
        while self.peers:
            dead = [peer.rank for peer in self._peers_now() if not peer.is_alive()]
            if dead:
                raise Restart(f"ranks {dead} are gone")
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _peers_now(self) -> list[RankView]:
        for peer in self.peers:
            list(peer.poll(self.order.attempt))
        return self.peers

    def _write(self, event: str, **values: Any) -> None:
        self.journal.write(event, rank=self.rank, attempt=self.order.attempt, **values)
        self.flusher.note()


def end_with(supervisor: int) -> None:
    """Start a daemon thread that kills this process group when the supervisor is gone."""
    began = start_ticks(supervisor)

    def watch() -> None:
        while state_of(supervisor, began)[0] not in (GONE, ZOMBIE):
            time.sleep(0.25)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def redirect_output(path: Path) -> None:
    """Redirect file descriptors 1 and 2 to the log, including native code and child processes."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def main(make_engine: Callable[[Path, ReplaySpec, int], ActorEngine]) -> int:
    """Run the worker process. `make_engine(replay folder, spec, rank)` must not import anything heavy."""
    parser = argparse.ArgumentParser(prog="actordbg.replay.worker")
    parser.add_argument("--first-worker", type=int, default=0, help="the number of rank 0 among the workers of all groups")
    parser.add_argument("--supervisor", type=int, required=True, metavar="PID", help="end when this process ends")
    parser.add_argument(consent.PLUGIN, dest="plugin", metavar="MODULE", help="imported before a process group is made")
    parser.add_argument("--work", type=Path, required=True, help="the work order to run")
    parser.add_argument("--local_rank", help="passed by launchers, ignored; LOCAL_RANK says the same")
    parser.add_argument(consent.FLAG, dest="trusted", metavar="MODEL", help="the model whose own code may run")
    options = parser.parse_args()
    if options.trusted is not None:
        consent.give(options.trusted)
    consent.use_plugin(options.plugin)
    rank = options.first_worker + int(os.environ["RANK"])
    work: Path = options.work
    previous: Worker | None = None
    engine: ActorEngine | None = None
    while True:
        redirect_output(rank_log(work.parent, rank))
        order = WorkOrder.from_json(read_regular(work))
        spec = ReplaySpec.from_json(read_regular(work.parent / SPEC))
        if engine is None:
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
            end_with(options.supervisor)
            engine = make_engine(work.parent, spec, rank)
        worker = Worker(work.parent, spec, order, rank, engine, previous)
        code = worker.run()
        if code or not order.stay:
            return code
        if (following := await_next(work)) is None:
            engine.close()
            return 0
        work, previous = following, worker


def run_worker(make_engine: Callable[[Path, ReplaySpec, int], ActorEngine]) -> None:
    """Run `main`, and leave without exit handlers: torch's and gloo's can hang or crash, and there is nothing left to save."""
    exit_code = main(make_engine)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    run_worker(ActorEngine)
