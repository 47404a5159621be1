"""One rank in the present attempt, as its journal and /proc show it.

The supervisor has a view of every rank. A worker has one of each peer, so it knows whether the others finished a slot or died:
through plain files, without a collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.processes import ALIVE, GONE, ZOMBIE, state_of
from actordbg.records.journal import Event, Journal, Tail, rank_journal, rank_log
from actordbg.records.replay_record import FAILED
from actordbg.replay.worker_logs import size_of, tail_of

NODE = "ACTORDBG_NODE"
"""The variable that names a worker's node, where a replay's workers run on several."""


@dataclass
class RankView:
    """Put together event by event (`take`). `doing` is the `start` or `fill` that has not ended; `since` the last news (monotonic
    seconds).

    `log_at`: where the log of what it is doing begins. `slots_finished`: passed or failed. `failed_slot`: the last one in which
    it failed. `collective`: whether it needs its peers for an input, as far as is known. `restart`: why it asked for one, "" if
    it did not. `held_since`: since when it is at a prompt; no clock runs meanwhile. `node`: where it runs, "" on one machine.
    `gone`: the machine where it ran wrote that it ended, and how (`wait_status`, and in words `why`). `done`: it has nothing left
    to do. `state`, `wait_status`: what /proc said at the last `look`.
    """

    rank: int
    folder: Path = Path()
    tail: Tail | None = None
    since: float = 0.0
    log_at: int = 0
    attempt: int = 0
    identity: tuple[int, int] | None = None
    doing: Event | None = None
    slots_finished: int = 0
    failed_slot: int | None = None
    done: bool = False
    collective: bool = True
    restart: str = ""
    broken: Event | None = None
    held_since: float | None = None
    node: str = ""
    gone: bool = False
    state: str = ALIVE
    wait_status: int | None = None
    why: str = ""

    @classmethod
    def of_peer(cls, folder: Path, rank: int) -> RankView:
        """The view that a worker has of another: the journal from its beginning, since the peer may have started earlier."""
        return cls(rank, folder, Tail(rank_journal(folder, rank)), time.monotonic())

    @classmethod
    def begin(cls, folder: Path, rank: int) -> RankView:
        """The view at the beginning of an attempt: what earlier attempts wrote is past."""
        view = cls.of_peer(folder, rank)
        view.log_at = size_of(rank_log(folder, rank))
        if view.tail is not None:
            view.tail.poll()
        return view

    def move(self, folder: Path) -> None:
        """Continue with the rank in another attempt, which may be of another replay: its journal there is read from now on."""
        if folder != self.folder:
            self.folder, self.tail = folder, Tail(rank_journal(folder, self.rank))
            self.tail.poll()
        self.done = False

    @property
    def slot(self) -> int | None:
        """Where it is; None between inputs."""
        return self.doing["slot"] if self.doing else None

    @property
    def dead(self) -> bool:
        """It died while it still had work."""
        return self.state in (ZOMBIE, GONE) and not self.done

    def poll(self, attempt: int | None = None) -> Iterator[Event]:
        """Take in what the journal has new of this attempt (None: of any), and give it on event by event."""
        for event in self.tail.poll() if self.tail is not None else ():
            if attempt is None or event.get("attempt") == attempt:
                self.take(event)
                yield event

    def is_alive(self) -> bool:
        """Whether its process lives. A rank that has not even booted counts as alive."""
        if self.gone or self.identity is None or self.node != os.environ.get(NODE, ""):
            return not self.gone  # only its own machine can look
        return state_of(*self.identity)[0] not in (GONE, ZOMBIE)

    def take(self, event: Event) -> None:
        """Take in one event. At a prompt the clock stands still."""
        kind, now = event["event"], time.monotonic()
        if kind == "stop":
            self.held_since = now
        elif kind == "go" and self.held_since is not None:
            self.since, self.held_since = self.since + now - self.held_since, None
        if kind in ("stop", "go", "line"):
            return
        self.since = now
        if kind == "boot":
            self.identity, self.node, self.attempt = (event["pid"], event["ticks"]), event.get("node", ""), event["attempt"]
            self.gone, self.done, self.doing = False, False, None
        elif kind == "gone":
            self.gone, self.state = True, GONE
            self.wait_status, self.why = event.get("wait_status"), event.get("why", "")
        elif kind == "ready":
            self.collective = event.get("collective", True)
        elif kind in ("start", "fill"):
            self.doing, self.log_at = event, event["log_at"]
        elif kind in ("end", "filled"):
            if self.slot is None or event["slot"] >= self.slot:  # one that fails late ends no other
                self.doing = None
            self.slots_finished = max(self.slots_finished, event["slot"] + 1)
            self.failed_slot = event["slot"] if event.get("status") == FAILED else self.failed_slot
        elif kind == "restart":
            self.restart = event["reason"]
        elif kind == "broken":
            self.broken = event
        elif kind == "done":
            self.done = True

    def look(self, ask: Callable[[tuple[int, int]], tuple[str, int | None]]) -> None:
        """Learn how its process is from who can see it, unless its machine wrote that it ended. A status once seen stays."""
        if not self.gone and self.identity:
            self.state, status = ask(self.identity)
            self.wait_status = self.wait_status if status is None else status

    def write_gone(self, wait_status: int | None, **more: str) -> None:
        """Write into its journal that its process has ended; a worker's machine does that when the worker is dead."""
        journal = Journal(rank_journal(self.folder, self.rank))
        journal.append("gone", rank=self.rank, attempt=self.attempt, wait_status=wait_status, **more)
        journal.close()

    def log(self) -> str:
        """What the worker printed since it began what it is doing."""
        return tail_of(rank_log(self.folder, self.rank), self.log_at)
