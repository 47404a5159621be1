"""A check in words: one sentence that says first what is wrong and what was not judged, three figures, the next command.

answer = answer_of_check(found, of=257, recorded="meta-llama/Llama-3.1-8B")
answer.sentence       # "RIGHT: 8 of 257 dumps run, and are as near the truth as bf16 allows; not judged: ..."
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from actordbg.actor.known_failures import LEAKED
from actordbg.actor.signatures import explain
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import human_bytes, plural
from actordbg.config.as_ran import as_ran, label
from actordbg.config.replay_config import TINY, TOY_MODEL
from actordbg.document.blocks import (
    BAD_TONE,
    GOOD_TONE,
    PART_TONE,
    Banner,
    Block,
    Chart,
    Heading,
    Items,
    Paragraph,
    number,
    rate,
    seconds,
)
from actordbg.formats.weight_hashes import met_weights
from actordbg.judge.comparison_document import document as comparison_blocks
from actordbg.judge.comparison_document import flat_where_it_matters
from actordbg.judge.law_summary import violation_in_words
from actordbg.judge.replay_document import document
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.run_check import CheckFound
from actordbg.judge.sides import OTHER_WEIGHTS
from actordbg.judge.summary import summarise
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, WITHIN_NOISE, ComparisonRecord, Figures
from actordbg.records.replay_record import answers_of, violations

RIGHT, WRONG, FAILED, UNJUDGED = "RIGHT", "WRONG", "FAILED", "NOT JUDGED"
CAUSE_CHARS = 200


@dataclass(frozen=True)
class CheckAnswer:
    """What `actordbg check` prints. word: RIGHT, WRONG, FAILED or NOT JUDGED; `sentence` is this, what is `said`, and what it is
    not about. max_abs: the largest difference of a log-prob from the truth, nats. figures: the three in words, by name. next: a
    command. page: the HTML file.
    """

    word: str
    good: bool
    sentence: str
    said: str
    replay_id: str
    comparison_id: str | None
    dumps: int
    of: int
    configuration: str
    toy_model: bool
    not_judged: tuple[str, ...]
    max_abs: float | None
    forward_median_s: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    figures: tuple[tuple[str, str], ...]
    next: str
    page: str | None = None


def answer_of_check(found: CheckFound, *, of: int, recorded: str | None = None) -> CheckAnswer:
    """The answer. of: how many dumps the sample was drawn from. recorded: the model that the dumps name."""
    one = summarise([found.data], selection="", now="", explain=explain).replays[0]
    values = as_ran(found.data.spec.config, found.data.resolved)
    toy = values["model"] == TINY
    word, said = _verdict(found, one, f"{one.counts.inputs:,} of {plural(of, 'dump')}")
    left = tuple(_not_judged(found, one, toy)) if word in (RIGHT, WRONG) else ()
    forward = one.forward if one.forward.count else one.warm_up.first_forward
    log_probs = (dump.log_probs for dump in (found.comparison.dumps if found.comparison else ()))
    furthest = max((figures.max_abs for figures in log_probs if figures and figures.max_abs is not None), default=None)
    return CheckAnswer(
        word=word,
        good=word == RIGHT,
        sentence=f"{word}{f' ({TOY_MODEL})' if toy else ''}: {said}" + (f"; not judged: {'; '.join(left)}" if left else ""),
        said=said,
        replay_id=found.data.spec.replay_id,
        comparison_id=found.comparison.comparison_id if found.comparison else None,
        dumps=len(found.data.spec.inputs),
        of=of,
        configuration=label(values),
        toy_model=toy,
        not_judged=left,
        max_abs=furthest,
        forward_median_s=forward.median,
        tokens_per_s=one.tokens_per_s.median,
        peak_memory_bytes=one.peak_memory_bytes,
        figures=tuple(_figures(one, furthest, toy)),
        next=_next(found, word, toy, recorded),
    )


def check_document(answer: CheckAnswer) -> list[Block]:
    """The answer as a document."""
    return [
        Heading(answer.sentence, 1),
        Items(tuple(f"{name}: {text}" for name, text in answer.figures)),
        Paragraph(f"next: {answer.next}"),
    ]


_WORST = 10
"""Dumps of a comparison that the page names."""


def check_blocks(found: CheckFound, answer: CheckAnswer, charts: Sequence[Chart]) -> list[Block]:
    """Build the page: the banner and the next command, both comparisons, the replay's report with its charts."""
    summary = summarise([found.data], selection=answer.replay_id, now=found.data.spec.created_at, explain=explain)
    of_replay = document(summary, {one.label: charts for one in summary.replays})
    at = next(index for index, block in enumerate(of_replay) if isinstance(block, Banner))
    tone = {RIGHT: GOOD_TONE, UNJUDGED: PART_TONE}.get(answer.word, BAD_TONE)
    figures = tuple(_figure(name, text) for name, text in answer.figures)
    blocks: list[Block] = [
        Heading("actordbg check", 1),
        Paragraph(f"{found.data.spec.command}; {found.data.spec.created_at}"),
        Banner(answer.word, answer.said, tone, figures, answer.not_judged),
        Items((f"next: {answer.next}", f"configuration: {answer.configuration}")),
    ]
    for record, against in ((found.golden, "what the run itself got"), (found.comparison, "the truth")):
        if record is not None:
            first, *rest = comparison_blocks(record, _WORST)
            assert isinstance(first, Heading)
            blocks += [Heading(f"Against {against}: {first.text}", 2), *rest]
    return [*blocks, *of_replay[at + 1 :]]


