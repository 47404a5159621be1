"""What starts the groups of a replay: this machine, or whatever was put in its place for a command (`--engine`).

    with using(engine):
        run_replay(...)                 # its groups start where `engine` says

An engine says which groups there are (`groups`), when one has a place to run (`ready`, which never waits), and starts it
(`launch`). An engine that `deals` has several groups for the same inputs: they get them portion by portion (`plan.Dealer`),
so a slow or lost group holds nobody up. The journals, the blame and the verdicts are the same everywhere.

**Groups that outlive their replay** (`WarmGroups`), so that the next replay finds its Actor loaded:


    with WarmGroups() as warm:
        for key, spec in ...:
            warm.share(key)                      # ends the groups that were loaded for another key
            run_replay(store, spec, warm=warm)

A replay asks here for its groups. A waiting group with the same ranks gets the replay's work order (`work_order.py`) and
changes its settings, not its weights; otherwise a new group starts. After its work the group comes back. Nothing else
differs: every replay has its own folder, journals, logs and verdicts. A group that crashed, hung or was tainted does not
come back, and a group has one owner at a time. So a second attempt after a crash always starts a new group.

At most one key's groups are alive at a time, because an Actor takes the memory of its device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from actordbg.actor.sharing import reopens
from actordbg.base.errors import Conflict, GroupsLost
from actordbg.base.processes import ALIVE, STOPPED, state_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.journal import read_events
from actordbg.replay.launch import WORKER_MODULE, Group, Launcher, Running, groups_of, launch

FRUITLESS_LIMIT = 3
"""Attempts of a group in a row without a single result after which the replay stops. A crash in an input is a result."""


class PlaceLost(Exception):
    """The place that a group waited for is gone before the group was there. args: why, and the dead nodes (`Running`)."""


@dataclass
class Losses:
    """How often groups were lost without the fault of an input, in a whole replay, and how often they may be (-1: any number).

    Lost is a group whose node or whose host process died, and one that died outside of any input and brought no result.
    A node's death counts once for all groups that it had. option: what sets `most`, "" where nothing does.
    """

    most: int
    option: str = ""
    reasons: list[str] = field(default_factory=list)
    counted: set[str] = field(default_factory=set)

    def count(self, reason: str, dead_nodes: frozenset[str] = frozenset(), details: str = "") -> None:
        """One more, unless all these nodes were counted; GroupsLost if that was one too many."""
        if dead_nodes and dead_nodes <= self.counted:
            return
        self.counted |= dead_nodes
        self.reasons.append(reason)
        if 0 <= self.most < len(self.reasons):
            times = "once" if len(self.reasons) == 1 else f"{len(self.reasons)} times"
            allowed = f"{self.option} {self.most} allows no more" if self.option else f"no more than {self.most} are borne"
            more = f"; {self.option} -1 never gives up" if self.option else ""
            raise GroupsLost(
                f"groups were lost {times}, and {allowed}; the last one: {reason}\n{details}".rstrip(),
                hint=f"results are kept: --resume of the same command continues{more}",
            )

    @property
    def pause_s(self) -> float:
        """How long a group waits before it starts again: longer each time, so that nothing spins."""
        return min(30.0, 0.5 * 2.0 ** min(len(self.reasons), 10))


EARLIER_S = 30.0
"""Longest wait for the ranks of a command that died."""


class GroupEngine:
    """This machine: each group has its place at once."""

    name = "local"

    def groups(self, config: ReplayConfig, inputs: int) -> list[Group]:
        """The groups for so many inputs that are pending, where the engine deals."""
        return groups_of(config)

    def deals(self, config: ReplayConfig) -> bool:
        """Whether there are groups of which any may run any input. Where not, the groups are those of the configuration."""
        return False

    def parts(self, configs: Sequence[ReplayConfig]) -> list[GroupEngine]:
        """Engines that run such replays side by side, each with groups of its own; [] where they run one after another."""
        return []

    def losses(self) -> Losses | None:
        """A new count of losses for a replay; None where each group counts its own fruitless attempts."""
        return None

    def await_end(self, replay_id: str, folder: Path) -> None:
        """Wait until ranks of an earlier command, which died while it ran the replay, have ended too: they look for it once a
        second, and would write beside ours. Conflict if one stays, such as one that somebody stopped.
        """
        until = time.monotonic() + EARLIER_S
        while left := [pid for pid, ticks in _last_boots(folder) if state_of(pid, ticks)[0] in (ALIVE, STOPPED)]:
            if time.monotonic() > until:
                raise Conflict(
                    f"process {left[0]} of an earlier command still runs replay {replay_id}",
                    hint=f"end it (kill -9 {left[0]}), then --resume again",
                )
            time.sleep(0.05)

    def ready(self, config: ReplayConfig, group: Group) -> bool:
        """Whether the group can be launched now. An engine gets its place meanwhile. PlaceLost if that went wrong."""
        return True

    def launch(self, config: ReplayConfig, group: Group, work: Path, module: str = WORKER_MODULE) -> Running:
        """Start a group on a work order."""
        return launch(config, group, work, module)

    def news(self) -> list[str]:
        """What happened since the last call that a user wants to read."""
        return []

    def is_here(self, address: str) -> bool:
        """Whether a rank's node is this machine, so that this terminal can be at its prompt."""
        return True

    def facts_of(self, group: Group) -> dict[str, object]:
        """Where the group runs, for the supervisor's journal."""
        return {}


