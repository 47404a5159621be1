"""Run a replay from its specification to its last result: launch workers, watch them, record verdicts, clean up.

    outcome = run_replay(store, plan.spec, on_event=print)
    outcome.counts                       # {"passed": 5, "crashed": 1}

`run_replay` writes `spec.json` and runs the groups of workers (`actordbg.replay.group`) until every input has a result. It writes
its verdicts and the final status to `supervisor.jsonl`:

    complete      every input has a result
    interrupted   Ctrl-C; KeyboardInterrupt is raised again after the clean-up; `actordbg replay --resume` continues
    failed        the workers cannot be started, or the machine failed; the error is raised, and earlier results stay

Finished results always stay: each is in its worker's journal before the next input starts, and on disk before the next result.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.actor.model_code import require_consent
from actordbg.base.errors import ActordbgError, Conflict, CorruptDump, StoreProblem, machine_fault, reason_of
from actordbg.base.fault import scrub
from actordbg.base.owners import Owner
from actordbg.base.processes import ALIVE, STOPPED, signals_to, start_ticks, state_of, wait_for_any
from actordbg.base.units import LAST, resolve
from actordbg.debug.meeting import Relay, clear_away
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.records.journal import (
    SPEC,
    SUPERVISOR,
    TENSORS,
    Event,
    Journal,
    last_supervisor,
    read_events,
    read_results,
    read_standing,
    result_of,
)
from actordbg.records.replay_record import KEPT_BYTES, ReplaySpec, ResultRecord
from actordbg.replay.group import GroupRun, Replay
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.launch import Group, groups_of
from actordbg.replay.plan import Dealer
from actordbg.replay.work_order import LaneBook
from actordbg.store.layout import Store, read_with_owner

POLL_S = 0.05
COMPLETE = "complete"
INTERRUPTED = "interrupted"
STOPPED_EARLY = "failed"


@dataclass(frozen=True)
class Progress:
    """An event of a running replay. kind: "attempt", "ready", "start" (of an input), "stop", "line", "result", or
    "leaving": every input has its result, and the workers stop. `text`: a description. `at`: where a breakpoint waits: HOST:PORT
    for an editor, or the address of a node whose prompts this terminal cannot reach.
    """

    kind: str
    text: str = ""
    result: ResultRecord | None = None
    at: str = ""


@dataclass
class ReplayOutcome:
    """The result of a replay. `resolved`: the configuration that the first worker reported."""

    replay_id: str
    folder: Path
    status: str
    total: int
    results: dict[str, ResultRecord] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Count the inputs by status."""
        return dict(Counter(record.status for record in self.results.values()))

    @property
    def all_passed(self) -> bool:
        """Check whether every input has a result and passed."""
        return len(self.results) == self.total and set(self.counts) <= {"passed"}


def run_replay(
    store: Store, spec: ReplaySpec, on_event: Callable[[Progress], None] = lambda event: None, *, folder: Path | None = None,
    **options: Any,
) -> ReplayOutcome:  # fmt: skip
    """Run every input of `spec` that has no result yet. `folder`: replaces `replays/<id>`. `options`: fields of `Supervisor`.

    Raises UnsafeInput for a model that ships code, without consent; StoreProblem if the folder cannot be written; LaunchProblem,
    or the worker's error, if the actor cannot be built. KeyboardInterrupt passes through after every process of the replay was
    ended.
    """
    require_consent(spec.config.model, store.models)
    folder = folder or store.replays / spec.replay_id
    with interruptible():
        try:
            if not (folder / SPEC).exists():
                make_folder(folder)
                if spec.config.keep_tensors or spec.config.keep_gradients:
                    make_folder(folder / TENSORS)
                atomic_write(folder / SPEC, spec.to_json())
            supervisor = Supervisor(folder, spec, on_event=on_event, **options)
        except OSError as error:
            for made in (folder / TENSORS, folder):  # without a specification it cannot be resumed
                with contextlib.suppress(OSError):
                    made.rmdir()
            raise machine_fault(error, folder) or StoreProblem(
                f"cannot write the replay's folder {folder}: {reason_of(error)}",
                hint=f"check that {store.replays} is a folder that you can write to",
            ) from None
        with supervisor.own_groups or contextlib.nullcontext():
            return supervisor.run()


def load_spec(store: Store, name: str) -> ReplaySpec:
    """Read a replay's specification by id, id prefix, or "last" (this user's newest); StoreProblem if there is none."""
    return spec_and_owner(store, name)[0]