def _figure(name: str, text: str) -> tuple[str, str]:
    """Split a figure for a headline: "forward, 2,323 tokens/s in one worker" over "0.597 s"."""
    number, unit, rest = (*text.split(" ", 2), "", "")[:3]
    return f"{name}{',' * bool(rest)} {rest}".strip(), f"{number} {unit}".strip(" ,")


def _figures(one: ReplaySummary, furthest: float | None, is_toy: bool) -> Iterator[tuple[str, str]]:
    """How far from the truth, how fast, how much memory."""
    toy = f", of a {TOY_MODEL}" if is_toy else ""
    yield "from the truth", "unknown" if furthest is None else f"{number(furthest, 2)} nats, the largest of a log-prob"
    if one.forward.median is not None:
        yield "forward", f"{seconds(one.forward.median)} s, {rate(one.tokens_per_s.median)} tokens/s in one worker{toy}"
    elif one.warm_up.first_forward.median is not None:
        yield "forward", f"{seconds(one.warm_up.first_forward.median)} s while warming up{toy}"
    if one.peak_memory_bytes is not None:
        yield "peak memory", f"{human_bytes(one.peak_memory_bytes)} in one worker{toy}"


def _verdict(found: CheckFound, one: ReplaySummary, dumps: str) -> tuple[str, str]:
    """The word, and what it is about."""
    compared, bad = found.comparison, one.counts.inputs - one.counts.passed
    if bad:
        why = f": {_in_brief(one.failures[0].name, one.failures[0].cause)}" if one.failures else ""
        return FAILED, f"{bad:,} of {plural(one.counts.inputs, 'dump')} did not pass{why}"
    if one.laws is not None and not one.laws.good:
        return WRONG if one.laws.broken else FAILED, violation_in_words(one.laws.violations[0])
    if compared is None or compared.verdict == NOT_COMPARED:
        dumps_why = (why for dump in (compared.dumps if compared else ()) for why in dump.not_compared.values())
        why = found.no_truth or next(dumps_why, "")
        return UNJUDGED, f"{dumps} run, and nothing could be compared with the truth{f': {why}' if why else ''}"
    dtype = compared.a.dtype or "its dtype"
    own = "" if found.golden is None else _own_in_words(found.golden, dtype)
    far = sum(dump.verdict == MISMATCH for dump in compared.dumps)
    if not compared.good:
        return WRONG, f"{far:,} of {plural(len(compared.dumps), 'dump')} further from the truth than {dtype} explains"
    if own:
        return WRONG, own
    noise = "no further from the truth than noise moves them"
    said = f"{dumps} run, {noise if compared.verdict == WITHIN_NOISE else f'as near the truth as {dtype} allows'}"
    if found.golden is not None and found.golden.verdict == NOT_COMPARED:
        return UNJUDGED, f"{said}; not judged: {next(_golden_left(found), 'what the run itself got')}"
    return RIGHT, said


