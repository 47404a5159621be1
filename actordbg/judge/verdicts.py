"""Decide whether a replay is right: the verdict of `check`, `replay` and `report`, and of lists of replays. Pure.

RIGHT requires that every input passed, that no law failed, and that the results agree with the truth. An input that merely
finished with finite numbers is NOT CHECKED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actordbg.base.foreign_text import in_shell
from actordbg.base.units import human_bytes, listed, plural, with_handles
from actordbg.catalog.dump_verdicts import WORST_FIRST, breaks
from actordbg.catalog.query import OPEN
from actordbg.compare.same_weights import WEIGHTS
from actordbg.config.as_ran import as_ran, is_chosen, repeat_options
from actordbg.config.replay_config import TINY, TOY_MODEL
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Verdict, number, rate, seconds
from actordbg.judge.replay_findings import BORDERS, CODE, FLAT, LAWS, NO_TOY, Judged, beyond
from actordbg.judge.report_model import ReplaySummary
from actordbg.locate.rules import EAGER, KERNEL
from actordbg.locate.verdict import unlocated
from actordbg.records.comparison_record import (
    GRADIENTS,
    MISMATCH,
    MODEL,
    NOT_COMPARED,
    RECORDED,
    TRUTH,
    WITHIN_NOISE,
)
from actordbg.records.finding import ISOLATION, RAISED, Finding, NotChecked
from actordbg.records.run_files import met_weights

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
    judged: Judged, *, of: int | None = None, recorded: str | None = None, reported: bool = False, explained: bool = False
) -> Verdict:
    """Return the verdict of a replay.

    of: the number of dumps that its inputs were drawn from. recorded: the model that the dumps name. reported: whether this is
    the replay's own report, so that the next command is another. explained: whether this is its own explanation.
    """
    replay, found = judged.replay, judged.found
    word = _word(judged, found)
    if word == WRONG and not explained:
        following = f"actordbg explain {replay.replay_id}"
    else:
        following = _next(judged, word, found, recorded, reported=reported)
    toy = as_ran(replay.asked, replay.resolved)["model"] == TINY
    not_checked = [*([NO_TOY] if toy else []), *judged.left, *_left(judged)] if word in (RIGHT, WRONG) else []
    if word == UNCHECKED and judged.compared:
        not_checked = [*judged.left]
    return Verdict(
        word,
        _said(judged, word, of or replay.counts.inputs),
        [*_deciding(judged, word), *_figures(replay, f" ({TOY_MODEL})" if toy else "")],
        not_checked,
        next=following,
        toy=toy,
        findings=found if word in (WRONG, FAILED) else [],
        whose=replay.whose,
        further=_further(replay, word),
    )


def _further(replay: ReplaySummary, word: str) -> list[str]:
    """Return what is said below the first line: of RIGHT how modules were judged, of FAILED what to do about a known failure."""
    if word == FAILED:
        return [f"do: {way}" for failure in replay.failures[:1] for way in failure.ways_out[:1]]
    return [replay.local.said] if word == RIGHT and replay.local is not None and replay.local.word == RIGHT else []


def _word(judged: Judged, found: Sequence[Finding]) -> str:
    """Return the word: a failure decides, then anything that is wrong, then what was compared."""
    replay, counts = judged.replay, judged.replay.counts
    if counts.failed + counts.crashed + counts.hung:
        return FAILED
    if not counts.passed:
        return UNCHECKED if replay.status in OPEN else FAILED
    if replay.laws is not None and replay.laws.raised and not replay.laws.good:
        return FAILED
    if found:
        return WRONG
    last = judged.own or replay.recorded or replay.truth
    return UNCHECKED if not judged.compared or last is None or last.verdict == NOT_COMPARED else RIGHT


def _said(judged: Judged, word: str, of: int) -> str:
    """Return the sentence behind the word: of what is wrong, the first finding of each kind."""
    replay, counts, truth = judged.replay, judged.replay.counts, judged.replay.truth
    every, dumps = plural(counts.inputs, "dump"), f"{counts.passed:,} of {plural(of, 'dump')}"
    if bad := counts.failed + counts.crashed + counts.hung:
        return f"{bad:,} of {every}{_such_as(replay, bad)} did not pass{_first_failure(replay)}"
    if not counts.passed:
        ended = f"{counts.stopped:,} stopped by the user" if counts.stopped else f"the replay is {replay.status}"
        return f"none of {every} has a result; {ended}"
    local, laws = replay.local, replay.laws
    if word in (WRONG, FAILED):
        violations = laws.violations[:1] if laws else ()
        compared = [*judged.ranks(), *judged.against_truth(), *(judged.recorded() if judged.compared else ())]
        parts = [local.said] if local is not None and local.found else []
        return "; ".join(dict.fromkeys([*parts, *(finding.said for finding in (*violations, *compared))]))
    if not judged.compared:
        if truth is None and not judged.no_truth:
            unbroken = ", and every law checked holds" if laws is not None and laws.inputs else ""
            return f"{dumps} passed with finite numbers{unbroken}; correctness was not checked"
        why = judged.no_truth or ((truth.reasons or "") if truth else "").removeprefix("dump not compared: ")
        said = f"{dumps} ran; none could be compared with the truth"
        return f"{said}: {why}" if why else said
    assert truth is not None
    match = "matches" if truth.compared == 1 else "match"
    near = "within the noise floor" if truth.verdict == WITHIN_NOISE else f"to {judged.dtype} rounding"
    said = f"{truth.compared:,} of {plural(of, 'dump')} {match} the truth {near}"
    if truth.compared == counts.inputs < of:
        said = f"{plural(counts.inputs, 'dump')}, a sample of {of:,}, {match} the truth {near}"
    if word == UNCHECKED:
        return f"{RECORDED.name}; {said}"
    return said


def _such_as(replay: ReplaySummary, bad: int) -> str:
    """Name the first dump that did not pass, between commas; "" if none is known."""
    example = next((with_handles(dump_id) for failure in replay.failures for dump_id in failure.examples), "")
    such = "" if bad == 1 else "such as "
    return f", {such}{example}," if example else ""


def _first_failure(replay: ReplaySummary) -> str:
    """Return the first error, behind a colon; "" without one."""
    for failure in replay.failures[:1]:
        first = failure.cause.strip().split("\n")[0][:CAUSE_CHARS]
        return f": {first}" if not first or first.startswith(failure.kind) else f": {failure.kind}, {first}"
    return ""


def _deciding(judged: Judged, word: str) -> Iterator[tuple[str, str]]:
    """Yield the figures that decide, the failing figure first."""
    truth, laws, own = judged.replay.truth, judged.replay.laws, judged.own
    counts = judged.replay.counts
    if bad := counts.failed + counts.crashed + counts.hung:
        return (yield "did not pass", f"{bad:,} of {plural(counts.inputs, 'dump')}")
    if word == WRONG and own is not None and own.verdict == MISMATCH and judged.compared:
        for name, size in beyond(own):
            yield f"max diff from the run's {name}", "not finite" if size is None else f"{number(size, 3)} nats"
    places = judged.replay.local.places if judged.replay.local else []
    if word == WRONG and places and places[0].size is not None and truth is not None and not truth.mismatches:
        yield f"error at {places[0].place['module']}", f"{number(places[0].size, 2)} times a healthy model's"
    if truth is not None and truth.max_abs is not None:
        yield "max diff from the truth", f"{number(truth.max_abs, 2)} nats"
    if laws is not None and not laws.good:
        names = ", ".join(dict.fromkeys(violation.rule.name for violation in laws.violations))
        yield "laws that fail" if laws.broken else "laws that could not be checked", names


def _left(judged: Judged) -> Iterator[NotChecked]:
    """Yield what was not checked beside `left`."""
    replay, rules = judged.replay, {each.rule for each in judged.left}
    truth, laws = replay.truth, replay.laws
    if replay.run_on:
        text = f"borders of packed rows in {plural(replay.run_on, 'dump')}, where positions never restart"
        yield NotChecked(BORDERS, text, "record positions that restart at 0 in each row")
    if MODEL not in rules:
        yield from (NotChecked(MODEL, text) for text in unlocated(replay.local, replay.replay_id))
    for package, name in replay.resolved.get("foreign_code", {}).items():
        yield NotChecked(CODE, f"the code of {package} ({name}), which is not transformers'")
    named = replay.resolved.get("recorded_model")
    if named and replay.resolved["model"] not in (TINY, named) and not met_weights(replay.resolved):
        yield NotChecked(WEIGHTS, f"whether this is the recorded model ({named})", f"--model {in_shell(str(named))}")
    if truth is not None:
        if truth.rounding_id is None:
            yield FLAT
        if truth.compared < replay.counts.inputs and not judged.left:
            missing = f"{replay.counts.inputs - truth.compared:,} of {plural(replay.counts.inputs, 'dump')}"
            yield NotChecked(TRUTH, f"{missing} against the truth")
        if truth.grad_norm_rel is None and GRADIENTS not in rules:
            ran = as_ran(replay.asked, replay.resolved)
            averaged = ran["backward"] and ran["nproc"] > 1
            text, remedy = ("gradients, averaged over ranks", "--nproc 1") if averaged else ("gradients", "--backward")
            yield NotChecked(GRADIENTS, text, remedy)
    if (unasked := _unasked_distance(judged)) is not None:
        apart = number(unasked, 2)
        yield NotChecked(RECORDED, f"the recorded log-probs, {apart} nats from these on average", "--recorded")
    if laws is None or not laws.inputs:
        return (yield NotChecked(LAWS, "the laws", "--laws"))
    if laws.unasked:
        which = "law" if len(laws.unasked) == 1 else "laws"
        yield NotChecked(LAWS, f"the {which} {listed(laws.unasked)}")
    if laws.inputs < laws.of:
        others = plural(laws.of - laws.inputs, "dump")
        yield NotChecked(LAWS, f"the laws of {others}")


def _unasked_distance(judged: Judged) -> float | None:
    """Return how far the recorded log-probs are from the replay's, nats; None if the verdict covers them, or none are there."""
    golden = judged.replay.golden
    return golden.mean_abs if judged.own is None and golden is not None else None


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


