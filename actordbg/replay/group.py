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

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError, LaunchProblem, error_named
from actordbg.base.processes import ALIVE, TERMINATED, describe_status, start_ticks
from actordbg.debug.replay_stops import StopOrder
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import atomic_write
from actordbg.records.journal import Event
from actordbg.records.replay_record import CRASHED, HUNG, PASSED, ReplaySpec, ResultRecord
from actordbg.replay import blame as verdict
from actordbg.replay import hang
from actordbg.replay.blame import Seen
from actordbg.replay.dealing import Dealer, dealt_slots
from actordbg.replay.group_engine import FRUITLESS_LIMIT, GroupEngine, Losses, PlaceLost, engine_in_use
from actordbg.replay.hang import standing_of
from actordbg.replay.launch import Group, Launcher, Running
from actordbg.replay.plan import slots_for
from actordbg.replay.rank_view import RankView
from actordbg.replay.work_order import WorkOrder
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
        hint="`actordbg actor init` with the same options tries only that",
    )


START_TIMEOUT_S = 1800.0
"""Longest time for building the actor, and for anything else outside of an input."""
LOG_BEFORE_STACKS = 1500
"""Characters of its log that the result of a hung input keeps, beside the stacks."""
LEAVE_S = 15.0
"""Longest time for processes to leave after their last result."""


