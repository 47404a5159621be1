"""Groups of workers that outlive their replay, so that the next replay finds its Actor loaded.

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
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from actordbg.actor.sharing import reopens
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.group_engine import launch_group
from actordbg.replay.launch import Group, Launcher, Running

LEAVE_S = 15.0
"""Longest time for workers to leave once they are told to, as after an ordinary replay."""


@dataclass
class WarmGroups:
    """The waiting groups, by their ranks. `started`: groups started here. `shared`: how often one was used again.

    reopen: groups that can (`actordbg.actor.sharing.reopens`) go on with another key of their kind too, and build that Actor in
    the place of their own.
    """

    launcher: Launcher = launch_group
    reopen: bool = False
    leave_s: float = LEAVE_S
    started: int = 0
    shared: int = 0
    _key: Hashable = None
    _waiting: dict[tuple[int, ...], tuple[Running, Path]] = field(default_factory=dict)
    _reopening: dict[tuple[int, ...], Hashable] = field(default_factory=dict)

    def __enter__(self) -> WarmGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=error is not None)

    def share(self, key: Hashable) -> None:
        """Keep groups for `key` (`actordbg.actor.sharing.host_key`) from now on. Groups that cannot take it leave."""
        if key != self._key:
            self._leave([ranks for ranks in self._waiting if ranks not in self._reopening])
        self._key = key

    def launch(self, config: ReplayConfig, group: Group, work: Path) -> Running:
        """Give `work` to a waiting group with these ranks, or start a new group."""
        waiting = self._waiting.pop(group.ranks, None)
        kind = reopens(config) if self.reopen else None
        if waiting is not None and kind != self._reopening.get(group.ranks):
            waiting[0].end()
            waiting = None
        self._reopening.pop(group.ranks, None)
        self._reopening |= {} if kind is None else {group.ranks: kind}
        if waiting is not None:
            launched, before = waiting
            if not launched.ended():
                launched.announce(before, work)
                self.shared += 1
                return launched
            launched.end()
        self.started += 1
        return self.launcher(config, group, work)

    def keep(self, group: Group, launched: Running, work: Path) -> None:
        """Take a group that finished `work` and waits."""
        self._waiting[group.ranks] = (launched, work)

    def close(self, *, at_once: bool = False) -> None:
        """Tell every waiting group to leave, and end those that stay longer than `leave_s` (`at_once`: end all now).

        May be called again after an interruption: a group is forgotten only when it is gone.
        """
        self._leave(list(self._waiting), at_once=at_once)

    def _leave(self, ranks_of_groups: list[tuple[int, ...]], *, at_once: bool = False) -> None:
        waiting = [self._waiting[ranks] for ranks in ranks_of_groups]
        if not at_once:
            for launched, work in waiting:
                with contextlib.suppress(OSError):  # a full disk: then they are ended
                    launched.announce(work, None)
            deadline = time.monotonic() + self.leave_s
            while any(not launched.ended() for launched, _ in waiting) and time.monotonic() < deadline:
                time.sleep(0.02)
        for ranks in ranks_of_groups:
            self._waiting[ranks][0].end()
            del self._waiting[ranks]
