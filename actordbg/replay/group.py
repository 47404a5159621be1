"""Supervise a group of workers: start it, watch it, find the culprit of a failure, and restart the group without that input.

`GroupRun.step()` is called a few times a second and never waits long. An attempt ends in one of these ways:

    every rank wrote `done`          the group is finished
    a rank died                      its input crashed; the other inputs run again
    an input took too long           the supervisor takes stacks; the culprits hung; the other inputs run again
    a rank wrote `restart`           nobody is blamed; the inputs run again
    a rank wrote `broken`            the actor cannot be built: the replay stops
    three attempts without a result  the replay stops (LaunchProblem)
    its node or its host died        nobody is blamed; the inputs run again, here or in another group

A verdict is written only after every process of the attempt has ended and its journals were read to the end. So a result
written a moment earlier still counts.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.actor.signatures import explain, signature_of
from actordbg.base.errors import ActordbgError, LaunchProblem, error_named
from actordbg.base.processes import TERMINATED, describe_status
from actordbg.debug.replay_stops import StopOrder
from actordbg.formats.store_files import atomic_write
from actordbg.records.journal import Event
from actordbg.records.replay_record import CRASHED, HUNG, PASSED, ReplaySpec, ResultRecord
from actordbg.replay import blame
from actordbg.replay.group_engine import (
    FRUITLESS_LIMIT,
    LEAVE_S,
    GroupEngine,
    Losses,
    PlaceLost,
    WarmGroups,
    engine_in_use,
    launch_group,
)
from actordbg.replay.launch import Group, Launcher, Loss, Running
from actordbg.replay.plan import Dealer, dealt_slots, slots_for
from actordbg.replay.rank_view import RankView
from actordbg.replay.work_order import WorkOrder, result_from
from actordbg.replay.worker_logs import (
    EXCERPT,
    LAUNCHER_LOG,
    before_stacks,
    last_words,
    status_by_launcher,
    was_told_to_end,
)

_OF_BUILDING = ("attention-missing", "checkpoint-broken", "flash-attention-missing", "flash-attention-dtype")
"""Known failures whose ways out fit where no input has run yet."""


def as_error(broken: Event, log: str) -> ActordbgError:
    """Return the error of a worker that could not build its actor: its own class if actordbg defines it, else LaunchProblem."""
    ours = error_named(broken["error_class"], broken["error"], broken["hint"])
    signature = signature_of(broken["error_class"], broken["error"])
    known = explain(signature) if signature in _OF_BUILDING else None
    message = f"the actor cannot be built: {broken['error_class']}: {broken['error']}"
    if known is not None:
        return LaunchProblem(f"{message}\n{known[0]}", hint="try: " + "; or ".join(known[1]))
    hint = "run `actordbg doctor` to see what this environment lacks"
    return ours or LaunchProblem(f"{message}\n{log}".rstrip(), hint=hint)


LOG_BEFORE_STACKS = 1500
"""Characters of the worker's log that the result of a hung input keeps, besides the stacks."""


@dataclass
class Replay:
    """The state that a replay's groups share and report to; `Supervisor` implements the callbacks.

    start_timeout_s: longest time to build the actor, and for anything else outside of an input. warm: groups with a loaded Actor,
    used instead of `launcher`; the workers return there when they are done. stops: breakpoints. losses: the count of lost groups,
    which several replays may share; None: each group counts its own fruitless attempts. dealer: hands inputs to the groups
    portion by portion; None: each group has its own.
    """

    folder: Path
    spec: ReplaySpec
    start_timeout_s: float = 1800.0
    launcher: Launcher = launch_group
    warm: WarmGroups | None = None
    stops: StopOrder = field(default_factory=StopOrder)
    losses: Losses | None = None
    engine: GroupEngine = field(default_factory=engine_in_use)
    dealer: Dealer | None = None

    def on_attempt(self, group: Group, attempt: int, reason: str) -> None:
        """Report that a group starts; the reason is empty the first time."""

    def on_news(self, event: Event) -> None:
        """Report an event that a worker wrote to its journal."""

    def on_verdict(self, record: ResultRecord) -> None:
        """Report the result of an input that killed or hung its worker."""


