"""What a group of workers has to do in one attempt, and how it learns what comes next: two files, both written once.

    store/replays/<id>/work-0-1.json      the work order; with `stay`, workers do not leave when it is done
    store/replays/<id>/next-0-1.json      appears later: {"work": "/.../replays/<next id>/work-0-1.json"}, or null: leave

The supervisor writes them, every worker of the group reads them. Each order has a `next` file of its own, so nothing has to be
cleared and nothing can be missed. Standard library only.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from actordbg.formats.store_files import atomic_write, read_regular

EXIT_RESTART = 75
"""Exit code of a worker that cannot go on and wrote `restart`: nothing is blamed on the input that was running."""
EXIT_BROKEN = 70
"""Exit code of a worker that could not build the actor and wrote `broken`."""


class Duty(Enum):
    """What a rank does with an input. LEAD: run it and record the result. FOLLOW: run it beside the rank that records it.
    FILL: run a neighbour's input, so that the others' collectives complete.
    """

    LEAD = "lead"
    FOLLOW = "follow"
    FILL = "fill"


@dataclass(frozen=True)
class Task:
    """One input for one rank: `index` into `spec.inputs`."""

    slot: int
    index: int
    duty: Duty


@dataclass(frozen=True)
class WorkOrder:
    """What one group of workers does in one attempt.

    ranks: the group, which lives and dies together. width: how many neighbouring ranks are a lane, that is, run the same input.
    slots: by slot and lane, an index into `spec.inputs`, or None for a filler; lanes beyond a slot's end do nothing in it.
    supervisor: its pid and start time; workers end when it does. stay: after the last input, wait for another order.
    stops: where to stop, a `StopOrder` as plain data.
    """

    attempt: int
    ranks: list[int]
    slots: list[list[int | None]]
    supervisor: tuple[int, int]
    width: int = 1
    stay: bool = False
    stops: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkOrder:
        data = json.loads(text)
        return cls(**{**data, "supervisor": (data["supervisor"][0], data["supervisor"][1])})

    def inputs_of(self, rank: int) -> list[Task]:
        """The tasks of a rank, slot by slot. A filler repeats the first input that a neighbour has in the slot."""
        column = self._lanes().index(rank // self.width)
        own = Duty.FOLLOW if rank % self.width else Duty.LEAD
        work = []
        for slot, row in enumerate(self.slots):
            if column < len(row):
                index = row[column]
                stand_in = next(i for i in row if i is not None)
                work.append(Task(slot, stand_in, Duty.FILL) if index is None else Task(slot, index, own))
        return work

    def mates(self, slot: int) -> list[int]:
        """The inputs that run in a slot, over all lanes."""
        return [index for index in self.slots[slot] if index is not None]

    def ranks_in(self, slot: int) -> list[int]:
        """The ranks that have something to do in a slot."""
        busy = self._lanes()[: len(self.slots[slot])]
        return [rank for rank in self.ranks if rank // self.width in busy]

    def lead_of(self, slot: int, index: int) -> int | None:
        """The first rank of the lane that has this input in the slot; None if no lane has."""
        lanes = self._lanes()
        return next((lanes[column] * self.width for column, one in enumerate(self.slots[slot]) if one == index), None)

    def _lanes(self) -> list[int]:
        return sorted({rank // self.width for rank in self.ranks})


POLL_S = 0.02


def mailbox_of(work: Path) -> Path:
    """The file in which the workers of this order find the next one."""
    return work.with_name(work.name.replace("work-", "next-", 1))


def announce(work: Path, following: Path | None) -> None:
    """Tell the workers that finished `work` what comes next. None: nothing, they may leave."""
    atomic_write(mailbox_of(work), json.dumps({"work": None if following is None else str(following)}).encode())


def await_next(work: Path) -> Path | None:
    """Wait without a limit for the order after `work`; None when there is none. A worker calls this."""
    mailbox = mailbox_of(work)
    while True:
        try:
            following = json.loads(read_regular(mailbox))["work"]
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        # a replay of the same store, whatever the file says: the worker writes where its order lies
        return None if following is None else work.parent.parent / Path(following).parent.name / Path(following).name
