"""The work order: what a group of workers has to do in one attempt, and how a worker says how it left.

The supervisor writes one file for each attempt, every worker of the group reads it. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum

EXIT_RESTART = 75
"""Exit code of a worker that cannot go on and wrote `restart`: nothing is blamed on the input that was running."""
EXIT_BROKEN = 70
"""Exit code of a worker that could not build the actor and wrote `broken`."""


class Part(Enum):
    """What a rank does with an input: `LEAD`, run it and record it; `FOLLOW`, run it with or beside the rank that records
    it; `FILL`, keep the others company with an input of theirs.
    """

    LEAD = "lead"
    FOLLOW = "follow"
    FILL = "fill"


@dataclass(frozen=True)
class Task:
    """One input for one rank: `index` into `spec.inputs`."""

    slot: int
    index: int
    part: Part


@dataclass(frozen=True)
class WorkOrder:
    """What one group of workers has to do in one attempt; the supervisor writes it, the workers read it.

    ranks: the group, i.e. the workers that live and die together. width: how many neighbouring ranks are a lane, i.e. run the
    same input. slots: for each slot and each lane of the group an index into `spec.inputs`, or None for a filler; lanes that
    a slot does not reach have nothing to do in it. supervisor: pid and start time of who watches; workers end when it does.
    stay: when all is done, wait for another replay's order (`mailbox`) instead of leaving.
    """

    attempt: int
    ranks: list[int]
    slots: list[list[int | None]]
    supervisor: tuple[int, int]
    width: int = 1
    stay: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkOrder:
        data = json.loads(text)
        return cls(**{**data, "supervisor": (data["supervisor"][0], data["supervisor"][1])})

    def inputs_of(self, rank: int) -> list[Task]:
        """What this rank does, slot by slot; a filler repeats the first input that a neighbour has in the slot."""
        column = self._lanes().index(rank // self.width)
        own = Part.FOLLOW if rank % self.width else Part.LEAD
        work = []
        for slot, row in enumerate(self.slots):
            if column < len(row):
                index = row[column]
                stand_in = next(i for i in row if i is not None)
                work.append(Task(slot, stand_in, Part.FILL) if index is None else Task(slot, index, own))
        return work

    def mates(self, slot: int) -> list[int]:
        """The inputs that run in a slot, over all lanes."""
        return [index for index in self.slots[slot] if index is not None]

    def ranks_in(self, slot: int) -> list[int]:
        """The ranks that have something to do in a slot."""
        busy = self._lanes()[: len(self.slots[slot])]
        return [rank for rank in self.ranks if rank // self.width in busy]

    def _lanes(self) -> list[int]:
        return sorted({rank // self.width for rank in self.ranks})
