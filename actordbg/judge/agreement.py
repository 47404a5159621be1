"""Summarize how a replay agrees with the training run's recording, its ranks with each other, and its inputs with the laws.

Figures first, then words; every text begins with what was broken or not checked.

* **With the run** (`golden`): log-probs, entropies and RNG states. A difference fails nothing, because other weights, kernels
  and dtypes are expected to differ. Recorded values that were not compared are listed with the reason.
* **Between ranks** (`extra["lane"]` of a result): ranks that ran the same input must give bit-identical log-probs.
* **With the laws** (`extra["laws"]` of a result): changes to an input that must not change its results.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actordbg.base.units import plural
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.blocks import number
from actordbg.laws.rules import of_answer
from actordbg.records.finding import BROKEN, KEPT, NOT_CHECKED, Finding
from actordbg.records.replay_record import (
    NONDETERMINISTIC,
    PASSED,
    WITHIN_ROUNDING,
    LawAnswer,
    ResultRecord,
    answers_of,
    finite,
    violations,
    weighted_mean,
)

SHOWN = 5
"""How many violations, or differing ranks, a text lists."""


@dataclass(frozen=True)
class Golden:
    """Distance from the log-probs or entropies that the training run recorded, in absolute values.

    Over `results` inputs with `count` tokens. `equal` inputs are equal in every token; `nonfinite` inputs have a token that is
    finite on one side only and are left out of the figures. Unless the replay used the run's own weights, kernels and dtype, a
    large distance is expected.
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
    """RNG states that were restored from the recording before each call.

    restored: inputs with at least one restored generator. devices: their device types. matched, differed: inputs whose final
    RNG state equals the recorded one, or does not (the replay drew other numbers); for the remaining inputs it is unknown.
    """

    restored: int
    devices: tuple[str, ...]
    matched: int
    differed: int
    example: str | None


@dataclass(frozen=True)
class NotCompared:
    """`count` inputs whose `what` (log-probs, entropies, generators) was recorded but not compared, and the reason."""

    what: str
    count: int
    reason: str


@dataclass(frozen=True)
class RankDifference:
    """`rank` and `first` got different results on the same input. moved: the difference of each figure that both ranks have."""

    dump_id: str
    first: int
    rank: int
    same_log_probs: bool
    moved: dict[str, float]


@dataclass(frozen=True)
class RankAgreement:
    """Agreement of the ranks that ran each input together. lane_width: their number (--align same, --tp, --ring).

    results: inputs that passed. checked: those on which every rank reported. agree: those on which all reports are equal,
    log-probs bit for bit, loss and gradient norm within rounding.
    """

    lane_width: int
    results: int
    checked: int
    agree: int
    differ: tuple[RankDifference, ...]


def golden_of(results: Sequence[ResultRecord], prefix: str) -> Golden | None:
    """Summarize the result columns that begin with `prefix` ("golden", "golden_entropy"); None if nothing was compared."""
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
    """Count how many RNG states ended as in the run; None if none was restored."""
    restored = [result for result in results if result.extra.get("restored")]
    if not restored:
        return None
    differed = [result.dump_id for result in restored if result.rng_match is False]
    return Generators(
        restored=len(restored),
        devices=tuple(sorted({name.partition(":")[0] for result in restored for name in result.extra["restored"]})),
        matched=sum(result.rng_match is True for result in restored),
        differed=len(differed),
        example=min(differed, default=None),
    )


def not_compared_of(results: Sequence[ResultRecord]) -> tuple[NotCompared, ...]:
    """Count the recorded values that were not compared, by reason."""
    counted = Counter((what, reason) for result in results for what, reason in (result.extra.get("not_compared") or {}).items())
    return tuple(NotCompared(what, count, reason) for (what, reason), count in counted.items())


def against_the_run(
    golden: Golden | None, entropy: Golden | None, generators: Generators | None, not_compared: Sequence[NotCompared]
) -> list[str]:
    """Return a line for each kind of recorded value, and a line for each reason why some were not compared."""
    lines = [_golden("log-probs", golden)] if golden else []
    lines += [_golden("entropies", entropy)] if entropy else []
    if (g := generators) is not None:
        text = f"RNG states: {', '.join(g.devices)} restored for {plural(g.restored, 'input')}"
        text += f"; {g.matched:,} ended in the run's state" if g.matched or g.differed else ""
        lines.append(text + (f", {g.differed:,} in another state, e.g. {g.example}" if g.differed else ""))
    for reason in dict.fromkeys(item.reason for item in not_compared):
        counts = ", ".join(f"{item.what} of {plural(item.count, 'input')}" for item in not_compared if item.reason == reason)
        lines.append(f"{counts} not compared: {reason}")
    return lines


def _golden(what: str, g: Golden) -> str:
    text = f"{what}: {plural(g.results, 'input')}, {plural(g.count, 'token')}; "
    if g.equal == g.results:
        return text + "all equal"
    parts = []
    if g.max_abs is not None:
        largest = f"largest {number(g.max_abs)} nats"
        if g.max_abs:
            largest += f" in {g.worst_dump}"
        parts.append(f"{plural(g.equal, 'input')} equal, |difference| mean {number(g.mean_abs)}, {largest}")
    if g.nonfinite:
        parts.append(f"{plural(g.nonfinite, 'input')} with a token that is finite on one side only")
    return text + "; ".join(parts)


_FIGURES = {"logprob_mean": "their mean", "loss": "loss", "grad_norm": "gradient norm"}