def _next(judged: Judged, word: str, found: Sequence[Finding], recorded: str | None, *, reported: bool) -> str:
    """Return the command to run next; "" if none helps.

    None leads back: lint, check, matrix, replay, report, compare, explain, reduce, repro. Only an explanation leads to a check of
    one other setting, and that to `reduce` (`api.checks`), and a matrix to a check of what is fastest, where the walk ends.
    """
    replay, truth = judged.replay, judged.replay.truth
    values = as_ran(replay.asked, replay.resolved)
    model = f"--model {in_shell(str(values['model']))}"
    if replay.status in OPEN:
        return f"actordbg replay --resume {replay.replay_id}"
    if word == UNCHECKED and replay.counts.passed and truth is None and not judged.no_truth:
        return f"actordbg compare {replay.replay_id} truth"
    if word in (FAILED, UNCHECKED):
        examples = [group.examples[0] for group in replay.failures if group.examples]
        if reported and examples and replay.counts.inputs > 1:
            alone = values if values["align"] == "same" else {**values, "align": None}  # others have no input
            return f"actordbg replay --where {selecting(examples[:1])} {' '.join(map(in_shell, repeat_options(alone)))}"
        if reported and examples:  # it was replayed alone
            return f"actordbg reduce {replay.replay_id}"
        return "" if reported else f"actordbg report {replay.replay_id}"
    if word == WRONG:
        lawless = [violation.place["dump"] for violation in replay.laws.violations] if replay.laws else []
        if RECORDED in [finding.rule for finding in found] and not lawless and truth is not None and truth.verdict != MISMATCH:
            return f"actordbg compare {replay.replay_id} recorded"
        worst = [*lawless, *([truth.worst_dump] if truth is not None and truth.worst_dump else [])]
        if (other := _other_setting(values, found)) is not None:
            options = " ".join(map(in_shell, repeat_options(other, "check")))
            return f"actordbg check --where {selecting(worst[:1])} {options}"
        return f"actordbg reduce {replay.replay_id}"
    if values["model"] == TINY:
        own = recorded or "YOUR_MODEL"
        return f"actordbg check --model {in_shell(own)}"
    if _unasked_distance(judged) is not None:
        return f"actordbg compare {replay.replay_id} recorded"
    if is_chosen(replay.asked):  # and not as recorded, or as this machine has it
        return ""
    return f"actordbg matrix --where {selecting([slow.dump_id for slow in replay.slowest[:_EXAMPLES]])} {model}"


