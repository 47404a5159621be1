"""Which inputs of a replay are asked for their laws: a few that can answer most of them. Pure, standard library only.

The choice depends on the replay's specification alone, so every process of a replay makes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from actordbg.formats.replay_record import ReplayInput


def chosen(inputs: Sequence[ReplayInput], count: int) -> frozenset[int]:
    """Numbers of the inputs whose laws are asked: with several rows and padding if there are such, the short ones first."""
    order = sorted(range(len(inputs)), key=lambda number: (_lacks(inputs[number]), _size(inputs[number]), number))
    return frozenset(order[:count])


def _lacks(item: ReplayInput) -> tuple[bool, bool]:
    return item.batch_size < 2, item.tokens >= _size(item)


def _size(item: ReplayInput) -> int:
    return item.batch_size * item.seq_len