def _own_in_words(golden: ComparisonRecord, dtype: str) -> str:
    """Say what the training run itself got and these replays do not, with the furthest of each; "" where they agree."""
    bad = [dump for dump in golden.dumps if dump.verdict == MISMATCH]
    if not bad:
        return ""
    told = [
        _beyond("log-probs", [dump.log_probs for dump in bad], golden.thresholds.get("max_abs")),
        _beyond("entropies", [dump.entropy for dump in bad], golden.thresholds.get("entropy_max_abs")),
    ]
    furthest = ", ".join(filter(None, told)) or bad[0].reasons[0]
    agree = "; its log-probs agree" if told[1] and not told[0] else ""
    many = f"{len(bad):,} of {plural(sum(dump.verdict != NOT_COMPARED for dump in golden.dumps), 'dump')}"
    fault = f"; {LEAKED}" if any(LEAKED in dump.reasons for dump in bad) else ""
    return f"in {many} what the run itself got is not what its model gives in {dtype}: {furthest}{agree}{fault}"


def _beyond(name: str, figures: Iterable[Figures | None], limit: float | None) -> str:
    """Say how far values are beyond their limit, in nats: not finite is further than any. "" where none is."""
    known = [one for one in figures if one is not None]
    if any(one.nonfinite for one in known):
        return f"{name} by up to no finite figure"
    furthest = max((one.max_abs or 0.0 for one in known), default=0.0)
    return f"{name} by up to {number(furthest, 3)} nats" if furthest > (limit or 0.0) else ""


def _in_brief(name: str, cause: str) -> str:
    """A failure in one line: its name, and the first line of what it said."""
    first = cause.strip().split("\n")[0][:CAUSE_CHARS]
    return first if not first or first.startswith(name) else f"{name}, {first}"


def _not_judged(found: CheckFound, one: ReplaySummary, toy: bool) -> Iterator[str]:
    """What the verdict says nothing about."""
    if toy:
        yield "your model"
    yield from _golden_left(found)
    if found.golden is not None and found.golden.verdict == MISMATCH and met_weights(found.data.resolved).get("unknown", 1):
        yield "whether the model has the weights of that moment (run --hash-weights)"
    if found.comparison is not None:
        yield from found.comparison.unjudged
        if flat_where_it_matters(found.comparison):
            yield "what rounding does to these inputs, so the limits are flat"
    if not any(result.grad_norm is not None for result in found.data.results):
        yield "gradients (--backward)"
    if one.laws is None or not one.laws.inputs:
        yield "the laws"
    elif one.laws.not_checked:
        unasked = sorted({why.partition(":")[0] for why in one.laws.not_checked})
        yield f"the {'law' if len(unasked) == 1 else 'laws'} {', '.join(unasked)}"


def _golden_left(found: CheckFound) -> Iterator[str]:
    """What the run itself got and nobody judged: dumps by reason, and the condition that leaves those of other weights out."""
    dumps, same = found.golden.dumps if found.golden else (), met_weights(found.data.resolved).get("same", [])
    steps = f"step={same[0]}" if len(same) == 1 else f"step in ({', '.join(map(str, same))})"
    known = f'--where "{steps}" leaves them out' if same and None not in same else "--model wants the checkpoint of that step"
    left = Counter(next(iter(dump.not_compared.values()), "") for dump in dumps if dump.verdict == NOT_COMPARED)
    for why, count in left.most_common():
        said = f"what the run itself got in {count:,} of {plural(len(dumps), 'dump')}: {why}"
        yield f"{said} ({known})" if why == OTHER_WEIGHTS else said


def _next(found: CheckFound, word: str, toy: bool, recorded: str | None) -> str:
    """Name the command that comes next. It repeats the configuration of this one."""
    spec, compared, golden = found.data.spec, found.comparison, found.golden
    model = f"--model {in_shell(spec.config.model)}"
    if word in (FAILED, UNJUDGED):
        return f"actordbg report {spec.replay_id}"
    if word == WRONG:
        lawless = [one.dump_id for one in found.data.results if violations(answers_of(one.extra), spec.config.accept)]
        if compared and compared.good and not lawless and golden and golden.verdict == MISMATCH:
            return f"actordbg compare {spec.replay_id} golden"
        worst = [*lawless, *(dump.dump_id for dump in (compared.dumps if compared else ()))][0]
        where = f"dump_id = '{worst}'"
        return f"actordbg matrix --where {in_shell(where)} {model}"
    if toy:
        return f"actordbg check --model {in_shell(recorded) if recorded else 'PATH'}"
    return f"actordbg matrix --where {in_shell(spec.where or 'rank=0')} --max-inputs 3 {model}"
