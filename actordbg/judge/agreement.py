"""How a replay agrees with what the training run recorded, its ranks with each other, and its inputs with the laws.

Figures first, then words; every text says first what was broken, or not asked.

* **With the run** (`golden`): log-probs, entropies and random generators. A difference fails nothing, because other weights,
  kernels and dtypes are expected to differ. What was recorded and not compared is named with its reason.
* **Between ranks** (`extra["lane"]` of a result): ranks that ran the same input have to give the same log-probs, bit for bit.
* **With the laws** (`extra["laws"]` of a result): what must not matter was changed, and nothing may have moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actordbg.base.units import plural
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.blocks import number
from actordbg.records.replay_record import (
    BROKEN,
    KEPT,
    NONDETERMINISTIC,
    NOT_CHECKED,
    PASSED,
    WITHIN_ROUNDING,
    LawAnswer,
    ResultRecord,
    answers_of,
    finite,
    in_words,
    violations,
    weighted_mean,
)

SHOWN = 5
"""How many violations, or ranks that differ, a text names."""


@dataclass(frozen=True)
class Golden:
    """Distance to the log-probs, or entropies, that the training run itself recorded, in absolute values.

    `results` inputs, `count` tokens; `equal` inputs do not differ in any of them, `nonfinite` ones have a token that is finite
    on one side only, and the figures are over the others. The two were computed by different weights, kernels or dtypes
    unless the replay used the training's own: a large distance is a finding only where they should be equal.
    """

    results: int
    equal: int
    nonfinite: int
    count: int
    max_abs: float | None
    mean_abs: float | None
    worst_dump: str | None


@dataclass(frozen=True)
class Generators:
    """Random generators that were set to the states that the run recorded before the call.

    `restored`: inputs with at least one such generator, `devices` of which kind; `matched`, `differed`: inputs whose generators
    ended in the run's own states, or in others (the replay drew other numbers); the rest cannot be told.
    """

    restored: int
    devices: tuple[str, ...]
    matched: int
    differed: int
    example: str | None


@dataclass(frozen=True)
class NotCompared:
    """`count` inputs whose `what` (log-probs, entropies, generators) the run recorded, and why they were not compared."""

    what: str
    count: int
    reason: str


@dataclass(frozen=True)
class RankDifference:
    """`rank` got another result than `first` on the same input. `moved`: the difference of each figure that both have."""

    dump_id: str
    first: int
    rank: int
    same_log_probs: bool
    moved: dict[str, float]


@dataclass(frozen=True)
class RankAgreement:
    """Whether ranks that ran one input together agree. `lane_width`: how many they are (--align same, --tp, --ring).

    `results` inputs passed. On `checked` of them every rank answered, and on `agree` of these the answers are equal:
    log-probs bit for bit, loss and gradient norm within rounding.
    """

    lane_width: int
    results: int
    checked: int
    agree: int
    differ: tuple[RankDifference, ...]


def golden_of(results: Sequence[ResultRecord], prefix: str) -> Golden | None:
    """Take the figures from the columns that begin with `prefix` ("golden", "golden_entropy"); None if nothing was compared."""
    names = [f"{prefix}_{name}" for name in ("count", "max_abs", "mean_abs")]
    known = [row for result in results if (row := (result.dump_id, *(getattr(result, name) for name in names)))[1]]
    if not known:
        return None
    measured = [(size, dump_id) for dump_id, _, size, _ in known if finite([size])]
    largest, worst = max(measured, key=lambda pair: pair[0], default=(None, None))
    return Golden(
        results=len(known),
        equal=sum(size == 0 for size, _ in measured),
        nonfinite=len(known) - len(measured),
        count=sum(count for _, count, _, _ in known),
        max_abs=largest,
        mean_abs=weighted_mean((mean, count) for _, count, _, mean in known),
        worst_dump=worst,
    )


def generators_of(results: Sequence[ResultRecord]) -> Generators | None:
    """How many generators ended as in the run; None if none was set to a recorded state."""
    restored = [one for one in results if one.extra.get("restored")]
    if not restored:
        return None
    differed = [one.dump_id for one in restored if one.rng_match is False]
    return Generators(
        restored=len(restored),
        devices=tuple(sorted({name.partition(":")[0] for one in restored for name in one.extra["restored"]})),
        matched=sum(one.rng_match is True for one in restored),
        differed=len(differed),
        example=min(differed, default=None),
    )


def not_compared_of(results: Sequence[ResultRecord]) -> tuple[NotCompared, ...]:
    """What the run recorded and was not compared, counted by reason."""
    counted = Counter((what, reason) for one in results for what, reason in (one.extra.get("not_compared") or {}).items())
    return tuple(NotCompared(what, count, reason) for (what, reason), count in counted.items())


def against_the_run(
    golden: Golden | None, entropy: Golden | None, generators: Generators | None, not_compared: Sequence[NotCompared]
) -> list[str]:
    """In words: one line for each thing that the run recorded, and one for each reason not to compare it."""
    lines = [_golden("log-probs", golden)] if golden else []
    lines += [_golden("entropies", entropy)] if entropy else []
    if (g := generators) is not None:
        text = f"generators: {', '.join(g.devices)} set to the recorded states for {plural(g.restored, 'input')}"
        text += f"; {g.matched:,} ended in the run's own" if g.matched or g.differed else ""
        lines.append(text + (f", {g.differed:,} in others, e.g. {g.example}" if g.differed else ""))
    for reason in dict.fromkeys(one.reason for one in not_compared):
        counts = ", ".join(f"{one.what} of {plural(one.count, 'input')}" for one in not_compared if one.reason == reason)
        lines.append(f"{counts} not compared: {reason}")
    return lines


def _golden(what: str, g: Golden) -> str:
    text = f"{what}: {plural(g.results, 'input')}, {plural(g.count, 'token')}; "
    if g.equal == g.results:
        return text + "all equal"
    parts = []
    if g.max_abs is not None:
        largest = f"largest {number(g.max_abs)} nats" + f" in {g.worst_dump}" * bool(g.max_abs)
        parts.append(f"{plural(g.equal, 'input')} equal, |difference| mean {number(g.mean_abs)}, {largest}")
    if g.nonfinite:
        parts.append(f"{plural(g.nonfinite, 'input')} with a token that is finite on one side only")
    return text + "; ".join(parts)


_FIGURES = {"logprob_mean": "their mean", "loss": "loss", "grad_norm": "gradient norm"}


def agreement_of(results: Sequence[ResultRecord], config: ReplayConfig) -> RankAgreement | None:
    """Whether ranks of a lane agree; None if every rank runs its own input."""
    passed = [one for one in results if one.status == PASSED]
    if config.lane_width == 1 or not passed:
        return None
    lanes = [(result, result.extra["lane"]) for result in passed if isinstance(result.extra.get("lane"), dict)]
    differing = []
    for result, lane in lanes:
        for rank, answer in lane.get("differ", {}).items():
            both = {name: finite([answer.get(name), getattr(result, name)]) for name in _FIGURES}
            moved = {name: pair[0] - pair[1] for name, pair in both.items() if len(pair) == 2}
            same = answer.get("output_digest") == result.output_digest
            differing.append(RankDifference(result.dump_id, result.worker, int(rank), same, moved))
    return RankAgreement(
        lane_width=config.lane_width,
        results=len(passed),
        checked=len(lanes),
        agree=sum(not lane.get("differ") for _, lane in lanes),
        differ=tuple(differing),
    )


def ranks_in_words(agreement: RankAgreement | None) -> list[str]:
    """One line on what was checked, and one for each rank and input that differ (at most five)."""
    if agreement is None:
        return []
    a = agreement
    unchecked = a.results - a.checked
    rest = f"; of {plural(unchecked, 'input')} not every rank answered" if unchecked else ""
    if not a.differ:
        agreed = f"{a.lane_width} ranks agree on {plural(a.agree, 'input')}, log-probs bit for bit"
        return [agreed + rest if a.checked else f"not compared: not every rank of a group of {a.lane_width} answered"]
    lines = [f"DIFFER on {a.checked - a.agree:,} of {plural(a.checked, 'input')}{rest}"]
    for one in a.differ[:SHOWN]:
        what = "the same log-probs as" if one.same_log_probs else "other log-probs than"
        by = ", ".join(f"{_FIGURES[name]} {number(value)}" for name, value in one.moved.items() if value)
        lines.append(f"{one.dump_id}: rank {one.rank} has {what} rank {one.first}{f' (moved: {by})' if by else ''}")
    return lines + [f"... and {len(a.differ) - SHOWN:,} more"] * (len(a.differ) > SHOWN)


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
            return "no law checked"
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
    every = [answer for answers in asked.values() for answer in answers]
    bad, forbidden = (
        [
            {"dump_id": dump_id} | answer.to_dict()
            for dump_id, answers in asked.items()
            for answer in violations(answers, accepted)
        ]
        for accepted in (None, config.accept)
    )
    return LawSummary(
        len(asked),
        len(results),
        dict(Counter(answer.verdict for answer in every)),
        tuple(forbidden),
        tuple(answer for answer in bad if answer not in forbidden),
        dict(Counter(f"{answer.law}: {answer.words}" for answer in every if answer.verdict == NOT_CHECKED)),
    )


def laws_in_words(laws: LawSummary | None) -> list[str]:
    """The headline, one line for each violation (a few), and what was not checked and why."""
    if laws is None:
        return []
    lines = [laws.headline, *map(violation_in_words, laws.violations[:SHOWN])]
    lines += [f"... and {len(laws.violations) - SHOWN} more"] * (len(laws.violations) > SHOWN)
    lines += [f"accepted: {violation_in_words(one)}" for one in laws.accepted[:SHOWN]]
    return lines + [f"not checked: {reason} ({plural(count, 'input')})" for reason, count in laws.not_checked.items()]


def violation_in_words(one: dict[str, Any]) -> str:
    """ "neighbour broken: row 1 sees row 0 (...) in 20250619T052608-9f3a2c"."""
    return f"{in_words(LawAnswer.from_dict(one))} in {one['dump_id']}"