def agreement_of(results: Sequence[ResultRecord], config: ReplayConfig) -> RankAgreement | None:
    """Compare the ranks that ran each input together; None if every rank runs its own input."""
    passed = [result for result in results if result.status == PASSED]
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
    """Return a line on what was checked, and a line for each rank and input that differ (at most five)."""
    if agreement is None:
        return []
    a = agreement
    unchecked = a.results - a.checked
    rest = f"; not every rank reported on {plural(unchecked, 'input')}" if unchecked else ""
    if not a.differ:
        agreed = f"{a.lane_width} ranks agree on {plural(a.agree, 'input')}, log-probs bit for bit"
        return [agreed + rest if a.checked else f"not compared: not every rank of a group of {a.lane_width} reported"]
    lines = [f"ranks differ on {a.checked - a.agree:,} of {plural(a.checked, 'input')}{rest}"]
    for pair in a.differ[:SHOWN]:
        what = "the same log-probs as" if pair.same_log_probs else "other log-probs than"
        figures = [f"{_FIGURES[name]} {number(value)}" for name, value in pair.moved.items() if value]
        by = ", ".join(figures)
        moved = f" (moved: {by})" if by else ""
        lines.append(f"{pair.dump_id}: rank {pair.rank} has {what} rank {pair.first}{moved}")
    if (more := len(a.differ) - SHOWN) > 0:
        lines.append(f"... and {more:,} more")
    return lines


@dataclass
class LawSummary:
    """Results of the laws over a replay.

    inputs, of: the inputs that were checked, of how many. counts: law results by verdict. violations: what forbids a green
    verdict; raised: whether all of it is that checks raised. accepted: violations that the user accepted, in words. not_checked:
    inputs by law and reason; unasked: those laws.
    """

    inputs: int
    of: int
    counts: dict[str, int] = field(default_factory=dict)
    violations: tuple[Finding, ...] = ()
    accepted: tuple[str, ...] = ()
    not_checked: dict[str, int] = field(default_factory=dict)
    unasked: tuple[str, ...] = ()
    raised: bool = False
    headline: str = "no law checked"

    @property
    def good(self) -> bool:
        """True if no law is broken and any nondeterminism was accepted."""
        return not self.violations

    @property
    def broken(self) -> bool:
        """True if a law is broken; if not, and `good` is False, a check raised an error."""
        return bool(self.violations) and not self.raised


def laws_of(results: Sequence[ResultRecord], config: ReplayConfig) -> LawSummary | None:
    """Summarize the law results; None if no law was requested."""
    by_dump = {result.dump_id: answers for result in results if (answers := answers_of(result.extra))}
    if not by_dump and not config.laws:
        return None
    bad = [(dump_id, answer) for dump_id, answers in by_dump.items() for answer in violations(answers)]
    accepted = [(dump_id, answer) for dump_id, answer in bad if answer.verdict == config.accept and not answer.raised]
    forbidden = [pair for pair in bad if pair not in accepted]
    every = [answer for answers in by_dump.values() for answer in answers]
    left = [answer for answer in every if answer.verdict == NOT_CHECKED]
    counts = Counter(answer.verdict for answer in every)
    excused = config.accept if accepted else ""
    return LawSummary(
        inputs=len(by_dump),
        of=len(results),
        counts=dict(counts),
        violations=tuple(of_answer(*pair) for pair in forbidden),
        accepted=tuple(of_answer(*pair).said for pair in accepted),
        not_checked=dict(Counter(f"{answer.law}: {answer.words}" for answer in left)),
        unasked=tuple(sorted({answer.law for answer in left})),
        raised=bool(forbidden) and all(answer.raised for _, answer in forbidden),
        headline=_headline(len(by_dump), len(results), counts, [answer for _, answer in forbidden], excused),
    )


def _headline(inputs: int, of: int, counts: Mapping[str, int], forbidden: Sequence[LawAnswer], accepted: str | None) -> str:
    """Summary: "laws of 2 of 3 inputs: BROKEN neighbour, jacobian; 12 kept, 2 within-rounding, 4 not checked"."""
    if not inputs:
        return "no law checked"
    parts = []
    for verdict, word in ((BROKEN, "BROKEN"), (NONDETERMINISTIC, "NONDETERMINISTIC"), (NOT_CHECKED, "FAILED")):
        names = dict.fromkeys(answer.law for answer in forbidden if answer.verdict == verdict)
        parts += [f"{word} {', '.join(names)}"] if names else []
    parts += [f"{accepted} accepted"] if accepted else []
    shown = (KEPT, WITHIN_ROUNDING, NOT_CHECKED)
    counted = [f"{counts[name]} {name.replace('not-', 'not ')}" for name in shown if counts.get(name)]
    return f"laws of {inputs} of {plural(of, 'input')}: {'; '.join([*parts, ', '.join(counted)])}"


def laws_in_words(laws: LawSummary | None) -> list[str]:
    """Return the headline, a line for each violation (at most five), and what was not checked and why."""
    if laws is None:
        return []
    lines = [laws.headline, *(violation.said for violation in laws.violations[:SHOWN])]
    lines += [f"... and {len(laws.violations) - SHOWN} more"] if len(laws.violations) > SHOWN else []
    lines += [f"accepted: {said}" for said in laws.accepted[:SHOWN]]
    return lines + [f"not checked: {reason} ({plural(count, 'input')})" for reason, count in laws.not_checked.items()]
