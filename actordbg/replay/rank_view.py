"""The state of a rank in the current attempt, as its journal and /proc show it.

The supervisor has a view of every rank. A worker has a view of each peer, so it knows whether the others finished a slot or died:
from plain files, without a collective.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.base.processes import ALIVE, GONE, ZOMBIE, state_of
from actordbg.records.journal import Event, Journal, Tail, rank_journal, rank_log
from actordbg.records.replay_record import FAILED
from actordbg.replay.worker_logs import size_of, tail_of

NODE = "ACTORDBG_NODE"
"""The environment variable that names a worker's node, if a replay's workers run on several."""


@dataclass
class RankView:
    """Snapshot of a rank, updated event by event (`take`).

    doing: its `start` or `fill` without an end yet. since: time of its last event (monotonic seconds). log_at: the byte at which
    the current input's log begins. slots_finished: slots passed or failed. failed_slot: its last failed slot. collective: it
    needs its peers to run an input, as far as is known. restart: why it requested a restart, or "". held_since: since when it is
    at a prompt; no clock runs meanwhile. node: where it runs, "" on one machine. gone: its machine wrote that it ended, and how
    (wait_status, and in words why). done: no work left. state, wait_status: from /proc at the last `look`.
    """

    rank: int
    folder: Path = Path()
    since: float = field(default_factory=time.monotonic)
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

    def __post_init__(self) -> None:
        """Read the journal from its beginning, as a worker does, since a peer may have started earlier."""
        self.tail = Tail(rank_journal(self.folder, self.rank))

    @classmethod
    def begin(cls, folder: Path, rank: int) -> RankView:
        """Create the view at the start of an attempt. It skips what earlier attempts wrote."""
        view = cls(rank, folder, log_at=size_of(rank_log(folder, rank)))
        view.tail.poll()
        return view

    def move(self, folder: Path) -> None:
        """Follow the rank into another attempt, possibly of another replay, whose journal it then reads."""
        if folder != self.folder:
            self.folder, self.tail = folder, Tail(rank_journal(folder, self.rank))
            self.tail.poll()
        self.done = False

    @property
    def slot(self) -> int | None:
        """Return the slot that the rank is running; None between inputs."""
        return self.doing["slot"] if self.doing else None

    @property
    def dead(self) -> bool:
        """Check whether the rank died while it still had work."""
        return self.state in (ZOMBIE, GONE) and not self.done

    def poll(self, attempt: int | None = None) -> Iterator[Event]:
        """Take in and yield each new event of this attempt (None: of any)."""
        for event in self.tail.poll():
            if attempt is None or event.get("attempt") == attempt:
                self.take(event)
                yield event

    def is_alive(self) -> bool:
        """Check whether its process is alive. A rank that has not booted yet counts as alive."""
        if self.gone or self.identity is None or self.node != os.environ.get(NODE, ""):
            return not self.gone  # only its own machine can look
        return state_of(*self.identity)[0] not in (GONE, ZOMBIE)

    def take(self, event: Event) -> None:
        """Take in an event. The clock stops while the rank is at a prompt."""
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
            if self.slot is None or event["slot"] >= self.slot:  # a late failure does not end a later input
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
        """Update the process state with `ask`, unless its machine wrote that it ended. A wait status once seen stays."""
        if not self.gone and self.identity:
            self.state, status = ask(self.identity)
            self.wait_status = self.wait_status if status is None else status

    def write_gone(self, wait_status: int | None, **more: str) -> None:
        """Write to its journal that its process has ended. The worker's machine calls this once the worker is dead."""
        journal = Journal(rank_journal(self.folder, self.rank))
        journal.append("gone", rank=self.rank, attempt=self.attempt, wait_status=wait_status, **more)
        journal.close()

    def log(self) -> str:
        """Return the worker's log since it started the current input."""
        return tail_of(rank_log(self.folder, self.rank), self.log_at)