@dataclass
class GroupRun:
    """A group from its first attempt to its last result.

    `pending`: indices into `spec.inputs` that have no result, in order. `attempt`: the last one, 0 before the first. `launch`
    starts the processes of an attempt, or gives its work to a group that waits; `keep`, if there is one, takes over a group that
    finished its work and waits for another replay's. `on_event` hears of what the workers write ("ready", "start", "end", and
    "filled" by followers), `on_attempt` of each start and its reason (empty the first time), `on_verdict` of an input that
    killed or hung its worker. `stops`: where the workers are to stop.

    dealer: where the group gets its inputs from, portion by portion; None: all are its own. losses: the replay's count of lost
    groups; None: the group counts its fruitless attempts itself. A group `waits` until the engine has a place for it, and holds
    no dealt input meanwhile.
    """

    folder: Path
    spec: ReplaySpec
    group: Group
    pending: list[int]
    launch: Launcher
    keep: Callable[[Group, Running, Path], None] | None
    on_event: Callable[[Event], None]
    on_attempt: Callable[[Group, int, str], None]
    on_verdict: Callable[[ResultRecord], None]
    attempt: int = 0
    start_timeout_s: float = START_TIMEOUT_S
    stops: StopOrder = field(default_factory=StopOrder)
    dealer: Dealer | None = None
    losses: Losses | None = None
    engine: GroupEngine = field(default_factory=engine_in_use)
    finished: bool = False
    _waits: bool = False
    _reason: str = ""
    _not_before: float = 0.0
    _views: list[RankView] = field(default_factory=list)
    _launched: Running | None = None
    _work: Path = Path()
    _launcher_log: Path = Path()
    _blamed: set[str] = field(default_factory=set)
    _fruitless: int = 0
    _pending_before: int = 0
    _leaving_since: float = 0.0

    def __post_init__(self) -> None:
        self._index = {item.dump_id: index for index, item in enumerate(self.spec.inputs)}

    def start(self, reason: str = "", pause_s: float = 0.0) -> None:
        """Begin the next attempt as soon as there is a place for it."""
        self.finished, self._waits, self._reason = False, True, reason
        self._not_before = time.monotonic() + pause_s
        self._start_if_ready()

    def _start_if_ready(self) -> None:
        """Begin the attempt on what is pending, or dealt now; with nothing pending the group is finished."""
        if not (self.pending or self.dealer):
            self.finished, self._waits = True, False
            return
        if time.monotonic() < self._not_before:
            return
        if not self._has_a_place():
            self._hand_back()  # those that have a place may hold what this one waits for
            return
        self._waits, reason = False, self._reason
        if self.dealer is not None and not self.pending:
            self.pending = self.dealer.deal()
        self.attempt += 1
        self._pending_before = len(self.pending)
        self._leaving_since = 0.0
        self._views = [RankView.begin(self.folder, rank) for rank in self.group.ranks]
        self.on_attempt(self.group, self.attempt, reason)
        self._work = self._write_work()
        self._launcher_log = self.folder / LAUNCHER_LOG
        self._launched = self.launch(self.spec.config, self.group, self._work)
        self._launcher_log = self._launched.log

    def _has_a_place(self) -> bool:
        """Whether the engine has one; a place that is lost before anything ran in it is a failure, too."""
        try:
            return self.engine.ready(self.spec.config, self.group)
        except PlaceLost as lost:
            if self.losses is not None:
                self.losses.count(*lost.args)
                self._not_before = time.monotonic() + self.losses.pause_s
            return False

    def step(self) -> None:
        """Read what is new and act on it."""
        if self._waits:
            return self._start_if_ready()
        self._read_journals()
        seen = [self._look(view) for view in self._views]
        broken = next((view.broken for view in self._views if view.broken), None)
        asked = next((view for view in self._views if view.restart), None)
        if broken:
            self.stop()
            raise as_error(broken, self._last_words())
        gone = self._launcher_is_gone()  # asked before what is lost: it may become so between the two, and is no death then
        if self._launched is not None and self._launched.lost:
            self._judge_loss(self._launched)
        elif all(view.done for view in self._views):
            self._let_leave()
        elif any(one.dead for one in seen):
            if self._stands():
                self._judge_death(seen)
        elif asked:
            self._again(f"rank {asked.rank}: {asked.restart}")
        elif gone:
            self._judge_death([self._look(view) for view in self._views])
        elif any(view.held_since is not None for view in self._views):
            pass  # somebody is at a prompt: no clock runs
        elif late := self._overdue(seen):
            if self._stands():
                self._judge_hang(late)
        else:
            self._check_silence()
        return None

    def _look(self, view: RankView) -> Seen:
        return view.seen(self._launched.state_of if self._launched is not None else lambda identity: (ALIVE, None))

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

    def _write_work(self) -> Path:
        config, ranks = self.spec.config, list(self.group.ranks)
        lanes = sorted({rank // config.lane_width for rank in ranks})
        if self.dealer is None:
            slots = [list(slot) for slot in slots_for(config, lanes, self.pending, len(self.spec.inputs))]
        else:
            slots = [list(slot) for slot in dealt_slots(self.pending, len(lanes))]
        me = os.getpid()
        order = WorkOrder(self.attempt, ranks, slots, (me, start_ticks(me)), config.lane_width, self.keep is not None)
        order = replace(order, stops=self.stops.to_dict())
        path = self.folder / f"work-{self.group.ranks[0]}-{self.attempt}.json"
        atomic_write(path, order.to_json().encode())
        return path

    def _read_journals(self) -> None:
        for view in self._views:
            for event in view.poll(self.attempt):
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        kind = event["event"]
        if kind == "boot" and self._launched is not None:
            self._launched.watch((event["pid"], event["ticks"]))
        elif kind == "end" or (kind == "filled" and event.get("follows") and (event["status"] != PASSED or self._only_follows)):
            self._forget(event["dump_id"])
        self.on_event(event)

    @property
    def _only_follows(self) -> bool:
        """Whether no rank of this group records results: each runs alone an input that another rank, alone too, records."""
        return all(rank % self.spec.config.lane_width for rank in self.group.ranks)

    def _forget(self, dump_id: str) -> None:
        index = self._index.get(dump_id)
        if index in self.pending:
            self.pending.remove(index)

    def _let_leave(self) -> None:
        """Let the group wait for another replay's work, or leave. A launcher takes a second to notice."""
        if self.keep is not None and not self._launcher_is_gone():
            assert self._launched is not None
            self.keep(self.group, self._launched, self._work)
            self._launched = None
            self.finished = True
            return
        self._leaving_since = self._leaving_since or time.monotonic()
        if self._launcher_is_gone() or time.monotonic() - self._leaving_since > LEAVE_S:
            self.stop()
            self.finished = True

    def _launcher_is_gone(self) -> bool:
        return self._launched is None or self._launched.ended()

    def _stands(self) -> bool:
        """Whether nothing but its workers can be to blame: their machines live."""
        return self._launched is None or self._launched.stands()

    def _overdue(self, seen: list[Seen]) -> list[int]:
        timeout_s = self.spec.config.timeout_s
        collective = self.group.collective and any(view.collective for view in self._views)
        return verdict.overdue(seen, time.monotonic(), timeout_s, collective=collective)

    def _check_silence(self) -> None:
        """Outside of an input, no rank may be silent for longer than `start_timeout_s`."""
        now = time.monotonic()
        idle = (view for view in self._views if not view.done and view.doing is None)
        silent = [view.rank for view in idle if now - view.since > self.start_timeout_s]
        if silent:
            self._stacks()
            self._again(f"ranks {silent} were silent for {self.start_timeout_s:.0f} s outside of an input")

    def _judge_death(self, first: list[Seen]) -> None:
        time.sleep(0.1)  # whoever dies as a consequence, or writes why, has done so by then
        self._read_journals()
        later = [_or_later(before, self._look(view)) for before, view in zip(first, self._views, strict=True)]
        dead = [one.rank for one in later if one.dead]
        if not dead and not self._launcher_is_gone():
            return  # it was done, and left between our look at its journal and our look at its process
        if all(view.done for view in self._views):
            return  # the same, for everybody
        first = self._with_evidence([one for one in first if one.rank in dead])
        later = self._with_evidence(later)
        culprits = verdict.culprits_of_death(first) or verdict.culprits_of_death(later)
        how = {one.rank: self._how_it_ended(one) for one in later if one.dead}
        self.stop()
        for rank in culprits:
            self._blame(rank, CRASHED, "WorkerDied", f"the worker (rank {rank}) died in it: {how[rank]}")
        asked = "; ".join(f"rank {view.rank}: {view.restart}" for view in self._views if view.restart)
        died = "; ".join(f"rank {rank} died: {how[rank]}" for rank in culprits)
        self._again(died or asked or "the launcher ended")

    def _with_evidence(self, seen: list[Seen]) -> list[Seen]:
        """Fill in the exit status of a worker that its launcher reaped first: one that SIGTERM ended left its stacks."""
        logs = {view.rank: view.log() for view in self._views}
        unseen = (one for one in seen if one.dead and one.wait_status is None)
        unknown = {one.rank for one in unseen if was_told_to_end(logs[one.rank])}
        return [replace(one, wait_status=TERMINATED) if one.rank in unknown else one for one in seen]

    def _how_it_ended(self, seen: Seen) -> str:
        if seen.why or seen.wait_status is not None:
            return seen.why or describe_status(seen.wait_status)
        return reported_by_launcher(self._launcher_log)

    def _judge_loss(self, launched: Running) -> None:
        """The group is gone with its node: what it had not finished runs again, here or elsewhere."""
        why = launched.lost
        self.stop()
        if self.losses is not None and not launched.excused:
            self.losses.count(why, launched.dead_nodes)
        self._hand_back()
        self.start(why)

    def _hand_back(self) -> None:
        """Let other groups have what this one was dealt and has not finished."""
        if self.dealer is not None and self.pending:
            self.dealer.give_back(self.pending)
            self.pending = []

    def _judge_hang(self, late: list[int]) -> None:
        stacks = self._stacks()
        self._read_journals()
        late = [view.rank for view in self._views if view.rank in late and view.doing is not None]
        seen = [self._look(view) for view in self._views]
        culprits = verdict.culprits_of_hang(seen, late, stacks)
        standings = [
            standing_of(view, one, stacks.get(one.rank, ""), self.spec, self.pending)
            for view, one in zip(self._views, seen, strict=True)
        ]
        error = hang.describe(standings, self.spec.config.timeout_s)
        logs = {rank: before_stacks(self._view(rank).log())[-LOG_BEFORE_STACKS:] for rank in culprits}
        self.stop()
        for rank in culprits:
            self._blame(rank, HUNG, "TimeoutError", error, hang.excerpt(standings, culprits, logs[rank]))
        self._again(error if culprits else f"ranks {late} waited for a rank that failed")

    def _view(self, rank: int) -> RankView:
        return next(view for view in self._views if view.rank == rank)

    def _stacks(self) -> dict[int, str]:
        known = {view.rank: view.identity for view in self._views if view.identity}
        return self._launched.stacks(self.folder, known) if self._launched is not None else {}

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
        record = ResultRecord(
            replay_id=self.spec.replay_id,
            dump_id=doing["dump_id"],
            status=status,
            attempt=self.attempt,
            worker=rank,
            slot=doing["slot"],
            started_at=doing["started_at"],
            finished_at=now_timestamp(),
            error_class=error_class,
            error=error,
            signature=signature_of(error_class, error, log),
            log_excerpt=log[-EXCERPT:] if evidence is None else evidence,
        )
        self._forget(record.dump_id)
        self.on_verdict(record)

    def _again(self, reason: str) -> None:
        """Start again with the remaining inputs, unless too many attempts brought no result."""
        log = self._last_words()
        self.stop()
        fruitless = len(self.pending) == self._pending_before
        if self.losses is not None:
            if fruitless:
                self.losses.count(reason, details=log)
            return self.start(reason, self.losses.pause_s if fruitless else 0.0)
        self._fruitless = self._fruitless + 1 if fruitless else 0
        if self._fruitless >= FRUITLESS_LIMIT:
            raise LaunchProblem(
                f"{FRUITLESS_LIMIT} attempts in a row ended without a result; the last one: {reason}\n{log}".rstrip(),
                hint=f"the logs are in {self.folder}; `actordbg doctor` checks this environment",
            )
        return self.start(reason)

    def _last_words(self) -> str:
        return last_words(self._launcher_log, self.folder, self.group.ranks)


def _or_later(before: Seen, after: Seen) -> Seen:
    """The later view of a rank, with the exit status of the earlier one where only that one saw it."""
    return replace(after, wait_status=before.wait_status if after.wait_status is None else after.wait_status)
