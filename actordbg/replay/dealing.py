"""Inputs dealt to groups portion by portion, the longest first, so that all groups finish at about the same time. Pure.

A portion is half of a group's fair share of the tokens that are left: large at the beginning, one slot at the end. What
a lost group did not finish comes back and is dealt again. No input is ever in two hands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actordbg.records.replay_record import ReplayInput


class Dealer:
    """The inputs that no group has. `lanes`: how many a group runs at a time; `groups`: how many groups share them."""

    def __init__(self, inputs: Sequence[ReplayInput], pending: Iterable[int], lanes: int, groups: int) -> None:
        self._inputs, self._lanes, self._groups = inputs, lanes, groups
        self._left: list[int] = []
        self.give_back(pending)

    def __bool__(self) -> bool:
        return bool(self._left)

    def deal(self) -> list[int]:
        """The next portion, in whole slots; [] when nothing is left."""
        fair, tokens = (self._tokens / (2 * self._groups) if self._groups > 1 else self._tokens), 0
        portion: list[int] = []
        while self._left and (not portion or len(portion) % self._lanes or tokens + self._next <= fair):
            tokens += self._next
            portion.append(self._left.pop())
        self._tokens -= tokens
        return portion

    def give_back(self, indices: Iterable[int]) -> None:
        """Take inputs that nobody runs any more."""
        self._left = sorted({*self._left, *indices}, key=lambda index: (self._inputs[index].tokens, -index))
        self._tokens = sum(self._inputs[index].tokens for index in self._left)

    @property
    def _next(self) -> int:
        return self._inputs[self._left[-1]].tokens


def dealt_slots(portion: Sequence[int], lanes: int) -> list[tuple[int | None, ...]]:
    """The slots of a portion: neighbours together, and fillers where the last slot has too few."""
    rows = (tuple(portion[first : first + lanes]) for first in range(0, len(portion), lanes))
    return [row + (None,) * (lanes - len(row)) for row in rows]