def spec_and_owner(store: Store, name: str) -> tuple[ReplaySpec, Owner]:
    """Read a replay's specification and the user who wrote it: another user's needs confirmation before it runs."""
    ids = sorted(path.parent.name for path in store.replays.glob(f"*/{SPEC}"))
    if name in (LAST, f"@{LAST}"):  # a replay to resume may not have ended
        from actordbg.catalog.query import list_own_replays

        name, ids = LAST, [row.replay_id for row in reversed(list_own_replays(store, typed=True))] or ids
    elif not any(replay_id.startswith(name) for replay_id in ids):
        from actordbg.catalog.query import replay_named  # for a handle; an id needs no catalog

        name = replay_named(store, name)
    chosen = resolve(name, ids, "replay", made_by="replay", error=StoreProblem)
    path = store.replays / chosen / SPEC
    data, owner = read_with_owner(path)
    spec = ReplaySpec.from_json(data)
    if spec.replay_id != chosen:
        raise CorruptDump(f"{chosen}/{SPEC} is another replay's", hint="remove this replay's folder")
    return spec, owner


@dataclass
class Supervisor(Replay):
    """The state of one `run_replay`. Its groups report to it and share its fields.

    on_tick: called about 20 times a second. prompts: the user's terminal, which attaches to each prompt that opens. deal: any
    group may run any input, if the engine has several groups.
    """

    on_event: Callable[[Progress], None] = lambda event: None
    on_tick: Callable[[], None] = lambda: None
    prompts: Relay | None = None
    deal: bool = True

    def __post_init__(self) -> None:
        folder, spec, deals = self.folder, self.spec, self.deal and self.engine.deals(self.spec.config)
        self.own_groups = WarmGroups(self.launcher) if deals and self.warm is None else None
        self.warm = self.warm or self.own_groups
        self.launcher = self.warm.launch if self.warm else self.launcher
        self._relay = self.prompts or Relay()
        if cut_off := _was_cut_off(folder, spec.replay_id):
            self.engine.await_end(spec.replay_id, folder)
        ended_well = not cut_off and read_standing(folder)[1] == COMPLETE
        done = {name: record for name, record in read_results(folder).items() if ended_well or is_whole(folder, record)}
        self.outcome = ReplayOutcome(spec.replay_id, folder, INTERRUPTED, len(spec.inputs), done)
        self._book = LaneBook(spec.replay_id, spec.config.lane_width, done.values())
        self.journal = Journal(folder / SUPERVISOR)
        for path in sorted(folder.glob("rank*.jsonl")) if spec.config.lane_width > 1 else ():
            for event in read_events(path):  # from followers in earlier runs of the replay
                if event["event"] == "filled":
                    self.on_news(event)
        self._fresh, self._leaving = True, False
        self.losses = self.losses or self.engine.losses()
        left = [index for index, item in enumerate(spec.inputs) if item.dump_id not in done]
        groups = usual = groups_of(spec.config)
        offered = self.engine.groups(spec.config, len(left))  # also refuses what has no room
        if deals:
            groups = offered
            if len(groups) > 1 or groups != usual:  # a single group runs the plan's slots, as on one machine
                self.dealer = Dealer(spec.inputs, left, spec.config.lanes if len(groups[0]) > 1 else 1, len(groups))
        self._groups = []
        for group in groups:
            orders = folder.glob(f"work-{group[0]}-*.json")
            before = max((int(path.stem.rpartition("-")[2]) for path in orders), default=0)
            self._groups.append(GroupRun(self, group, self._pending(group, set(done)), before))

    def _pending(self, group: Group, done: set[str]) -> list[int]:
        """Return a group's inputs without a result; [] if inputs are dealt."""
        config = self.spec.config
        lanes = {rank // config.lane_width for rank in group}
        indices = () if self.dealer is not None else range(len(self.spec.inputs))
        mine = {index: self.spec.inputs[index].dump_id for index in indices if index % config.lanes in lanes}
        only_follows = all(rank % config.lane_width for rank in group)
        if only_follows:  # its own answers count, not the results that others recorded
            done = {dump_id for dump_id in mine.values() if self._book.answered(dump_id, group[0])}
        return [index for index, dump_id in mine.items() if dump_id not in done]

    def run(self) -> ReplayOutcome:
        """Run until nothing is pending or an error stops it. No process is left in either case."""
        self.journal.append("supervisor", pid=_me()[0], ticks=_me()[1])
        self.outcome.status = STOPPED_EARLY
        reason = {}
        try:
            for group in self._groups:
                group.start()
            while running := [group for group in self._groups if not group.finished]:
                self._watch(running)
            self.outcome.status = COMPLETE
        except KeyboardInterrupt:
            self.outcome.status = INTERRUPTED
            raise
        except (ActordbgError, OSError) as error:
            problem = machine_fault(error, self.folder) or error
            reason = {"why": scrub(str(problem))} if str(problem) else {}
            raise problem from None
        finally:
            self._relay.close()
            with undisturbed():
                for group in self._groups:
                    group.stop()
                clear_away(self.folder)
                with contextlib.suppress(OSError):  # a full disk: it then reads as cut off, which it was
                    self.journal.append("finished", status=self.outcome.status, finished_at=now_timestamp(), **reason)
                self.journal.close()
                self.on_tick()
        return self.outcome

    def _watch(self, running: list[GroupRun]) -> None:
        """Step all groups once, and wait for news. Groups that finished their portion get the next one."""
        for group in running:
            group.step()
        for group in self._groups:
            if self.dealer and group.finished:  # including inputs that a lost group gave back
                group.start()
        for text in self.engine.news():
            self.on_event(Progress("line", text))
        if not self._leaving and len(self.outcome.results) == self.outcome.total:
            self._leaving = True
            self.on_event(Progress("leaving", "stopping the workers"))
        self.on_tick()
        wait_for_any([*self._relay.descriptors(), *(fd for group in running for fd in group.watched())], POLL_S)
        self._relay.step()

    def on_attempt(self, group: Group, attempt: int, reason: str) -> None:
        where = self.engine.facts_of(group)
        self.journal.append("attempt", attempt=attempt, ranks=list(group), reason=reason, **where)
        self.outcome.restarts += bool(reason)
        self._fresh = True
        self.on_event(Progress("attempt", reason))

    def on_news(self, event: Event) -> None:
        """Handle an event that a worker wrote to its journal."""
        kind = event["event"]
        if kind == "ready":
            if not self.outcome.resolved:
                self.outcome.resolved = event["resolved"]
                self.journal.append("resolved", resolved=event["resolved"])
            self.on_event(Progress("ready", f"rank {event['rank']}"))
        elif kind == "start":  # the first input of a start under torch.compile compiles
            length = next((item.seq_len for item in self.spec.inputs if item.dump_id == event["dump_id"]), None)
            compiling = "compiling: " if self.spec.config.compiles and self._fresh else ""
            self.on_event(Progress("start", f"{compiling}S {length}, {event['dump_id']}"))
        elif kind == "end":
            record = result_of(event)
            self._tell(record)
            self._amend(self._book.take_result(record))
        elif kind == "stop":
            node = event.get("node_address", "")
            here = not node or self.engine.is_here(node)
            at = event.get("editor") or ("" if here else node)
            self.on_event(Progress("stop", f"rank {event['rank']} stops {event['place']}", at=at))
            if self.prompts is not None and here:
                self._relay.call(self.folder, event["rank"])
        elif kind == "line":
            self.on_event(Progress("line", event["text"]))
        elif kind == "filled" and event.get("follows"):
            self._amend(self._book.take_answer(event))

    def on_verdict(self, record: ResultRecord) -> None:
        self._amend(record)
        self._book.take_result(record)

    def _amend(self, record: ResultRecord | None) -> None:
        """Record a result that no worker writes: a verdict, or the result of a lane."""
        if record is not None:
            self.journal.append("end", **record.to_dict())
            self._tell(record)

    def _tell(self, record: ResultRecord) -> None:
        """Report a result, unless it replaces an earlier one."""
        self._fresh = False
        known = record.dump_id in self.outcome.results
        self.outcome.results[record.dump_id] = record
        if not known:
            self.on_event(Progress("result", record.status, record))


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Treat SIGTERM and SIGHUP (a closed terminal) like Ctrl-C inside the block, so that they also clean up.

    An ignored signal (SIGHUP under nohup) stays ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    return signals_to(interrupt, heeded)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Ignore Ctrl-C inside the block: a second one must not leave processes behind."""
    return signals_to(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def _me() -> tuple[int, int]:
    return os.getpid(), start_ticks(os.getpid())


def is_whole(folder: Path, record: ResultRecord) -> bool:
    """Check whether a result's tensors reached the disk: after a power cut or on a full disk, they may lag the journal."""
    size = record.extra.get(KEPT_BYTES)
    try:
        kept = folder / TENSORS / f"{record.dump_id}.safetensors"
        return size is None or kept.stat().st_size == size
    except OSError:
        return False


def _was_cut_off(folder: Path, replay_id: str) -> bool:
    """Check whether another process died while it ran this replay. Conflict if it is alive: two would run every input twice."""
    if (last := last_supervisor(folder)) is None or (last["pid"], last["ticks"]) == _me():
        return False
    pid, ticks = last["pid"], last["ticks"]
    if state_of(pid, ticks)[0] in (ALIVE, STOPPED):
        raise Conflict(f"replay {replay_id} is being run by process {pid}", hint="wait for it, or end it with Ctrl-C")
    return True