_THIS_MACHINE = GroupEngine()
_engine: ContextVar[GroupEngine | None] = ContextVar("engine", default=None)


def engine_in_use() -> GroupEngine:
    """The engine of this command, or of this thread of it."""
    return _engine.get() or _THIS_MACHINE


@contextlib.contextmanager
def using(engine: GroupEngine) -> Iterator[None]:
    """Inside the block groups start where `engine` says."""
    before = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(before)


def launch_group(config: ReplayConfig, group: Group, work: Path, module: str = WORKER_MODULE) -> Running:
    """Start a group with the engine in use."""
    return engine_in_use().launch(config, group, work, module)


def _last_boots(folder: Path) -> list[tuple[int, int]]:
    """The processes that were the replay's ranks last, on this machine: pid and start time."""
    found = []
    for path in folder.glob("rank*.jsonl"):
        boots = [event for event in read_events(path) if event["event"] == "boot" and "node" not in event]
        found += [(event["pid"], event["ticks"]) for event in boots[-1:]]
    return found


LEAVE_S = 15.0
"""Longest time for workers to leave once they are told to, as after an ordinary replay."""


@dataclass
class WarmGroups:
    """The waiting groups, by their ranks.

    reopen: groups that can (`actordbg.actor.sharing.reopens`) continue with another key of their kind too, and build that Actor
    in
    the place of their own.
    """

    launcher: Launcher = launch_group
    reopen: bool = False
    _key: Hashable = None
    _waiting: dict[tuple[int, ...], tuple[Running, Path]] = field(default_factory=dict)
    _kinds: dict[tuple[int, ...], Hashable] = field(default_factory=dict)

    def __enter__(self) -> WarmGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=error is not None)

    def share(self, key: Hashable) -> None:
        """Keep groups for `key` (`actordbg.actor.sharing.host_key`) from now on. Groups that cannot take it leave."""
        if key != self._key:
            self._leave([ranks for ranks in self._waiting if self._kinds[ranks] is None])
        self._key = key

    def launch(self, config: ReplayConfig, group: Group, work: Path) -> Running:
        """Give `work` to a waiting group with these ranks, or start a new group."""
        launched, before = self._waiting.pop(group.ranks, (None, work))
        kind = reopens(config) if self.reopen else None
        fits, self._kinds[group.ranks] = kind == self._kinds.get(group.ranks), kind
        if launched is not None:
            if fits and not launched.ended():
                launched.announce(before, work)
                return launched
            launched.end()
        return self.launcher(config, group, work)

    def keep(self, group: Group, launched: Running, work: Path) -> None:
        """Take a group that finished `work` and waits."""
        self._waiting[group.ranks] = (launched, work)

    def close(self, *, at_once: bool = False) -> None:
        """Tell every waiting group to leave, and end those that stay longer than LEAVE_S (`at_once`: end all now).

        May be called again after an interruption: a group is forgotten only when it is gone.
        """
        self._leave(list(self._waiting), at_once=at_once)

    def _leave(self, ranks_of_groups: list[tuple[int, ...]], *, at_once: bool = False) -> None:
        waiting = [self._waiting[ranks] for ranks in ranks_of_groups]
        if not at_once:
            for launched, work in waiting:
                with contextlib.suppress(OSError):  # a full disk: then they are ended
                    launched.announce(work, None)
            deadline = time.monotonic() + LEAVE_S
            while any(not launched.ended() for launched, _ in waiting) and time.monotonic() < deadline:
                time.sleep(0.02)
        for ranks in ranks_of_groups:
            self._waiting[ranks][0].end()
            del self._waiting[ranks]
