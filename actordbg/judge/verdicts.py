"""Decide whether a replay is right: the verdict of `check`, `replay` and `report`, and of lists of replays. Pure.

RIGHT requires that every input passed, that no law failed, and that the results agree with the truth. An input that merely
finished with finite numbers is NOT CHECKED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actordbg.actor.rules import LEAKED
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import human_bytes, plural, with_handles
from actordbg.catalog.dump_verdicts import WORST_FIRST, breaks
from actordbg.catalog.query import OPEN
from actordbg.config.as_ran import as_ran, repeat_options
from actordbg.config.replay_config import TINY, TOY_MODEL
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Verdict, number, rate, seconds
from actordbg.judge.agreement import ranks_in_words
from actordbg.judge.replay_findings import found_in
from actordbg.judge.report_model import ReplaySummary
from actordbg.locate.rules import EAGER, KERNEL
from actordbg.locate.verdict import unlocated
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, WITHIN_NOISE, ComparisonRecord, Figures
from actordbg.records.finding import ISOLATION, RAISED, Finding

if TYPE_CHECKING:
    from actordbg.catalog.lab_columns import ComparisonRun, ReplayRow

CAUSE_CHARS = 200
_EXAMPLES = 3


def word_of_row(row: ReplayRow, truth: ComparisonRun | None, recorded: ComparisonRun | None, answers: Collection[str]) -> str:
    """Return the word of a replay from the catalog. truth, recorded: its newest comparisons. answers: verdicts of its laws."""
    if row.failed + row.crashed + row.hung or not (row.passed or row.status in OPEN):
        return FAILED
    accept, compared = row.config.get("accept"), [each.verdict for each in (truth, recorded) if each is not None]
    if MISMATCH in compared or any(breaks(answer, accept) for answer in answers):
        return WRONG
    if RAISED in answers:
        return FAILED
    return RIGHT if row.passed and truth is not None and NOT_COMPARED not in compared else UNCHECKED


def replay_verdict(
    replay: ReplaySummary,
    *,
    of: int | None = None,
    own: ComparisonRecord | None = None,
    left: Sequence[str] = (),
    no_truth: str = "",
    recorded: str | None = None,
    reported: bool = False,
    explained: bool = False,
) -> Verdict:
    """Return the verdict of a replay.

    of: the number of dumps that its inputs were drawn from. own: the comparison with the run's recorded outputs, if it counts.
    left: what else was not checked. no_truth: why there is no truth. recorded: the model that the dumps name. reported: whether
    this is the replay's own report, so that the next command is another. explained: whether this is its own explanation.
    """
    local = replay.local
    values = as_ran(replay.asked, replay.resolved)
    word, said, deciding = _judged(replay, of or replay.counts.inputs, own, left, no_truth)
    following = _next(replay, word, own, recorded, reported, bool(no_truth) or replay.truth is not None)
    if local is not None and word in (RIGHT, WRONG, UNCHECKED) and local.word == WRONG:
        said = f"{said}: {local.said}" if word == WRONG else local.said
        word, following = WRONG, _next(replay, WRONG, own, recorded, reported, True)
    elif local is not None and word == local.word == RIGHT:
        said += f"; {local.said}"
    if word == WRONG and not explained:
        following = f"actordbg explain {replay.replay_id}"
    toy = values["model"] == TINY
    not_checked = (*["your model (--model)"] * toy, *left, *_left(replay, left)) if word in (RIGHT, WRONG) else ()
    figures = (*deciding, *_figures(replay, f" ({TOY_MODEL})" * toy))
    found = found_in(replay, own) if word in (WRONG, FAILED) else []
    return Verdict(word, said, figures, not_checked, following, toy, found, whose=replay.whose)


Judged = tuple[str, str, Sequence[tuple[str, str]]]
"""The word, the rest of the sentence, and the deciding figures."""


def _judged(replay: ReplaySummary, of: int, own: ComparisonRecord | None, left: Sequence[str], no_truth: str) -> Judged:
    c, laws, truth = replay.counts, replay.laws, replay.truth
    bad = c.failed + c.crashed + c.hung
    every, dumps = plural(c.inputs, "dump"), f"{c.passed:,} of {plural(of, 'dump')}"
    dtype = replay.resolved.get("dtype") or "its dtype"
    far = (("max diff from the truth", f"{number(truth.max_abs, 2)} nats"),) if truth and truth.max_abs is not None else ()
    if bad:
        why = ""
        for failure in replay.failures[:1]:
            first = failure.cause.strip().split("\n")[0][:CAUSE_CHARS]
            why = f": {first if not first or first.startswith(failure.name) else f'{failure.name}, {first}'}"
        return FAILED, f"{bad:,} of {every} did not pass{why}", [("did not pass", f"{bad:,} of {every}")]
    if not c.passed:
        ended = f"{c.stopped:,} stopped by the user" if c.stopped else f"the replay is {replay.status}"
        return (UNCHECKED if replay.status in OPEN else FAILED), f"none of {every} has a result; {ended}", ()
    if laws is not None and not laws.good:
        names = ", ".join(dict.fromkeys(violation.rule.name for violation in laws.violations))
        word, what = (WRONG, "laws that fail") if laws.broken else (FAILED, "laws that could not be checked")
        return word, laws.violations[0].said, [*far, (what, names)]
    if replay.asked.get("align") == "same" and replay.ranks is not None and replay.ranks.differ:
        return WRONG, "; ".join(ranks_in_words(replay.ranks)[:2]), ()
    if truth is None or truth.verdict == NOT_COMPARED:
        if not no_truth and truth is None:
            unbroken = ", and every law checked holds" if laws is not None and laws.inputs else ""
            return UNCHECKED, f"{dumps} passed with finite numbers{unbroken}; correctness was not checked", ()
        why = no_truth or ((truth.reasons or "") if truth else "").removeprefix("dump not compared: ")
        return UNCHECKED, f"{dumps} ran; none could be compared with the truth{why and ': '}{why}", ()
    if truth.verdict == MISMATCH:
        many = f"{truth.mismatches:,} of {plural(truth.compared, 'dump')} differ{'s' * (truth.mismatches == 1)} from the truth"
        rounding = f"{many} by more than {dtype} rounding" if truth.mismatches else None
        return WRONG, "; ".join(filter(None, (rounding, truth.reasons))), far
    recorded = replay.recorded
    if own is None and recorded is not None and recorded.verdict == MISMATCH:
        several = f"{recorded.mismatches:,} of {plural(recorded.compared, 'dump')}"
        return WRONG, f"in {several} the run's outputs are not what its model gives", far
    if own is not None and (said := _own_in_words(own, dtype)):
        return (
            WRONG,
            said,
            [(f"max diff from the run's {name}", f"{number(size, 3)} nats") for name, size in _beyond(own)] + [*far],
        )
    match = "matches" if truth.compared == 1 else "match"
    near = "within the noise floor" if truth.verdict == WITHIN_NOISE else f"to {dtype} rounding"
    said = f"{truth.compared:,} of {plural(of, 'dump')} {match} the truth {near}"
    if (own or recorded or truth).verdict == NOT_COMPARED:
        return UNCHECKED, f"{said}; not checked: {left[0] if left else 'the outputs of the run'}", far
    return RIGHT, said, far


def _beyond(own: ComparisonRecord) -> list[tuple[str, float | None]]:
    """Return the outputs that exceed their limit in a mismatch, each with its largest difference in nats; None: not finite."""
    bad = [dump for dump in own.dumps if dump.verdict == MISMATCH]
    beyond: list[tuple[str, float | None]] = []
    for name, limit, figures in (
        ("log-probs", "max_abs", [dump.log_probs for dump in bad]),
        ("entropies", "entropy_max_abs", [dump.entropy for dump in bad]),
    ):
        known: list[Figures] = [each for each in figures if each is not None]
        furthest = max((each.max_abs or 0.0 for each in known), default=0.0)
        if any(each.nonfinite for each in known):
            beyond.append((name, None))
        elif furthest > (own.thresholds.get(limit) or 0.0):
            beyond.append((name, furthest))
    return beyond


def _own_in_words(own: ComparisonRecord, dtype: str) -> str:
    """Describe how the run's recorded outputs differ from this replay, with the largest differences; "" if they agree."""
    bad, beyond = [dump for dump in own.dumps if dump.verdict == MISMATCH], _beyond(own)
    if not bad:
        return ""
    amounts = ((name, "a non-finite amount" if size is None else f"up to {number(size, 3)} nats") for name, size in beyond)
    agree = "; its log-probs agree" if [name for name, _ in beyond] == ["entropies"] else ""
    fault = f"; {LEAKED}" if any(LEAKED in dump.reasons for dump in bad) else ""
    many = f"{len(bad):,} of {plural(len(own.compared), 'dump')}"
    furthest = ", ".join(f"{name} by {amount}" for name, amount in amounts) or bad[0].reasons[0]
    causes = "".join(f"; {sentence}" for sentence in own.explained.sentences) if own.explained else ""
    return f"in {many} the run's outputs are not what its model gives in {dtype}: {furthest}{agree}{fault}{causes}"


