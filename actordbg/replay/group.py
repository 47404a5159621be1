"""One group of workers under supervision: start it, watch it, judge it, and start it again without the culprit.

`GroupRun.step()` is called a few times a second and never waits long. An attempt ends in one of these ways:

    every rank wrote `done`          the group is finished
    a rank died                      its input crashed; the other inputs run again
    an input took too long           the supervisor takes stacks; the culprits hung; the other inputs run again
    a rank wrote `restart`           nobody is blamed; the inputs run again
    a rank wrote `broken`            the actor cannot be built: the replay stops
    three attempts without a result  the replay stops (LaunchProblem)
    its node or its host died        nobody is blamed; the inputs run again, here or in another group

A verdict is written only after every process of the attempt has ended and its journals were read to the end. So a result
that was written a moment before still counts.
"""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError, LaunchProblem, error_named
from actordbg.base.processes import TERMINATED, describe_status, start_ticks
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
    reported_by_launcher,
    was_told_to_end,
)


def as_error(broken: Event, log: str) -> ActordbgError:
    """The error of a worker that could not build its actor, in its own class where that is one of ours."""
    ours = error_named(broken["error_class"], broken["error"], broken["hint"])
    return ours or LaunchProblem(
        f"the actor cannot be built: {broken['error_class']}: {broken['error']}\n{log}".rstrip(),
        hint="`actordbg doctor` says what this environment lacks",
    )


LOG_BEFORE_STACKS = 1500
"""Characters of its log that the result of a hung input keeps, beside the stacks."""
START_TIMEOUT_S = 1800.0
"""Longest time for building the actor, and for anything else outside of an input."""


@dataclass
class Replay:
    """What the groups of a replay share, and report to: its `Supervisor`.

    warm: groups with a loaded Actor, used instead of `launcher`; the workers go back there when they are done. stops: where
    workers are to stop. dealer: where the groups get their inputs from, portion by portion; None: each has its own. losses: the
    count of lost groups, which several replays may share; None: each group counts its fruitless attempts itself.
    """

    folder: Path
    spec: ReplaySpec
    start_timeout_s: float = START_TIMEOUT_S
    launcher: Launcher = launch_group
    warm: WarmGroups | None = None
    stops: StopOrder = field(default_factory=StopOrder)
    losses: Losses | None = None
    engine: GroupEngine = field(default_factory=engine_in_use)
    dealer: Dealer | None = None

    def on_attempt(self, group: Group, attempt: int, reason: str) -> None:
        """A group starts; the reason is empty the first time."""

    def on_news(self, event: Event) -> None:
        """A worker wrote an event into its journal."""

    def on_verdict(self, record: ResultRecord) -> None:
        """An input killed or hung its worker."""


