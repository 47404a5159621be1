"""How a replay agrees with what the training run recorded, and how its ranks agree with each other. Figures first, then words.

* **With the run** (`golden`): log-probs, entropies and random generators. A difference fails nothing, because other weights,
  kernels and dtypes are expected to differ. What was recorded and not compared is named with its reason.
* **Between ranks** (`extra["lane"]` of a result): ranks that ran the same input have to give the same log-probs, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actordbg.base.units import plural
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.blocks import number
from actordbg.records.arithmetic import finite, weighted_mean
from actordbg.records.replay_record import PASSED, ResultRecord


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
    """Figures from the columns that begin with `prefix` ("golden", "golden_entropy"); None if nothing was compared."""

    def of(one: ResultRecord, figure: str) -> Any:
        return getattr(one, f"{prefix}_{figure}")

    known = [one for one in results if of(one, "count")]
    if not known:
        return None
    measured = [one for one in known if finite([of(one, "max_abs")])]
    worst = max(measured, key=lambda one: of(one, "max_abs"), default=None)
    return Golden(
        results=len(known),
        equal=sum(of(one, "max_abs") == 0 for one in measured),
        nonfinite=len(known) - len(measured),
        count=sum(of(one, "count") for one in known),
        max_abs=of(worst, "max_abs") if worst else None,
        mean_abs=weighted_mean((of(one, "mean_abs"), of(one, "count")) for one in known),
        worst_dump=worst.dump_id if worst else None,
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
    lanes = [(one, one.extra["lane"]) for one in passed if isinstance(one.extra.get("lane"), dict)]
    differing = [_difference(one, int(rank), answer) for one, lane in lanes for rank, answer in lane.get("differ", {}).items()]
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
    lines += [_in_words(one) for one in a.differ[:5]]
    return lines + ([f"... and {len(a.differ) - 5:,} more"] if len(a.differ) > 5 else [])


def _difference(one: ResultRecord, rank: int, answer: dict[str, Any]) -> RankDifference:
    moved = {}
    for name in _FIGURES:
        there, here = finite([answer.get(name)]), finite([getattr(one, name)])
        if there and here:
            moved[name] = there[0] - here[0]
    same = answer.get("output_digest") == one.output_digest
    return RankDifference(one.dump_id, one.worker, rank, same, moved)


def _in_words(one: RankDifference) -> str:
    what = "the same log-probs as" if one.same_log_probs else "other log-probs than"
    by = ", ".join(f"{_FIGURES[name]} {number(value)}" for name, value in one.moved.items() if value)
    return f"{one.dump_id}: rank {one.rank} has {what} rank {one.first}{f' (moved: {by})' if by else ''}"
