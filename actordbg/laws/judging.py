"""From two sets of log-probs to the answer of a law. Pure: tensors in, a `LawAnswer` out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actordbg.formats.law_answer import BROKEN, KEPT, NONDETERMINISTIC, NOT_CHECKED, WITHIN_ROUNDING, LawAnswer
from actordbg.laws.law_table import LAWS

NOISE_FACTOR = 4.0
"""An exact law is broken in a configuration that moves by itself only if the change is this many times as large."""


@dataclass(frozen=True)
class ForwardValues:
    """What one forward gave for each next token, [B, S-1]: log-probs, and entropies where the call asks for them."""

    log_probs: Tensor
    entropy: Tensor | None = None

    def rows(self, index: Tensor) -> ForwardValues:
        """These rows in this order."""
        return ForwardValues(self.log_probs[index], None if self.entropy is None else self.entropy[index])


@dataclass(frozen=True)
class Change:
    """Where two sets of values differ, among those that were looked at. where: bool [B, S-1]."""

    where: Tensor
    size: float
    mean: float
    looked_at: int

    @property
    def count(self) -> int:
        return int(self.where.sum())

    @property
    def rows(self) -> list[int]:
        """The rows with a difference."""
        return [int(row) for row in self.where.any(1).nonzero().flatten()]

    @property
    def first(self) -> tuple[int, int] | None:
        """Row and position (in the row, of the token that was predicted) of the first difference."""
        found = self.where.nonzero()
        return (int(found[0, 0]), int(found[0, 1]) + 1) if len(found) else None


def change(ours: ForwardValues, base: ForwardValues, mask: Tensor) -> Change:
    """How `ours` differs from `base` where `mask` is set. Equal means equal bits; NaN is equal to NaN."""
    pairs = [(ours.log_probs, base.log_probs)]
    if ours.entropy is not None and base.entropy is not None:
        pairs.append((ours.entropy, base.entropy))
    where, apart = torch.zeros_like(mask), torch.zeros(mask.shape, dtype=torch.float64)
    for one, other in pairs:
        differs = (one != other) & ~(one.isnan() & other.isnan()) & mask
        distance = (one.double() - other.double()).abs().nan_to_num(torch.inf, torch.inf)
        where, apart = where | differs, torch.where(differs, torch.maximum(apart, distance), apart)
    chosen = apart[mask]
    if not chosen.numel():
        return Change(where, 0.0, 0.0, 0)
    return Change(where, float(chosen.max()), float(chosen.mean()), chosen.numel())


def answer(law: str, found: Change, ids: Tensor, words: str, *, limit: float | None = None, by_mean: bool = False) -> LawAnswer:
    """The answer of a law that allows a change up to `limit`, or none at all. `ids`: the unchanged tokens [B, S].

    by_mean: the limit is for the mean over the tokens instead of the largest change.
    """
    if not found.looked_at:
        return not_checked(law, "nothing is left to look at in this input")
    if not found.count:
        return LawAnswer(law, KEPT, looked_at=found.looked_at, count=0)
    size = found.mean if by_mean else found.size
    row, position = found.first or (0, 0)
    within = limit is not None and size <= limit
    return LawAnswer(
        law,
        WITHIN_ROUNDING if within else BROKEN,
        "" if within else words,
        size,
        limit,
        None if within else row,
        None if within else position,
        None if within else int(ids[row, position]),
        found.count,
        found.looked_at,
    )


def rerun_answer(found: Change, ids: Tensor) -> LawAnswer:
    """The answer of `rerun`: nothing may change, and what does is `nondeterministic`."""
    if not found.looked_at:
        return not_checked("rerun", "the input has no token to look at")
    if not found.count:
        return LawAnswer("rerun", KEPT, count=0, looked_at=found.looked_at)
    row, position = found.first or (0, 0)
    words = "the same call gave other numbers the second time"
    token = int(ids[row, position])
    return LawAnswer("rerun", NONDETERMINISTIC, words, found.size, None, row, position, token, found.count, found.looked_at)


def not_checked(law: str, why: str) -> LawAnswer:
    """A law that could not be asked."""
    assert law in LAWS
    return LawAnswer(law, NOT_CHECKED, why)
