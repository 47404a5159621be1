"""Engines start the groups of a replay: on this machine, or wherever the command's `--engine` says.

    with using(engine):
        run_replay(...)                 # its groups start where `engine` says

An engine lists the groups (`groups`), says when a group has a place to run (`ready`, which never waits), and starts it
(`launch`). An engine that `deals` has several groups for the same inputs: they get them portion by portion (`plan.Dealer`),
so a slow or lost group delays no other. Journals, blame and verdicts are the same everywhere.

**Warm groups** (`WarmGroups`) outlive their replay, so that the next replay finds its Actor loaded:

    with WarmGroups() as warm:
        for key, spec in ...:
            warm.share(key)                      # ends the groups that were loaded for another key
            run_replay(store, spec, warm=warm)

A replay takes its groups from here. A waiting group with the same ranks gets the replay's work order (`work_order.py`) and
changes its settings, not its weights; otherwise a new group starts. After its work the group returns. Nothing else
differs: every replay has its own folder, journals, logs and verdicts. A group that crashed, hung or was tainted does not
return, and a group has one owner at a time. So a second attempt after a crash always starts a new group.

At most one key's groups are alive at a time, because an Actor takes the memory of its device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.actor.sharing import reopens
from actordbg.base.errors import Conflict, GroupsLost
from actordbg.base.processes import ALIVE, STOPPED, state_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.journal import read_events
from actordbg.replay.launch import WORKER_MODULE, Group, Launched, Launcher, Running, groups_of, launch

FRUITLESS_LIMIT = 3
"""The replay stops after so many attempts of a group in a row without a result. A crash in an input is a result."""


class PlaceLost(Exception):
    """The place that a group waited for was lost before the group started. args: the reason, and the dead nodes (`Running`)."""


@dataclass
class Losses:
    """How often a replay lost groups without an input's fault, and how often it may (`most`; -1: any number).

    A group is lost if its node or host process died, or if it died outside of any input without a result. A node's death counts
    once for all its groups. option: the option that sets `most`, or "".
    """

    most: int
    option: str = ""
    reasons: list[str] = field(default_factory=list)
    counted: set[str] = field(default_factory=set)

    def count(self, reason: str, dead_nodes: frozenset[str] = frozenset(), details: str = "") -> None:
        """Count a loss, unless all these nodes were counted before; GroupsLost if that exceeds `most`."""
        if dead_nodes and dead_nodes <= self.counted:
            return
        self.counted |= dead_nodes
        self.reasons.append(reason)
        if 0 <= self.most < len(self.reasons):
            times = "once" if len(self.reasons) == 1 else f"{len(self.reasons)} times"
            allowed = f"{self.option} {self.most} allows no more" if self.option else f"at most {self.most} are allowed"
            more = f"; pass {self.option} -1 to never give up" if self.option else ""
            raise GroupsLost(
                f"groups were lost {times}, and {allowed}; the last one: {reason}\n{details}".rstrip(),
                hint=f"results are kept: add --resume to the same command to continue{more}",
            )

    @property
    def pause_s(self) -> float:
        """Return the seconds that a group waits before it restarts: longer each time, so that nothing spins."""
        return min(30.0, 0.5 * 2.0 ** min(len(self.reasons), 10))


EARLIER_S = 30.0
"""Longest wait for the ranks of a command that died."""


class GroupEngine:
    """This machine: each group has its place at once."""

    def groups(self, config: ReplayConfig, inputs: int) -> list[Group]:
        """Return the groups; an engine that deals chooses them for so many pending inputs."""
        return groups_of(config)

    def deals(self, config: ReplayConfig) -> bool:
        """Check whether any group may run any input. If not, the configuration alone defines the groups."""
        return False

    def parts(self, configs: Sequence[ReplayConfig]) -> list[GroupEngine]:
        """Return engines that run such replays in parallel, each with separate groups; [] if they run one after another."""
        return []

    def losses(self) -> Losses | None:
        """Return a new count of losses for a replay; None if each group counts its own fruitless attempts."""
        return None

    def await_end(self, replay_id: str, folder: Path) -> None:
        """Wait for the ranks of an earlier command that died while it ran the replay; they would write to the same journals.

        They check for their supervisor once a second. Conflict if a rank stays, such as a stopped process.
        """
        until = time.monotonic() + EARLIER_S
        while left := [pid for pid, ticks in _last_boots(folder) if state_of(pid, ticks)[0] in (ALIVE, STOPPED)]:
            if time.monotonic() > until:
                raise Conflict(
                    f"process {left[0]} of an earlier command still runs replay {replay_id}",
                    hint=f"run `kill -9 {left[0]}`, then pass --resume again",
                )
            time.sleep(0.05)

    def ready(self, config: ReplayConfig, group: Group) -> bool:
        """Check whether the group can be launched now; the engine gets its place meanwhile. PlaceLost if that failed."""
        return True

    def launch(self, config: ReplayConfig, group: Group, work: Path, module: str = WORKER_MODULE) -> Running:
        """Start a group on a work order."""
        return launch(config, group, work, module)

    def news(self) -> list[str]:
        """Return messages for the user since the last call."""
        return []

    def is_here(self, address: str) -> bool:
        """Check whether a rank's node is this machine, so that this terminal can reach its prompt."""
        return True

    def facts_of(self, group: Group) -> dict[str, object]:
        """Return facts about where the group runs, for the supervisor's journal."""
        return {}