class GroupRun:
    """A group from its first attempt to its last result, which reports to its replay.

    `pending`: indices into the replay's inputs that have no result, in order. `attempt`: the last one, 0 before the first. Where
    the replay deals (`Dealer`), the group gets its inputs portion by portion. A group `waits` until the engine has a place
    for it, and holds no dealt input meanwhile.
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
        """Begin the next attempt as soon as there is a place for it."""
        self.finished, self._waits, self._reason = False, True, reason
        self._not_before = time.monotonic() + pause_s
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        """Begin the attempt on what is pending, or dealt now; with nothing pending the group is finished."""
        replay = self.replay
        if not (self.pending or replay.dealer):
            self.finished, self._waits = True, False
            return
        if time.monotonic() < self._not_before:
            return
        if not self._has_a_place():
            self._hand_back()  # those that have a place may hold what this one waits for
            return
        self._waits = False
        if replay.dealer is not None and not self.pending:
            self.pending = replay.dealer.deal()
        self.attempt += 1
        self._pending_before, self._leaving_since = len(self.pending), 0.0
        self._views = [RankView.begin(self.folder, rank) for rank in self.group.ranks]
        replay.on_attempt(self.group, self.attempt, self._reason)
        self._work = self._write_work()
        self._launcher_log = self.folder / LAUNCHER_LOG
        self._launched = replay.launcher(self.spec.config, self.group, self._work)
        self._launcher_log = self._launched.log

    def _has_a_place(self) -> bool:
        """Whether the engine has one; a place that is lost before anything ran in it is a failure, too."""
        try:
            return self.replay.engine.ready(self.spec.config, self.group)
        except PlaceLost as lost:
            if self.replay.losses is not None:
                self.replay.losses.count(*lost.args)
                self._not_before = time.monotonic() + self.replay.losses.pause_s
            return False

    def _write_work(self) -> Path:
        config, ranks, replay = self.spec.config, list(self.group.ranks), self.replay
        lanes = sorted({rank // config.lane_width for rank in ranks})
        if replay.dealer is None:
            slots = slots_for(config, lanes, self.pending, len(self.spec.inputs))
        else:
            slots = dealt_slots(self.pending, len(lanes))
        me, stay = (os.getpid(), start_ticks(os.getpid())), replay.warm is not None
        order = WorkOrder(self.attempt, ranks, [list(slot) for slot in slots], me, config.lane_width, stay, replay.stops)
        path = self.folder / f"work-{ranks[0]}-{self.attempt}.json"
        atomic_write(path, order.to_json().encode())
        return path

    def step(self) -> None:
        """Read what is new and act on it."""
        if self._waits:
            return self._start_if_ready()
        launched = self._launched
        assert launched is not None
        self._read_journals()
        self._look(launched)
        views, together = self._views, self.group.collective and any(view.collective for view in self._views)
        broken = next((view.broken for view in views if view.broken), None)
        asked = next((view for view in views if view.restart), None)
        if broken:
            self.stop()
            raise as_error(broken, self._last_words())
        gone = launched.ended()  # asked before what is lost: it may become so between the two, and is not a death then
        if loss := launched.lost:
            self._judge_loss(loss)
        elif all(view.done for view in views):
            self._let_leave(launched)
        elif any(view.dead for view in views):
            if launched.stands():
                self._judge_death(launched)
        elif asked:
            self._again(f"rank {asked.rank}: {asked.restart}")
        elif gone:
            self._look(launched)
            self._judge_death(launched)
        elif any(view.held_since is not None for view in views):
            pass  # somebody is at a prompt: no clock runs
        elif late := blame.overdue(views, time.monotonic(), self.spec.config.timeout_s, collective=together):
            if launched.stands():
                self._judge_hang(launched, late)
        else:
            self._check_silence(launched)
        return None

    def watched(self) -> list[int]:
        """File descriptors that become readable when a worker dies, where the kernel has such."""
        return self._launched.descriptors if self._launched is not None else []

    def stop(self) -> None:
        """End every process of the group; what the journals say by then is counted."""
        if self._launched is not None:
            self._launched.end()
            self._launched = None
            self._read_journals()
        self._waits = False

    def _read_journals(self) -> None:
        # of a group that records no results each rank runs alone an input that another rank, alone too, records
        only_follows = all(rank % self.spec.config.lane_width for rank in self.group.ranks)
        for view in self._views:
            for event in view.poll(self.attempt):
                kind, follows = event["event"], event["event"] == "filled" and event.get("follows")
                if kind == "boot" and self._launched is not None:
                    self._launched.watch((event["pid"], event["ticks"]))
                elif kind == "end" or (follows and (event["status"] != PASSED or only_follows)):
                    self._forget(event["dump_id"])
                self.replay.on_news(event)

    def _look(self, launched: Running) -> None:
        for view in self._views:
            view.look(launched.state_of)

    def _forget(self, dump_id: str) -> None:
        index = self._index.get(dump_id)
        if index in self.pending:
            self.pending.remove(index)

    def _let_leave(self, launched: Running) -> None:
        """Let the group wait for another replay's work, or leave. A launcher takes a second to notice."""
        if self.replay.warm is not None and not launched.ended():
            self.replay.warm.keep(self.group, launched, self._work)
            self._launched, self.finished = None, True
            return
        self._leaving_since = self._leaving_since or time.monotonic()
        if launched.ended() or time.monotonic() - self._leaving_since > LEAVE_S:
            self.stop()
            self.finished = True

    def _check_silence(self, launched: Running) -> None:
        """Outside of an input, no rank may be silent for longer than `start_timeout_s`."""
        now, longest_s = time.monotonic(), self.replay.start_timeout_s
        silent = [view.rank for view in self._views if not view.done and view.doing is None and now - view.since > longest_s]
        if silent:
            self._stacks(launched)
            self._again(f"ranks {silent} were silent for {longest_s:.0f} s outside of an input")

    def _judge_death(self, launched: Running) -> None:
        first = [copy.copy(view) for view in self._views]
        time.sleep(0.1)  # whoever dies as a consequence, or writes why, has done so by then
        self._read_journals()
        self._look(launched)
        dead = [view for view in self._views if view.dead]
        if all(view.done for view in self._views) or not (dead or launched.ended()):
            return  # it was done, and left between our look at its journal and our look at its process
        first = [before for before, view in zip(first, self._views, strict=True) if view.dead]
        for view in (*first, *dead):  # its launcher reaped it before we saw how it ended: one that SIGTERM ended left its stacks
            if view.dead and view.wait_status is None and was_told_to_end(self._view(view.rank).log()):
                view.wait_status = TERMINATED
        culprits = blame.culprits_of_death(first) or blame.culprits_of_death(self._views)
        how = {view.rank: self._how_it_ended(view) for view in dead}
        self.stop()
        for rank in culprits:
            self._blame(rank, CRASHED, "WorkerDied", f"the worker (rank {rank}) died in it: {how[rank]}")
        asked = "; ".join(f"rank {view.rank}: {view.restart}" for view in self._views if view.restart)
        died = "; ".join(f"rank {rank} died: {how[rank]}" for rank in culprits)
        self._again(died or asked or "the launcher ended")

    def _how_it_ended(self, view: RankView) -> str:
        if view.why or view.wait_status is not None:
            return view.why or describe_status(view.wait_status)
        return reported_by_launcher(self._launcher_log)

    def _judge_loss(self, loss: Loss) -> None:
        """The group is gone with its node: what it had not finished runs again, here or elsewhere."""
        self.stop()
        if self.replay.losses is not None and not loss.excused:
            self.replay.losses.count(loss.why, loss.dead_nodes)
        self._hand_back()
        self.start(loss.why)

    def _hand_back(self) -> None:
        """Let other groups have what this one was dealt and has not finished."""
        if self.replay.dealer is not None and self.pending:
            self.replay.dealer.give_back(self.pending)
            self.pending = []

    def _judge_hang(self, launched: Running, late: list[int]) -> None:
        stacks = self._stacks(launched)
        self._read_journals()
        self._look(launched)
        late = [view.rank for view in self._views if view.rank in late and view.doing is not None]
        culprits = blame.culprits_of_hang(self._views, late, stacks)
        standings = [blame.standing_of(view, stacks.get(view.rank, ""), self.spec, self.pending) for view in self._views]
        error = blame.describe(standings, self.spec.config.timeout_s)
        logs = {rank: before_stacks(self._view(rank).log())[-LOG_BEFORE_STACKS:] for rank in culprits}
        evidence = {rank: blame.excerpt(standings, culprits, log) for rank, log in logs.items()}
        self.stop()
        for rank in culprits:
            self._blame(rank, HUNG, "TimeoutError", error, evidence[rank])
        self._again(error if culprits else f"ranks {late} waited for a rank that failed")

    def _view(self, rank: int) -> RankView:
        return next(view for view in self._views if view.rank == rank)

    def _stacks(self, launched: Running) -> dict[int, str]:
        return launched.stacks(self.folder, {view.rank: view.identity for view in self._views if view.identity})

    def _blame(self, rank: int, status: str, error_class: str, error: str, evidence: str | None = None) -> None:
        """Write a result for what the rank is doing. `evidence`: the log excerpt, instead of the log's end.

        A filler stands for the input that it repeats. A follower stands for its lane's input, even if the first rank finished it.
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

    def _again(self, reason: str) -> None:
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
                hint=f"the logs are in {self.folder}; `actordbg doctor` checks this environment",
            )
        return self.start(reason)

    def _last_words(self) -> str:
        return last_words(self._launcher_log, self.folder, self.group.ranks)
