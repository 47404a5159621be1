"""Why a family is wrong, where that is known: what a reader needs to know who sees the finding for the first time. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actordbg.matrix.family_matrix import FamilyFinding, FamilyResult


@dataclass(frozen=True)
class Cause:
    """A known cause. applies: whether it explains this finding of this family."""

    title: str
    meaning: str
    applies: Callable[[FamilyResult, FamilyFinding], bool]


CAUSES: tuple[Cause, ...] = ()


def cause_of(result: FamilyResult, finding: FamilyFinding) -> Cause | None:
    """The first cause that explains a finding; None for one that nobody has looked into."""
    return next((one for one in CAUSES if one.applies(result, finding)), None)