class GroupRun:
    """A group from its first attempt to its last result; it reports to its replay.

    `pending`: indices of inputs without a result, in order. `attempt`: the current one, 0 before the first. If the replay has a
    `Dealer`, the group gets its inputs portion by portion. A group waits (`_waits`) until the engine has a place for it, and
    holds no dealt inputs meanwhile.
    """

    def __init__(self, replay: Replay, group: Group, pending: list[int], attempt: int) -> None:
        self.replay, self.spec, self.folder = replay, replay.spec, replay.folder
        self.group, self.pending, self.attempt = group, pending, attempt
        self.finished, self._waits, self._reason, self._not_before = False, False, "", 0.0
        self._views: list[RankView] = []
        self._launched: Running | None = None
        self._work, self._launcher_log = Path(), Path()
        self._blamed: set[str] = set()
        self._fruitless, self._pending_before, self._leaving_since = 0, 0, 0.0
        self._index = {item.dump_id: index for index, item in enumerate(self.spec.inputs)}

    def start(self, reason: str = "", pause_s: float = 0.0) -> None:
        """Start the next attempt as soon as there is a place for it."""
        self.finished, self._waits, self._reason = False, True, reason
        self._not_before = time.monotonic() + pause_s
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        """Start the attempt on the pending inputs, or on a new portion; with nothing pending the group is finished."""
        replay = self.replay
        if not (self.pending or replay.dealer):
            self.finished, self._waits = True, False
            return
        if time.monotonic() < self._not_before:
            return
        if not self._has_a_place():
            self._hand_back()  # the groups that have a place may hold what this group waits for
            return
        self._waits = False
        if replay.dealer is not None and not self.pending:
            self.pending = replay.dealer.deal()
        self.attempt += 1
        self._pending_before, self._leaving_since = len(self.pending), 0.0
        self._views = [RankView.begin(self.folder, rank) for rank in self.group]
        replay.on_attempt(self.group, self.attempt, self._reason)
        self._work = self._write_work()
        self._launcher_log = self.folder / LAUNCHER_LOG
        self._launched = replay.launcher(self.spec.config, self.group, self._work)
        self._launcher_log = self._launched.log

    def _has_a_place(self) -> bool:
        """Check whether the engine has a place for this group. A place lost before anything ran in it also counts as a loss."""
        try:
            return self.replay.engine.ready(self.spec.config, self.group)
        except PlaceLost as lost:
            if self.replay.losses is not None:
                self.replay.losses.count(*lost.args)
                self._not_before = time.monotonic() + self.replay.losses.pause_s
            return False

    def _write_work(self) -> Path:
        config, replay = self.spec.config, self.replay
        lanes = sorted({rank // config.lane_width for rank in self.group})
        if replay.dealer is None:
            slots = slots_for(config, lanes, self.pending, len(self.spec.inputs))
        else:
            slots = dealt_slots(self.pending, len(lanes))
        order = WorkOrder(
            self.attempt,
            list(self.group),
            [list(slot) for slot in slots],
            width=config.lane_width,
            stay=replay.warm is not None,
            stops=replay.stops,
        )
        path = self.folder / f"work-{self.group.start}-{self.attempt}.json"
        atomic_write(path, order.to_json())
        return path

    def step(self) -> None:
        """Read new events and act on them."""
        if self._waits:
            return self._start_if_ready()
        launched = self._running
        self._read_journals()
        self._look()
        views, together = self._views, len(self.group) > 1 and any(view.collective for view in self._views)
        broken = next((view.broken for view in views if view.broken), None)
        restarting = next((view for view in views if view.restart), None)
        if broken:
            self.stop()
            raise as_error(broken, self._last_words())
        gone = launched.ended()  # checked before `lost`: a group that is lost in between did not crash
        if loss := launched.lost:
            self._judge_loss(loss)
        elif all(view.done for view in views):
            self._let_leave()
        elif any(view.dead for view in views):
            if launched.stands():
                self._judge_death()
        elif restarting:
            self._restart(f"rank {restarting.rank}: {restarting.restart}")
        elif gone:
            self._look()
            self._judge_death()
        elif any(view.held_since is not None for view in views):
            pass  # somebody is at a prompt: no clock runs
        elif late := blame.overdue(views, time.monotonic(), self.spec.config.timeout_s, collective=together):
            if launched.stands():
                self._judge_hang(late)
        else:
            self._check_silence()
        return None

    @property
    def _running(self) -> Running:
        """The processes of this attempt, until `stop`."""
        assert self._launched is not None
        return self._launched

    def watched(self) -> list[int]:
        """Return file descriptors that become readable when a worker dies; [] if the kernel has none."""
        return self._launched.descriptors if self._launched is not None else []

    def stop(self) -> None:
        """End every process of the group, then read its journals to the end."""
        if self._launched is not None:
            self._launched.end()
            self._launched = None
            self._read_journals()
        self._waits = False

    def _read_journals(self) -> None:
        # in a group that records no results, each rank runs alone, and another lone rank records that input
        width = self.spec.config.lane_width
        only_follows = all(rank % width for rank in self.group)
        for view in self._views:
            for event in view.poll(self.attempt):
                kind, follows = event["event"], event["event"] == "filled" and event.get("follows")
                if kind == "boot" and self._launched is not None:
                    self._launched.watch((event["pid"], event["ticks"]))
                elif kind == "end" or (follows and (event["status"] != PASSED or only_follows)):
                    self._forget(event["dump_id"])
                self.replay.on_news(event)

    def _look(self) -> None:
        for view in self._views:
            view.look(self._running.state_of)

    def _forget(self, dump_id: str) -> None:
        index = self._index.get(dump_id)
        if index in self.pending:
            self.pending.remove(index)

    def _let_leave(self) -> None:
        """Keep the group for another replay, or let it leave. A launcher takes a second to notice."""
        if self.replay.warm is not None and not self._running.ended():
            self.replay.warm.keep(self.group, self._running, self._work)
            self._launched, self.finished = None, True
            return
        self._leaving_since = self._leaving_since or time.monotonic()
        if self._running.ended() or time.monotonic() - self._leaving_since > LEAVE_S:
            self.stop()
            self.finished = True

    def _check_silence(self) -> None:
        """Restart the group if a rank outside of an input was silent for longer than `start_timeout_s`."""
        now, longest_s = time.monotonic(), self.replay.start_timeout_s
        silent = [view.rank for view in self._views if not view.done and view.doing is None and now - view.since > longest_s]
        if silent:
            self._stacks()
            self._restart(f"ranks {silent} were silent for {longest_s:.0f} s outside of an input")

    def _judge_death(self) -> None:
        first = [copy.copy(view) for view in self._views]
        time.sleep(0.1)  # by then, ranks that die as a consequence have died or written why
        self._read_journals()
        self._look()
        dead = [view for view in self._views if view.dead]
        if all(view.done for view in self._views) or not (dead or self._running.ended()):
            return  # it finished and left after we read its journal and before we looked at its process
        first = [before for before, view in zip(first, self._views, strict=True) if view.dead]
        for view in (*first, *dead):  # its launcher reaped it first, but a rank that SIGTERM ended left its stacks
            if view.dead and view.wait_status is None and was_told_to_end(self._view(view.rank).log()):
                view.wait_status = TERMINATED
        culprits = blame.culprits_of_death(first) or blame.culprits_of_death(self._views)
        how = {view.rank: self._how_it_ended(view) for view in dead}
        self.stop()
        for rank in culprits:
            self._blame(rank, CRASHED, "WorkerDied", f"the worker (rank {rank}) died in it: {how[rank]}")
        restarts = "; ".join(f"rank {view.rank}: {view.restart}" for view in self._views if view.restart)
        died = "; ".join(f"rank {rank} died: {how[rank]}" for rank in culprits)
        self._restart(died or restarts or "the launcher ended")

    def _how_it_ended(self, view: RankView) -> str:
        if view.why or view.wait_status is not None:
            return view.why or describe_status(view.wait_status)
        return describe_status(status_by_launcher(self._launcher_log))

    def _judge_loss(self, loss: Loss) -> None:
        """Handle a group that is gone with its node: unfinished inputs run again, here or elsewhere."""
        self.stop()
        if self.replay.losses is not None and not loss.excused:
            self.replay.losses.count(loss.why, loss.dead_nodes)
        self._hand_back()
        self.start(loss.why)

    def _hand_back(self) -> None:
        """Return dealt inputs that are not finished, for other groups to run."""
        if self.replay.dealer is not None and self.pending:
            self.replay.dealer.give_back(self.pending)
            self.pending = []

    def _judge_hang(self, late: list[int]) -> None:
        stacks = self._stacks()
        self._read_journals()
        self._look()
        late = [view.rank for view in self._views if view.rank in late and view.doing is not None]
        culprits = blame.culprits_of_hang(self._views, late, stacks)
        standings = [blame.standing_of(view, stacks.get(view.rank, ""), self.spec, self.pending) for view in self._views]
        error = blame.describe(standings, self.spec.config.timeout_s)
        logs = {rank: before_stacks(self._view(rank).log())[-LOG_BEFORE_STACKS:] for rank in culprits}
        evidence = {rank: blame.excerpt(standings, culprits, log) for rank, log in logs.items()}
        self.stop()
        for rank in culprits:
            self._blame(rank, HUNG, "TimeoutError", error, evidence[rank])
        self._restart(error if culprits else f"ranks {late} waited for a rank that failed")

    def _view(self, rank: int) -> RankView:
        return next(view for view in self._views if view.rank == rank)

    def _stacks(self) -> dict[int, str]:
        return self._running.stacks(self.folder, {view.rank: view.identity for view in self._views if view.identity})

    def _blame(self, rank: int, status: str, error_class: str, error: str, evidence: str | None = None) -> None:
        """Write a result for the input that the rank is running. `evidence`: the log excerpt; default: the end of its log.

        A filler counts as the input that it repeats, a follower as its lane's input, even if the first rank finished that.
        """
        view = self._view(rank)
        doing = view.doing
        if doing is None or doing["dump_id"] in self._blamed:
            return
        if self._index.get(doing["dump_id"]) not in self.pending and not doing.get("follows"):
            return
        self._blamed.add(doing["dump_id"])
        log = view.log() if evidence is None else evidence
        record = result_from(
            self.spec.replay_id,
            doing,
            status=status,
            error_class=error_class,
            error=error,
            signature=signature_of(error_class, error, log),
            log_excerpt=log[-EXCERPT:] if evidence is None else evidence,
        )
        self._forget(record.dump_id)
        self.replay.on_verdict(record)

    def _restart(self, reason: str) -> None:
        """Restart with the remaining inputs unless too many attempts were fruitless."""
        log, losses = self._last_words(), self.replay.losses
        self.stop()
        fruitless = len(self.pending) == self._pending_before
        if losses is not None:
            if fruitless:
                losses.count(reason, details=log)
            return self.start(reason, losses.pause_s if fruitless else 0.0)
        self._fruitless = self._fruitless + 1 if fruitless else 0
        if self._fruitless >= FRUITLESS_LIMIT:
            raise LaunchProblem(
                f"{FRUITLESS_LIMIT} attempts in a row ended without a result; the last one: {reason}\n{log}".rstrip(),
                hint=f"read the logs in {self.folder}, or run `actordbg doctor` to check this environment",
            )
        return self.start(reason)

    def _last_words(self) -> str:
        return last_words(self._launcher_log, self.folder, self.group)