def _other_setting(values: Mapping[str, Any], found: Sequence[Finding]) -> Mapping[str, Any] | None:
    """Return the settings with the one changed that decides where the fault is; None if no finding has such a remedy."""
    todo = {finding.todo for finding in found if values["ring"] == 1}  # a ring needs packing and its own attention
    if ISOLATION in todo and values["packing"]:
        return {**values, "packing": False}
    if {EAGER, KERNEL.remedy} & todo and values["attn"] != "eager":
        return {**values, "attn": "eager"}
    if values["nproc"] > 1:  # numbers of several processes are in no script
        return {**values, "backend": "plain", "nproc": 1}
    return None


def selecting(dump_ids: Sequence[str]) -> str:
    """Return the `--where` that selects these dumps by their handles, quoted for a shell."""
    names = [f"'{with_handles(dump_id)}'" for dump_id in dump_ids]
    return in_shell(f"dump = {names[0]}" if len(names) == 1 else f"dump in ({listed(names)})" if names else "rank=0")


def together(replays: Iterable[ReplaySummary]) -> Verdict:
    """Return the verdict of a report: that of its only replay, else the worst, with how many have which."""
    each = [(replay, replay_verdict(Judged(replay), reported=True)) for replay in replays]
    if not each:
        return Verdict(UNCHECKED, "nothing was replayed yet", next="actordbg status")
    if len(each) == 1:
        return each[0][1]
    others = next((verdict.whose for _, verdict in each if verdict.whose), "")
    replay, worst = min(each, key=lambda pair: WORST_FIRST.index(pair[1].word))
    counts = ", ".join(f"{count} {word}" for word, count in Counter(verdict.word for _, verdict in each).items())
    left = list(dict.fromkeys(one for _, verdict in each for one in verdict.not_checked))[:_EXAMPLES]
    said = f"{plural(len(each), 'replay')}: {counts}"
    if worst.word != RIGHT:
        said += f". {replay.label}, {replay.replay_id}: {worst.said}"
    return replace(worst, said=said, not_checked=left, figures=worst.figures[:1], whose=others, further=())
