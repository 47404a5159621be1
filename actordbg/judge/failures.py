"""Failures grouped by what they have in common: a known signature, else the kind of error with its figures taken out.

A hundred inputs that fail alike are one line of a report, with the first of them as the example. The meaning of a signature, and
the way out, come from `Explain`, which the caller hands in (`actordbg.actor.signatures` in the product).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from actordbg.judge.report_model import FailureGroup
from actordbg.records.replay_record import CRASHED, FAILED, HUNG, PASSED, ResultRecord

EXAMPLES = 3
CAUSE_CHARS = 600

Explain = Callable[[str], tuple[str, tuple[str, ...]] | None]
"""From a signature's name to (explanation, ways out), or None for an unknown name."""

_FIGURES = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def nothing_known(name: str) -> None:
    """The Explain that knows no signature."""


def group_failures(results: Sequence[ResultRecord], explain: Explain) -> tuple[FailureGroup, ...]:
    """One group for each kind of failure, the largest first. The earliest result of a group gives its cause."""
    groups: dict[tuple[str, str], list[ResultRecord]] = {}
    for one in sorted(results, key=lambda r: (r.started_at, r.slot)):
        if one.status != PASSED:
            groups.setdefault(_alike(one), []).append(one)
    made = [_group(members, explain) for members in groups.values()]
    return tuple(sorted(made, key=lambda group: (-group.count, group.name)))


def _alike(one: ResultRecord) -> tuple[str, str]:
    """What makes two failures the same."""
    if one.signature:
        return "signature", one.signature
    return one.error_class or one.status, _FIGURES.sub("#", _first_line(one.error))


def _group(members: Sequence[ResultRecord], explain: Explain) -> FailureGroup:
    first = members[0]
    known = explain(first.signature) if first.signature else None
    explanation, ways_out = known or ("", ())
    return FailureGroup(
        name=first.signature or _unnamed(first),
        known=known is not None,
        count=len(members),
        statuses=dict(Counter(one.status for one in members)),
        error_class=first.error_class,
        cause=(first.error or "")[:CAUSE_CHARS],
        log_excerpt=first.log_excerpt,
        explanation=explanation,
        ways_out=tuple(ways_out),
        examples=tuple(one.dump_id for one in members[:EXAMPLES]),
    )


def _unnamed(one: ResultRecord) -> str:
    if one.error_class:
        return one.error_class
    if one.status == FAILED and one.nonfinite:
        return "non-finite log-probs"
    return {CRASHED: "worker died", HUNG: "timed out"}.get(one.status, one.status)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0][:200]
