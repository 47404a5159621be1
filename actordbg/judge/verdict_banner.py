"""The verdict of a report in one sentence, and what it does not judge. Pure.

Green needs both: every input passed, and what it computed was compared with the truth and agrees. An input that merely finished
with finite numbers is "not judged". Figures of the embedded toy model are said to be such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actordbg.base.units import human_bytes, plural
from actordbg.catalog.query import OPEN
from actordbg.config.replay_config import TINY
from actordbg.document.blocks import BAD_TONE, GOOD_TONE, NO_TONE, PART_TONE, Banner, number, rate
from actordbg.judge.report_model import Counts, ReplaySummary, Summary
from actordbg.records.comparison_record import GOOD, MISMATCH, WITHIN_NOISE

if TYPE_CHECKING:
    from actordbg.catalog.lab_models import ComparisonRun

_ORDER = {BAD_TONE: 0, PART_TONE: 1, GOOD_TONE: 2, NO_TONE: 3}


def banner(summary: Summary) -> Banner:
    """The verdict over all replays of a report."""
    if not summary.replays:
        return Banner("NOTHING", "was replayed yet.", NO_TONE)
    if len(summary.replays) == 1:
        return of_replay(summary.replays[0])
    each = [of_replay(one) for one in summary.replays]
    worst = min(each, key=lambda one: _ORDER[one.tone])
    counts = ", ".join(f"{sum(o.word == word for o in each)} {word}" for word in dict.fromkeys(one.word for one in each))
    wanted = [f"{one.label}: {told.sentence}" for one, told in zip(summary.replays, each, strict=True) if told.tone == BAD_TONE]
    sentence = f"{plural(len(each), 'replay')}: {counts}." + (f" {wanted[0]}" if wanted else "")
    left = tuple(dict.fromkeys(text for one in each for text in one.unjudged))
    return Banner(worst.word, sentence, worst.tone, (("inputs passed", _passed(summary.totals)),), left[:3])


def of_replay(one: ReplaySummary) -> Banner:
    """The verdict of one replay."""
    word, sentence, tone = _judged(one)
    toy = one.asked.get("model", TINY) == TINY
    figures = [("inputs passed", _passed(one.counts))]
    if (truth := _truth(one)) is not None and truth.max_abs is not None:
        figures.append(("furthest from the truth", f"{number(truth.max_abs, 2)} nats"))
    if one.tokens_per_s.median is not None:
        figures.append(("tokens/s" + " (toy model)" * toy, rate(one.tokens_per_s.median)))
    figures.append(("peak memory" + " (toy model)" * toy, human_bytes(one.peak_memory_bytes)))
    return Banner(word, sentence, tone, tuple(figures), tuple(_unjudged(one, toy)))


def _judged(one: ReplaySummary) -> tuple[str, str, str]:
    c, laws, truth = one.counts, one.laws, _truth(one)
    if bad := c.failed + c.crashed + c.hung:
        why = f": {one.failures[0].name}" if one.failures else ""
        return "FAILED", f"{bad:,} of {plural(c.inputs, 'input')} did not pass{why}.", BAD_TONE
    if not c.passed and one.status in OPEN:
        goes_on = f"`actordbg replay --resume {one.replay_id}` goes on"
        return one.status.upper(), f"None of {plural(c.inputs, 'input')} has a result; {goes_on}.", NO_TONE
    if not c.passed:
        return "NOTHING PASSED", f"None of {plural(c.inputs, 'input')} has a result; the replay is {one.status}.", BAD_TONE
    if laws is not None and not laws.good:
        word, what = ("WRONG", "is broken") if laws.broken else ("FAILED", "failed")
        return word, f"A law {what}: {laws.headline}.", BAD_TONE
    if truth is not None and truth.verdict == MISMATCH:
        what = f"{truth.mismatches:,} of {plural(truth.compared, 'input')}"
        return "WRONG", f"The numbers of {what} are not the truth's: off by up to {number(truth.max_abs, 2)} nats.", BAD_TONE
    return _good(one, truth)


def _good(one: ReplaySummary, truth: ComparisonRun | None) -> tuple[str, str, str]:
    c = one.counts
    left = f"; {c.inputs - c.passed:,} were not run" if c.passed < c.inputs else ""
    passed = f"{c.passed:,} of {plural(c.inputs, 'input')} passed{left}"
    if truth is not None and truth.verdict in GOOD:
        dtype = one.resolved.get("dtype") or "the dtype"
        near = "within the noise" if truth.verdict == WITHIN_NOISE else f"as near the truth as {dtype} allows"
        known = f"the log-probs of {truth.compared:,} are {near}"
        return "RIGHT", f"{passed}, and {known}.", GOOD_TONE if not left else PART_TONE
    laws = ", and no law that was asked is broken" if one.laws is not None and one.laws.inputs else ""
    return "NOT JUDGED", f"{passed} with finite numbers{laws}; whether they are right was not asked.", PART_TONE


def _unjudged(one: ReplaySummary, toy: bool) -> Sequence[str]:
    left = []
    truth = _truth(one)
    if toy:
        left.append("your model: this ran the embedded toy model `tiny` (`--model PATH` replays your own)")
    if truth is None and one.counts.passed:
        left.append(f"the numbers: `actordbg compare {one.replay_id} truth` compares them with the truth")
    elif truth is not None and truth.compared < one.counts.inputs:
        count = f"{one.counts.inputs - truth.compared:,} of {plural(one.counts.inputs, 'input')}"
        left.append(f"{count}, which were not compared with the truth")
    if one.laws is None and one.counts.passed:
        left.append("laws: `actordbg replay --laws` asks whether padding or neighbours change anything")
    return left


def _truth(one: ReplaySummary) -> ComparisonRun | None:
    return next((row for row in one.comparisons if row.against_kind == "truth"), None)


def _passed(counts: Counts) -> str:
    return f"{counts.passed:,} / {counts.inputs:,}"