def _left(replay: ReplaySummary, known: Sequence[str]) -> Iterator[str]:
    """Yield what was not checked beyond what is `known`."""
    truth, laws = replay.truth, replay.laws
    yield from (text for text in unlocated(replay.local, replay.replay_id) if text not in known)
    for package, name in replay.resolved.get("foreign_code", {}).items():
        yield f"the code of {package} ({name}), which is not transformers'"
    if truth is not None and truth.rounding_id is None:
        yield "rounding on these inputs (fixed limits were used)"
    if truth is not None and truth.compared < replay.counts.inputs and not known:
        yield f"{replay.counts.inputs - truth.compared:,} of {plural(replay.counts.inputs, 'dump')} against the truth"
    if truth is not None and truth.grad_norm_rel is None and not any("gradient" in text for text in known):
        yield "gradients (--backward)"
    if laws is None or not laws.inputs:
        return (yield "the laws (--laws)")
    if laws.unasked:
        yield f"the {'law' if len(laws.unasked) == 1 else 'laws'} {', '.join(laws.unasked)}"
    if laws.inputs < laws.of:
        yield f"the laws of {plural(laws.of - laws.inputs, 'dump')}"


def _figures(replay: ReplaySummary, of_toy: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the speed and the memory."""
    first = replay.warm_up.first_forward.median
    if replay.forward.median is not None:
        yield f"forward{of_toy}", f"{seconds(replay.forward.median)} s"
        yield f"tokens/s in one worker{of_toy}", rate(replay.tokens_per_s.median)
    elif first is not None:
        yield f"forward while warming up{of_toy}", f"{seconds(first)} s"
    if replay.peak_memory_bytes is not None:
        yield f"peak memory in one worker{of_toy}", human_bytes(replay.peak_memory_bytes)


def _next(
    replay: ReplaySummary, word: str, own: ComparisonRecord | None, recorded: str | None, reported: bool, tried: bool
) -> str:
    """Return the command to run next; "" if none helps. tried: whether the truth was to be compared.

    None leads back: lint, check, matrix, replay, report, compare, explain, reduce, repro. Only an explanation leads to a check of
    one other setting, and that to `reduce` (`api.checks`).
    """
    values, truth = as_ran(replay.asked, replay.resolved), replay.truth
    model = f"--model {in_shell(str(values['model']))}"
    if replay.status in OPEN:
        return f"actordbg replay --resume {replay.replay_id}"
    if word == UNCHECKED and replay.counts.passed and not tried:
        return f"actordbg compare {replay.replay_id} truth"
    if word in (FAILED, UNCHECKED):
        examples = [group.examples[0] for group in replay.failures if group.examples]
        if reported and examples and replay.counts.inputs > 1:
            return f"actordbg replay --where {selecting(examples[:1])} {' '.join(map(in_shell, repeat_options(values)))}"
        if reported and examples:  # it was replayed alone
            return f"actordbg reduce {replay.replay_id}"
        return "" if reported else f"actordbg report {replay.replay_id}"
    if word == WRONG:
        lawless = [violation.place["dump"] for violation in replay.laws.violations] if replay.laws else []
        if own is not None and own.verdict == MISMATCH and not lawless and truth is not None and truth.verdict != MISMATCH:
            return f"actordbg compare {replay.replay_id} recorded"
        worst = [*lawless, *([truth.worst_dump] if truth is not None and truth.worst_dump else [])]
        if (other := _deciding(values, found_in(replay, own))) is not None:
            options = " ".join(map(in_shell, repeat_options(other, "check")))
            return f"actordbg check --where {selecting(worst[:1])} {options}"
        return f"actordbg reduce {replay.replay_id}"
    if values["model"] == TINY:
        return f"actordbg check --model {in_shell(recorded or 'YOUR_MODEL')}"
    return f"actordbg matrix --where {selecting([slow.dump_id for slow in replay.slowest[:_EXAMPLES]])} {model}"


def _deciding(values: Mapping[str, Any], found: Sequence[Finding]) -> Mapping[str, Any] | None:
    """Return the settings with the one changed that decides where the fault is; None if no finding has such a remedy."""
    todo = {finding.todo for finding in found}
    if ISOLATION in todo and values["packing"]:
        return {**values, "packing": False}
    if {EAGER, KERNEL.remedy} & todo and values["attn"] != "eager":
        return {**values, "attn": "eager"}
    return None


def selecting(dump_ids: Sequence[str]) -> str:
    """Return the `--where` that selects these dumps by their handles, quoted for a shell."""
    names = [f"'{with_handles(dump_id)}'" for dump_id in dump_ids]
    return in_shell(f"dump = {names[0]}" if len(names) == 1 else f"dump in ({', '.join(names)})" if names else "rank=0")


def together(replays: Iterable[ReplaySummary]) -> Verdict:
    """Return the verdict of a report: that of its only replay, else the worst, with how many have which."""
    each = [(replay, replay_verdict(replay, reported=True)) for replay in replays]
    if not each:
        return Verdict(UNCHECKED, "nothing was replayed yet", next="actordbg status")
    if len(each) == 1:
        return each[0][1]
    others = next((verdict.whose for _, verdict in each if verdict.whose), "")
    replay, worst = min(each, key=lambda pair: WORST_FIRST.index(pair[1].word))
    counts = ", ".join(f"{count} {word}" for word, count in Counter(verdict.word for _, verdict in each).items())
    left = tuple(dict.fromkeys(text for _, verdict in each for text in verdict.not_checked))[:_EXAMPLES]
    said = f"{plural(len(each), 'replay')}: {counts}" + f". {replay.label}, {replay.replay_id}: {worst.said}" * (
        worst.word != RIGHT
    )
    return replace(worst, said=said, not_checked=left, figures=worst.figures[:1], whose=others)
