"""A rollout's token ids, turn by turn, as the engine got and sampled them (`run --turns`): a file per trajectory.

    store/turns/<run>/<host>-<pid>-<number>.json

`trained` has the ids that the rollout handed to the trainer for all turns together, and the ranges in them that count as actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from actordbg.formats.weight_hashes import RunFile, check_sizes

_MOST_IDS = 2**31
"""More than a tokenizer has."""
TURNS = "turns"
"""The folder in a store."""


@dataclass(frozen=True)
class SampledTurn:
    """A request to the engine. given, sampled: token ids. text: what the engine said that it sampled."""

    given: tuple[int, ...]
    sampled: tuple[int, ...]
    text: str = ""

    def __post_init__(self) -> None:
        check_sizes((*self.given, *self.sampled), _MOST_IDS)


@dataclass(frozen=True)
class Trajectory(RunFile):
    """The turns of a conversation, and what the trainer got of it. bos, eos: ids of the tokenizer; None if it has none.

    reward: what the rollout handed over; None for a reward model's, which is computed later.
    """

    what = "a rollout's turns"
    run: str
    host: str
    pid: int
    number: int
    timestamp: str
    bos: int | None
    eos: int | None
    turns: tuple[SampledTurn, ...]
    trained: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...] = ()
    reward: float | None = None

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.host}-{self.pid}-{self.number:06d}.json"

    def __post_init__(self) -> None:
        check_sizes(self.trained, _MOST_IDS)
        check_sizes((end for part in self.ranges for end in part), _MOST_IDS)
