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
from actordbg.records.journal import Event, Tail, rank_journal, rank_log
from actordbg.records.replay_record import FAILED
from actordbg.replay.blame import Seen
from actordbg.replay.worker_logs import size_of, tail_of

NODE = "ACTORDBG_NODE"
"""The variable that names a worker's node, where a replay's workers run on several."""


@dataclass
class RankView:
    """Put together event by event (`poll`). `doing` is the `start` or `fill` that has not ended; `since` the last news.

    `log_at`: where the log of what it is doing begins. `collective`: whether it needs its peers for an input, as far as is
    known. `restart`: why it asked for one, "" if it did not. `held_since`: since when it is at a prompt; no clock runs meanwhile.
    `node`: where it runs, "" on one machine. `gone`: the machine where it ran wrote that it ended, and how (`wait_status`, and in
    words `why`).
    """

    folder: Path
    rank: int
    tail: Tail
    since: float
    log_at: int
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
    wait_status: int | None = None
    why: str = ""

    @classmethod
    def begin(cls, folder: Path, rank: int) -> RankView:
        """The view at the beginning of an attempt: what earlier attempts wrote is past."""
        tail = Tail(rank_journal(folder, rank))
        tail.poll()
        return cls(folder, rank, tail, time.monotonic(), size_of(rank_log(folder, rank)))

    @classmethod
    def of_peer(cls, folder: Path, rank: int) -> RankView:
        """The view that a worker has of another: the journal from its beginning, since the peer may have started earlier."""
        return cls(folder, rank, Tail(rank_journal(folder, rank)), time.monotonic(), 0)

    def poll(self, attempt: int) -> Iterator[Event]:
        """Take in what the journal has new of this attempt, and give it on event by event."""
        for event in self.tail.poll():
            if event.get("attempt") == attempt:
                self._take(event)
                yield event

    def is_alive(self) -> bool:
        """Whether its process lives. A rank that has not even booted counts as alive."""
        if self.gone or self.identity is None or self.node != os.environ.get(NODE, ""):
            return not self.gone  # only its own machine can look
        return state_of(*self.identity)[0] not in (GONE, ZOMBIE)

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("stop", "go", "line"):
            return self._hold(kind)
        self.since = time.monotonic()
        if kind == "boot":
            self.identity, self.node = (event["pid"], event["ticks"]), event.get("node", "")
            self.gone = False
        elif kind == "gone":
            self.gone, self.wait_status, self.why = True, event.get("wait_status"), event.get("why", "")
        elif kind == "ready":
            self.collective = event.get("collective", True)
        elif kind in ("start", "fill"):
            self.doing, self.log_at = event, event["log_at"]
        elif kind in ("end", "filled"):
            self.doing = None
            self.slots_finished = max(self.slots_finished, event["slot"] + 1)
            self.failed_slot = event["slot"] if event.get("status") == FAILED else self.failed_slot
        elif kind == "restart":
            self.restart = event["reason"]
        elif kind == "broken":
            self.broken = event
        elif kind == "done":
            self.done = True
        return None

    def _hold(self, kind: str) -> None:
        """At a prompt the clock stands still."""
        now = time.monotonic()
        if kind == "stop":
            self.held_since = now
        elif kind == "go" and self.held_since is not None:
            self.since, self.held_since = self.since + now - self.held_since, None

    def seen(self, look: Callable[[tuple[int, int]], tuple[str, int | None]] = lambda one: state_of(*one)) -> Seen:
        """This moment, with the process's state from /proc, or from who looks there."""
        state, status = look(self.identity) if self.identity else (ALIVE, None)
        state, status = (GONE, self.wait_status) if self.gone else (state, status)
        return Seen(
            self.rank,
            slot=self.doing["slot"] if self.doing else None,
            started=self.since,
            slots_finished=self.slots_finished,
            failed_slot=self.failed_slot,
            state=state,
            wait_status=status,
            done=self.done,
            wants_restart=bool(self.restart),
            why=self.why,
        )

    def log(self) -> str:
        """What the worker printed since it began what it is doing."""
        return tail_of(rank_log(self.folder, self.rank), self.log_at)
