"""The work order: what a group of workers has to do in one attempt, and how a worker says how it left.

The supervisor writes one file for each attempt, every worker of the group reads it. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

EXIT_RESTART = 75
"""Exit code of a worker that cannot go on and wrote `restart`: nothing is blamed on the input that was running."""
EXIT_BROKEN = 70
"""Exit code of a worker that could not build the actor and wrote `broken`."""


@dataclass(frozen=True)
class WorkOrder:
    """What one group of workers has to do in one attempt; the supervisor writes it, the workers read it.

    ranks: the group, i.e. the workers that live and die together. slots: for each slot and each rank of the group an index
    into `spec.inputs`, or None for a filler. supervisor: pid and start time of who watches; workers end when it does.
    stay: when all is done, wait for another replay's order (`mailbox`) instead of leaving.
    """

    attempt: int
    ranks: list[int]
    slots: list[list[int | None]]
    supervisor: tuple[int, int]
    stay: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkOrder:
        data = json.loads(text)
        supervisor = (data["supervisor"][0], data["supervisor"][1])
        return cls(data["attempt"], data["ranks"], data["slots"], supervisor, data.get("stay", False))

    def inputs_of(self, rank: int) -> list[tuple[int, int, bool]]:
        """(slot, input, is a filler) for this rank; a filler repeats the first input that a neighbour has in the slot."""
        column = self.ranks.index(rank)
        work = []
        for slot, row in enumerate(self.slots):
            index = row[column]
            stand_in = next(i for i in row if i is not None)
            work.append((slot, stand_in if index is None else index, index is None))
        return work

    def mates(self, slot: int) -> list[int]:
        """The inputs that run in a slot, over all ranks."""
        return [index for index in self.slots[slot] if index is not None]