_engine = ContextVar("engine", default=GroupEngine())  # noqa: B039 - it has no state


def engine_in_use() -> GroupEngine:
    """Return the engine of this command or thread."""
    return _engine.get()


@contextlib.contextmanager
def using(engine: GroupEngine) -> Iterator[None]:
    """Start groups with `engine` inside the block."""
    before = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(before)


def launch_group(config: ReplayConfig, group: Group, work: Path, module: str = WORKER_MODULE) -> Running:
    """Start a group with the engine in use."""
    return engine_in_use().launch(config, group, work, module)


def _last_boots(folder: Path) -> list[tuple[int, int]]:
    """Return pid and start time of the processes that last ran the replay's ranks on this machine."""
    processes = []
    for path in folder.glob("rank*.jsonl"):
        boots = [event for event in read_events(path) if event["event"] == "boot" and "node" not in event]
        processes += [(event["pid"], event["ticks"]) for event in boots[-1:]]
    return processes


LEAVE_S = 15.0
"""Longest time for workers to leave when told to, as after an ordinary replay."""


@dataclass
class WarmGroups:
    """The waiting groups, by their ranks.

    reopen: groups that support it (`actordbg.actor.sharing.reopens`) also take another key of the same kind, and replace their
    Actor.
    """

    launcher: Launcher = launch_group
    reopen: bool = False
    _key: Hashable = None
    _waiting: dict[Group, tuple[Running, Path]] = field(default_factory=dict)
    _kinds: dict[Group, Hashable] = field(default_factory=dict)

    def __enter__(self) -> WarmGroups:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(at_once=any(raised))

    def share(self, key: Hashable) -> None:
        """Keep groups for `key` (`actordbg.actor.sharing.host_key`) from now on, and end groups that cannot take it."""
        if key != self._key:
            self._leave([group for group in self._waiting if self._kinds[group] is None])
        self._key = key

    def launch(self, config: ReplayConfig, group: Group, work: Path) -> Running:
        """Give `work` to a waiting group with these ranks, or start a new group."""
        launched, before = self._waiting.pop(group, (None, work))
        kind = reopens(config) if self.reopen else None
        fits, self._kinds[group] = kind == self._kinds.get(group), kind
        if launched is not None:
            if fits and not launched.ended():
                launched.announce(before, work)
                return launched
            if isinstance(launched, Launched) and not launched.ended() and launched.fork(config, before, work):
                return launched
            launched.end()
        return self.launcher(config, group, work)

    def keep(self, group: Group, launched: Running, work: Path) -> None:
        """Keep a group that finished `work` and waits."""
        self._waiting[group] = (launched, work)

    def close(self, *, at_once: bool = False) -> None:
        """Tell every waiting group to leave, and end those that stay longer than LEAVE_S (`at_once`: end all now).

        May be called again after an interruption: a group is removed only once it has ended.
        """
        self._leave(list(self._waiting), at_once=at_once)

    def _leave(self, groups: list[Group], *, at_once: bool = False) -> None:
        waiting = [self._waiting[group] for group in groups]
        if not at_once:
            for launched, work in waiting:
                with contextlib.suppress(OSError):  # a full disk: then they are ended
                    launched.announce(work, None)
            deadline = time.monotonic() + LEAVE_S
            while any(not launched.ended() for launched, _ in waiting) and time.monotonic() < deadline:
                time.sleep(0.02)
        for group in groups:
            self._waiting[group][0].end()
            del self._waiting[group]
