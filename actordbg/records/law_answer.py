"""What a law said about one input: the contract between the workers that check laws, and everything that shows answers.

A result keeps its answers as plain data in `extra["laws"]`, one object for each law (`answers_of` reads them):

    kept              nothing changed that must not change
    within-rounding   something moved, by no more than rounding moves this input (`limit`)
    nondeterministic  the same call gave other numbers the second time
    broken            something changed that must not change
    not-checked       the law could not be asked here, and `words` says why; `raised`: because asking it raised

Standard library only: this is read at the desk without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KEPT, WITHIN_ROUNDING, NONDETERMINISTIC = "kept", "within-rounding", "nondeterministic"
BROKEN, NOT_CHECKED = "broken", "not-checked"
LAWS = "laws"
"""The key in a result's `extra`."""


@dataclass(frozen=True)
class LawAnswer:
    """size: the largest change, nats (of a gradient: relative). limit: what rounding may do. row, position, token: the first
    place that changed. count of `looked_at` values changed. words: what it means, or why it was not checked.
    """

    law: str
    verdict: str
    words: str = ""
    size: float | None = None
    limit: float | None = None
    row: int | None = None
    position: int | None = None
    token: int | None = None
    count: int | None = None
    looked_at: int | None = None
    raised: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without what is not there; a size that is not finite is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None and not _odd(value)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LawAnswer:
        """From plain data; what this version does not know is left out."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def answers_of(extra: Mapping[str, Any]) -> list[LawAnswer]:
    """The answers in a result's `extra`; what is no answer is passed over."""
    found = extra.get(LAWS)
    sound = (
        (one for one in found if isinstance(one, Mapping) and {"law", "verdict"} <= one.keys()) if isinstance(found, list) else ()
    )
    return [LawAnswer.from_dict(one) for one in sound]


def violations(answers: Iterable[LawAnswer], accepted: str | None = None) -> list[LawAnswer]:
    """The answers that forbid a green verdict. `accepted`: a verdict that was accepted by name, `nondeterministic`."""
    bad = {BROKEN, NONDETERMINISTIC} - {accepted}
    return [one for one in answers if one.verdict in bad or one.raised]


def in_words(answer: LawAnswer) -> str:
    """One answer as a sentence: "neighbour broken: row 1 sees row 0 (198 of 199, from position 3, token 17, up to 0.04)"."""
    details = []
    if answer.count is not None and answer.looked_at:
        details.append(f"{answer.count:,} of {answer.looked_at:,}")
    if answer.row is not None and answer.position is not None:
        token = "" if answer.token is None else f", token {answer.token}"
        details.append(f"first: row {answer.row}, position {answer.position}{token}")
    if answer.size is not None:
        limit = "" if answer.limit is None else f", limit {answer.limit:.2g}"
        details.append(f"up to {answer.size:.2g}{limit}")
    told = f" ({'; '.join(details)})" if details and answer.verdict != NOT_CHECKED else ""
    return f"{answer.law} {'failed' if answer.raised else answer.verdict}{': ' + answer.words if answer.words else ''}{told}"


def _odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
