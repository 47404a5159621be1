"""What the laws said of a replay: figures first, then words. Every text says first what was broken, or not asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actordbg.base.units import plural
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.replay_record import (
    BROKEN,
    KEPT,
    NONDETERMINISTIC,
    NOT_CHECKED,
    WITHIN_ROUNDING,
    LawAnswer,
    ResultRecord,
    answers_of,
    in_words,
    violations,
)

SHOWN = 5
"""How many violations a text names."""


@dataclass
class LawSummary:
    """Of `inputs` of `of` the laws were asked. counts: answers by verdict. violations: what forbids a green verdict, as data with
    the dump's id. accepted: the same, where the user accepted it. not_checked: by law and reason, how many inputs.
    """

    inputs: int
    of: int
    counts: dict[str, int] = field(default_factory=dict)
    violations: tuple[dict[str, Any], ...] = ()
    accepted: tuple[dict[str, Any], ...] = ()
    not_checked: dict[str, int] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """No law is broken, and what is nondeterministic was accepted."""
        return not self.violations

    @property
    def broken(self) -> bool:
        """Something changed that must not; else what forbids a green verdict is that asking raised."""
        return any(not one.get("raised") for one in self.violations)

    @property
    def headline(self) -> str:
        """In a line: "laws of 2 of 3 inputs: BROKEN neighbour, jacobian; 12 kept, 2 within-rounding, 4 not checked"."""
        if not self.inputs:
            return "no law was asked"
        told = []
        for verdict, word in ((BROKEN, "BROKEN"), (NONDETERMINISTIC, "NONDETERMINISTIC"), (NOT_CHECKED, "FAILED")):
            names = dict.fromkeys(one["law"] for one in self.violations if one["verdict"] == verdict)
            told += [f"{word} {', '.join(names)}"] if names else []
        if self.accepted:
            told.append(f"{', '.join(dict.fromkeys(one['verdict'] for one in self.accepted))} accepted")
        shown = (KEPT, WITHIN_ROUNDING, NOT_CHECKED)
        counted = [f"{self.counts[name]} {name.replace('not-', 'not ')}" for name in shown if self.counts.get(name)]
        return f"laws of {self.inputs} of {plural(self.of, 'input')}: {'; '.join([*told, ', '.join(counted)])}"


def laws_of(results: Sequence[ResultRecord], config: ReplayConfig) -> LawSummary | None:
    """What the laws said of these results; None if none was to be asked."""
    asked = {one.dump_id: answers for one in results if (answers := answers_of(one.extra))}
    if not asked and not config.laws:
        return None
    every = [(dump_id, answer) for dump_id, answers in asked.items() for answer in answers]
    bad = [(dump_id, one) for dump_id, one in every if violations([one])]
    let = [(dump_id, one) for dump_id, one in bad if not violations([one], config.accept)]
    reasons = Counter(f"{one.law}: {one.words}" for _, one in every if one.verdict == NOT_CHECKED)
    return LawSummary(
        len(asked),
        len(results),
        dict(Counter(one.verdict for _, one in every)),
        _plain(one for one in bad if one not in let),
        _plain(let),
        dict(reasons),
    )


def laws_in_words(laws: LawSummary | None) -> list[str]:
    """The headline, one line for each violation (a few), and what was not checked and why."""
    if laws is None:
        return []
    lines = [laws.headline]
    lines += [violation_in_words(one) for one in laws.violations[:SHOWN]]
    more = len(laws.violations) - SHOWN
    lines += [f"... and {more} more"] if more > 0 else []
    lines += [f"accepted: {violation_in_words(one)}" for one in laws.accepted[:SHOWN]]
    return lines + [f"not checked: {reason} ({plural(count, 'input')})" for reason, count in laws.not_checked.items()]


def violation_in_words(one: dict[str, Any]) -> str:
    """ "neighbour broken: row 1 sees row 0 (...) in 20250619T052608-9f3a2c"."""
    return f"{in_words(LawAnswer.from_dict(one))} in {one['dump_id']}"


def _plain(answers: Iterable[tuple[str, LawAnswer]]) -> tuple[dict[str, Any], ...]:
    return tuple({"dump_id": dump_id} | one.to_dict() for dump_id, one in answers)
