"""What is wrong with a replay, from everything that judged it, as findings, the deciding finding first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actordbg.actor.rules import LEAKED
from actordbg.base.units import listed, plural
from actordbg.causes.bank import WEIGHTS
from actordbg.document.blocks import TRAINER, number
from actordbg.judge.agreement import ranks_in_words
from actordbg.judge.report_model import ReplaySummary
from actordbg.records.comparison_record import (
    MISMATCH,
    NOT_COMPARED,
    RECORDED,
    TRUTH,
    ComparisonRecord,
    Figures,
)
from actordbg.records.finding import Finding, NotChecked, Rule

RUNS = Rule("runs", "a call runs, and its log-probs are finite")
RANKS = Rule(
    "ranks",
    "ranks that ran the same input have the same log-probs, bit for bit",
    remedy="run it with one rank; if that is right, compare the ranks' weights, seeds and versions",
    fails="ranks compute different results from the same input",
)
LEAKS = Rule(
    "leaking rows",
    "packed rows of the run do not see each other",
    remedy="pass positions that restart at 0 in each row, no attention mask, and use_cache=False; or use flash attention",
    side=TRAINER,
    fails="packed rows of the run leaked into each other",
)
LAWS = Rule("laws", "changes that must not matter change nothing")
ROUNDING = Rule("rounding", "limits follow what rounding does to these inputs")
CODE = Rule("code", "every module runs transformers' own code")
BORDERS = Rule("borders", "rows are where the run has them")
NO_TOY = NotChecked(Rule("your model", "the model that is trained is right"), "your model", "--model")
FLAT = NotChecked(ROUNDING, "rounding on these inputs (fixed limits were used)")


@dataclass(frozen=True)
class Judged:
    """A replay with everything that judged it. truth, own: the comparisons with the truth and with what the run recorded, where
    their records are there; without them the catalog's rows decide. left: what was not checked. no_truth: why there is no truth.
    """

    replay: ReplaySummary
    truth: ComparisonRecord | None = None
    own: ComparisonRecord | None = None
    left: Sequence[NotChecked] = ()
    no_truth: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the replay, in words."""
        return self.replay.resolved.get("dtype") or "its dtype"

    @property
    def found(self) -> list[Finding]:
        """Everything that is wrong: what explains the most comes first, then the places where it shows itself."""
        local, laws = self.replay.local, self.replay.laws
        causes, places = (local.causes, local.places) if local else ([], [])
        violations = laws.violations if laws else ()
        recorded = self.recorded() if self.compared else ()  # without a truth, the replay may be wrong instead
        return [*self.failures(), *causes, *violations, *self.ranks(), *self.against_truth(), *recorded, *places]

    @property
    def compared(self) -> bool:
        """Check whether anything was compared with the truth."""
        return self.replay.truth is not None and self.replay.truth.verdict != NOT_COMPARED

    def failures(self) -> Iterator[Finding]:
        """Yield each kind of error, a rule of its own, so that two errors are not the same fault."""
        for group in self.replay.failures:
            rule = Rule(f"{RUNS.name}: {group.name}", RUNS.holds, remedy="; or ".join(group.ways_out))
            place = {"dump": group.examples[0]} if group.examples else {}
            why = group.explanation or " ".join(group.cause.split())
            yield Finding(rule, f"{group.kind} ({plural(group.count, 'input')}): {why}", place)
        counts = self.replay.counts
        if not self.replay.failures and not counts.passed:
            yield Finding(RUNS, f"none of {counts.inputs} inputs has a result")

    def ranks(self) -> Iterator[Finding]:
        """Yield that ranks disagree on an input that all of them ran."""
        ranks = self.replay.ranks
        if self.replay.asked.get("align") == "same" and ranks is not None and ranks.differ:
            first = ranks.differ[0]
            yield Finding(RANKS, "; ".join(ranks_in_words(ranks)[:2]), {"dump": first.dump_id, "rank": first.rank})

    def against_truth(self) -> Iterator[Finding]:
        """Yield what explains a difference from the truth, then the difference."""
        truth = self.replay.truth
        local = self.replay.local
        of_model = truth is not None and local is not None and truth.reasons == local.said  # what the model is says it already
        if truth is None or truth.verdict != MISMATCH or (of_model and not truth.mismatches):
            return
        yield from explained_outputs(self.truth) if self.truth is not None else ()
        reasons = (truth.reasons,) if self.truth is None else self.truth.reasons
        parts = [reason for reason in reasons if reason and (local is None or reason != local.said)]
        if truth.mismatches:
            differ = "differs" if truth.mismatches == 1 else "differ"
            many = f"{truth.mismatches:,} of {plural(truth.compared, 'dump')} {differ} from the truth"
            parts.insert(0, f"{many} by more than {self.dtype} rounding")
        place = {"dump": truth.worst_dump} if truth.worst_dump else {}
        yield Finding(TRUTH, "; ".join(parts), place, size=truth.max_abs)

    def recorded(self) -> Iterator[Finding]:
        """Yield what explains recorded outputs, then that they are not this model's."""
        own, row = self.own, self.replay.recorded
        if own is not None and own.verdict == MISMATCH:
            yield from explained_outputs(own)
            if leaking := [dump.dump_id for dump in own.mismatches if LEAKED in dump.reasons]:
                yield Finding(LEAKS, LEAKED, {"dump": leaking[0]})
            size = own.furthest[0] if own.furthest else None
            yield Finding(RECORDED, self.recorded_in_words(own), {"dump": own.dumps[0].dump_id} if own.dumps else {}, size=size)
        elif own is None and row is not None and row.verdict == MISMATCH:
            said = f"in {row.mismatches:,} of {plural(row.compared, 'dump')} the run's outputs are not what its model gives"
            said = f"{said}: {row.reasons}" if row.reasons else said
            yield Finding(RECORDED, said, {"dump": row.worst_dump}, size=row.max_abs)

    def recorded_in_words(self, own: ComparisonRecord) -> str:
        """Describe how recorded outputs differ from this replay, with the largest differences."""
        bad, far = own.mismatches, beyond(own)
        amounts = []
        for name, size in far:
            amount = "a non-finite amount" if size is None else f"up to {number(size, 3)} nats"
            amounts.append(f"{name} by {amount}")
        furthest = listed(amounts) or "; ".join(bad[0].reasons[:1] if bad else own.reasons)
        many = f"{len(bad):,} of {plural(len(own.compared), 'dump')}"
        said = f"in {many} the run's outputs are not what its model gives in {self.dtype}: {furthest}"
        return f"{said}; its log-probs agree" if [name for name, _ in far] == ["entropies"] else said


def explained_outputs(compared: ComparisonRecord) -> list[Finding]:
    """Return the causes of a difference. Recorded outputs are the trainer's, unless the model may be another than the run's."""
    explained = compared.explained
    if explained is None:
        return []
    other = explained.unknown or WEIGHTS in [cause.name for cause in explained.causes]
    return explained.found(TRAINER if compared.b.kind == "golden" and not other else "")


def beyond(own: ComparisonRecord) -> list[tuple[str, float | None]]:
    """Return the outputs that exceed their limit in a mismatch, each with its largest difference in nats; None: not finite."""
    bad = own.mismatches
    far: list[tuple[str, float | None]] = []
    for name, limit, figures in (
        ("log-probs", "max_abs", [dump.log_probs for dump in bad]),
        ("entropies", "entropy_max_abs", [dump.entropy for dump in bad]),
    ):
        known: list[Figures] = [each for each in figures if each is not None]
        furthest = max((each.max_abs or 0.0 for each in known), default=0.0)
        if any(each.nonfinite for each in known):
            far.append((name, None))
        elif furthest > (own.thresholds.get(limit) or 0.0):
            far.append((name, furthest))
    return far
