"""What is wrong with a replay, from everything that judged it, as findings, the deciding finding first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from actordbg.judge.agreement import ranks_in_words
from actordbg.judge.report_model import ReplaySummary
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord
from actordbg.records.finding import Finding, Rule

RUNS = Rule("runs", "a call runs, and its log-probs are finite")
RANKS = Rule(
    "ranks", "ranks that ran the same input have the same log-probs, bit for bit", fails="ranks differ on the same input"
)
TRUTH = Rule(
    "truth",
    "log-probs and gradients are the truth's to rounding",
    fails="results are not the truth's",
)
RECORDED = Rule(
    "recorded outputs", "the run's outputs are what its model gives", fails="the run's outputs are not what its model gives"
)


def found_in(replay: ReplaySummary, own: ComparisonRecord | None = None) -> list[Finding]:
    """Return everything that is wrong: what explains the most comes first. own: the comparison with the run's recorded outputs,
    if it counts.
    """
    causes, places = (replay.local.causes, replay.local.places) if replay.local else ([], [])
    return [*_failures(replay), *causes, *_laws(replay), *_ranks(replay), *_truth(replay), *_recorded(replay, own), *places]


def _failures(replay: ReplaySummary) -> Iterator[Finding]:
    """A kind of error is a rule of its own, so that two errors are not the same fault."""
    for group in replay.failures:
        rule = Rule(f"{RUNS.name}: {group.name}", RUNS.holds, remedy="; or ".join(group.ways_out))
        place = {"dump": group.examples[0]} if group.examples else {}
        yield Finding(rule, group.explanation or " ".join(group.cause.split()), place)
    counts = replay.counts
    if not replay.failures and not counts.passed:
        yield Finding(RUNS, f"none of {counts.inputs} inputs has a result")


def _laws(replay: ReplaySummary) -> Iterator[Finding]:
    yield from replay.laws.violations if replay.laws else ()


def _ranks(replay: ReplaySummary) -> Iterator[Finding]:
    ranks = replay.ranks
    if replay.asked.get("align") == "same" and ranks is not None and ranks.differ:
        first = ranks.differ[0]
        yield Finding(RANKS, "; ".join(ranks_in_words(ranks)[:2]), {"dump": first.dump_id, "rank": first.rank})


def _truth(replay: ReplaySummary) -> Iterator[Finding]:
    truth = replay.truth
    if truth is not None and truth.verdict == MISMATCH:
        place = {"dump": truth.worst_dump} if truth.worst_dump else {}
        yield Finding(TRUTH, truth.reasons or f"{truth.mismatches} dumps differ", place, size=truth.max_abs)


def _recorded(replay: ReplaySummary, own: ComparisonRecord | None) -> Iterator[Finding]:
    """A cause that explains recorded outputs comes before that they differ."""
    if own is not None and own.verdict == MISMATCH:
        yield from own.explained.found("") if own.explained and own.explained.wrong else ()
        size = own.furthest[0] if own.furthest else None
        worst = {"dump": own.dumps[0].dump_id} if own.dumps else {}
        yield Finding(RECORDED, "; ".join(own.dumps[0].reasons) if own.dumps else "", worst, size=size)
    elif own is None and replay.recorded is not None and replay.recorded.verdict == MISMATCH:
        recorded = replay.recorded
        yield Finding(RECORDED, recorded.reasons or "", {"dump": recorded.worst_dump}, size=recorded.max_abs)
