"""Run dumps through one configuration and judge them by the replay, the laws, the truth and a noise floor.

    check = run_check(store, plan.spec)
    answer = answer_of_check(check, of=257, recorded="meta-llama/Llama-3.1-8B")
    answer.sentence       # "RIGHT: 8 of 257 dumps match the truth to bf16 rounding; not checked: ..."

The replay is an ordinary one, so `report`, `compare` and `replay --resume` work on it. Under the plain backend one process
computes the replay and then the truth, which saves a start; under other backends the truth gets a separate process.

The answer is one sentence (the verdict, then what was not checked), three figures, and the next command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from actordbg.actor.rules import LEAKED
from actordbg.base.errors import ActordbgError, MachineFault
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
from actordbg.judge.agreement import ranks_in_words, violation_in_words
from actordbg.judge.comparing import compare, of_one_rank, save
from actordbg.judge.comparison_document import document as comparison_blocks
from actordbg.judge.comparison_document import flat_where_it_matters
from actordbg.judge.find_truth import ensure_rounding, ensure_truth
from actordbg.judge.noise_floor import newest_for
from actordbg.judge.replay_document import document
from actordbg.judge.report_model import ReplaySummary, Summary
from actordbg.judge.sides import GOLDEN, OTHER_WEIGHTS
from actordbg.judge.summary import summarise
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, WITHIN_NOISE, ComparisonRecord, DumpComparison, Figures
from actordbg.records.journal import read_standing
from actordbg.records.replay_record import PASSED, ReplaySpec, answers_of, violations
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.replay_data import ReplayData, data_of
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

REPLAYING, TRUTH, ROUNDING = "replaying", "computing the truth", "measuring what the dtype costs"
RIGHT, WRONG, FAILED, UNJUDGED = "RIGHT", "WRONG", "FAILED", "NOT CHECKED"
CAUSE_CHARS = 200


@dataclass(frozen=True)
class CheckFound:
    """The result of a check. comparison: with the truth; None without a truth, and `no_truth` says why.

    golden: the comparison with the run's recorded outputs, if requested. shared: packages whose code the truth runs too.
    """

    data: ReplayData
    comparison: ComparisonRecord | None = None
    no_truth: str = ""
    golden: ComparisonRecord | None = None
    shared: Sequence[str] = ()

    @cached_property
    def report(self) -> Summary:
        """Report on the replay."""
        return summarise([self.data], selection=self.data.spec.replay_id, now=self.data.spec.created_at)

    @property
    def truths(self) -> tuple[DumpComparison, ...]:
        """Each dump's comparison with the truth."""
        return self.comparison.dumps if self.comparison else ()

    @property
    def goldens(self) -> tuple[DumpComparison, ...]:
        """Each dump's comparison with the run's recorded outputs."""
        return self.golden.dumps if self.golden else ()


def run_check(
    store: Store,
    spec: ReplaySpec,
    *,
    golden: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
    **callbacks: Any,
) -> CheckFound:
    """Run the replay `spec` and compare it with the truth; with `golden` also with the run's recorded outputs.

    on_stage: called with the name of each stage as it begins. callbacks: `on_event` of `run_replay`. Raises what
    `run_replay` raises. If the truth cannot be computed, the result's `no_truth` says why.
    """
    with WarmGroups(reopen=True) as warm:
        callbacks["warm"] = warm
        warm.share(spec.replay_id)
        on_stage(REPLAYING)
        run_replay(store, spec, **callbacks)
        data = data_of(store, spec)
        if not any(result.status == PASSED for result in data.results):
            return CheckFound(data, no_truth="no input passed")
        warm.share(None)
        own = None
        if golden:
            save(store, own := compare(store, spec.replay_id, GOLDEN))
        try:
            on_stage(TRUTH)
            truth = ensure_truth(store, spec.replay_id, **callbacks)
            on_stage(ROUNDING)
            rounding = ensure_rounding(store, spec.replay_id, **callbacks)
            noise = newest_for(store, spec.replay_id)
            save(store, record := compare(store, spec.replay_id, truth, rounding=rounding, noise=noise))
        except MachineFault as fault:
            fault.hint = f"fix that, then `actordbg compare {spec.replay_id} truth` continues"
            raise
        except ActordbgError as problem:
            return CheckFound(data, no_truth=problem.message, golden=own)
        return CheckFound(data, record, golden=own, shared=read_standing(store.replays / truth)[0].get("shared_code", ()))


@dataclass(frozen=True)
class CheckAnswer:
    """The result of `actordbg check`.

    sentence: the full verdict, built from `word` (RIGHT, WRONG, FAILED or NOT CHECKED), `said` and `not_judged`. of: the number
    of dumps the sample was drawn from. max_abs: the largest log-prob difference from the truth, in nats. figures: (name, text)
    of distance, speed and memory. next: a command to run. page: the HTML file, once written.
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


def answer_of_check(check: CheckFound, *, of: int, recorded: str | None = None) -> CheckAnswer:
    """Build the answer. of: the number of dumps the sample was drawn from. recorded: the model that the dumps name."""
    (replay,), record = check.report.replays, check.comparison
    spec, values = check.data.spec, as_ran(check.data.spec.config, check.data.resolved)
    toy = values["model"] == TINY
    word, said = _verdict(check, replay, f"{replay.counts.inputs:,} of {plural(of, 'dump')}")
    left = tuple(_not_judged(check, replay, toy)) if word in (RIGHT, WRONG) else ()
    max_abs = record.furthest[0] if record and record.furthest else None
    return CheckAnswer(
        word=word,
        good=word == RIGHT,
        sentence=f"{word}{f' ({TOY_MODEL})' if toy else ''}: {said}" + (f"; not checked: {'; '.join(left)}" if left else ""),
        said=said,
        replay_id=spec.replay_id,
        comparison_id=record.comparison_id if record else None,
        dumps=len(spec.inputs),
        of=of,
        configuration=label(values),
        toy_model=toy,
        not_judged=left,
        max_abs=max_abs,
        forward_median_s=(replay.forward if replay.forward.count else replay.warm_up.first_forward).median,
        tokens_per_s=replay.tokens_per_s.median,
        peak_memory_bytes=replay.peak_memory_bytes,
        figures=tuple(_figures(replay, max_abs, f", of a {TOY_MODEL}" * toy)),
        next=_next(check, word, toy, recorded),
    )


def check_document(answer: CheckAnswer) -> list[Block]:
    """Build the document that a terminal shows."""
    return [
        Heading(answer.sentence, 1),
        Items(tuple(f"{name}: {text}" for name, text in answer.figures)),
        Paragraph(f"next: {answer.next}"),
    ]


_WORST = 10
"""How many of a comparison's dumps the page lists."""


def check_blocks(check: CheckFound, answer: CheckAnswer, charts: Sequence[Chart]) -> list[Block]:
    """Build the page: the banner and the next command, both comparisons, the replay's report with its charts."""
    spec, of_replay = check.data.spec, document(check.report, {"A": charts})
    at = next(index for index, block in enumerate(of_replay) if isinstance(block, Banner))
    tone = {RIGHT: GOOD_TONE, UNJUDGED: PART_TONE}.get(answer.word, BAD_TONE)
    blocks: list[Block] = [
        Heading("actordbg check", 1),
        Paragraph(f"{spec.command}; {spec.created_at}"),
        Banner(answer.word, answer.said, tone, tuple(_figure(*figure) for figure in answer.figures), answer.not_judged),
        Items((f"next: {answer.next}", f"configuration: {answer.configuration}")),
    ]
    for record, against in ((check.golden, "the run's own outputs"), (check.comparison, "the truth")):
        if record is not None:
            first, *rest = comparison_blocks(record, _WORST)
            assert isinstance(first, Heading)
            blocks += [Heading(f"Against {against}: {first.text}", 2), *rest]
    return [*blocks, *of_replay[at + 1 :]]


def _figure(name: str, text: str) -> tuple[str, str]:
    """Split a figure for a headline: "forward, 2,323 tokens/s in one worker" over "0.597 s"."""
    number, unit, rest = (*text.split(" ", 2), "", "")[:3]
    return f"{name}{',' * bool(rest)} {rest}".strip(), f"{number} {unit}".strip(" ,")


def _figures(replay: ReplaySummary, furthest: float | None, toy: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the distance from the truth, the speed and the memory."""
    first = replay.warm_up.first_forward.median
    yield "from the truth", "unknown" if furthest is None else f"{number(furthest, 2)} nats, worst log-prob"
    if replay.forward.median is not None:
        yield "forward", f"{seconds(replay.forward.median)} s, {rate(replay.tokens_per_s.median)} tokens/s in one worker{toy}"
    elif first is not None:
        yield "forward", f"{seconds(first)} s while warming up{toy}"
    if replay.peak_memory_bytes is not None:
        yield "peak memory", f"{human_bytes(replay.peak_memory_bytes)} in one worker{toy}"


def _verdict(check: CheckFound, replay: ReplaySummary, dumps: str) -> tuple[str, str]:
    """Return the verdict word and its text."""
    record, bad = check.comparison, replay.counts.inputs - replay.counts.passed
    if bad:
        why = ""
        for failure in replay.failures[:1]:
            first = failure.cause.strip().split("\n")[0][:CAUSE_CHARS]
            why = f": {first if not first or first.startswith(failure.name) else f'{failure.name}, {first}'}"
        return FAILED, f"{bad:,} of {plural(replay.counts.inputs, 'dump')} did not pass{why}"
    if replay.laws is not None and not replay.laws.good:
        return WRONG if replay.laws.broken else FAILED, violation_in_words(replay.laws.violations[0])
    ranks = replay.ranks if check.data.spec.config.align == "same" else None
    if ranks is not None and ranks.differ:
        return WRONG, f"ranks disagree on the same input: {ranks_in_words(ranks)[1]}"
    if record is None or record.verdict == NOT_COMPARED:
        why = check.no_truth or next((why for dump in check.truths for why in dump.not_compared.values()), "")
        return UNJUDGED, f"{dumps} ran; none could be compared with the truth{why and ': '}{why}"
    dtype = record.a.dtype or "its dtype"
    far = sum(dump.verdict == MISMATCH for dump in record.dumps)
    if not record.good:
        said = f"{far:,} of {plural(len(record.dumps), 'dump')} differ from the truth by more than {dtype} rounding"
        return WRONG, "; ".join((said, *of_one_rank(check.data.results, record.dumps, record.thresholds)))
    if check.golden is not None and (own := _own_in_words(check.golden, dtype)):
        return WRONG, own
    noise = record.verdict == WITHIN_NOISE
    match = "matches" if replay.counts.inputs == 1 else "match"
    near = f"{match} the truth within the noise floor" if noise else f"{match} the truth to {dtype} rounding"
    if check.golden is not None and check.golden.verdict == NOT_COMPARED:
        return UNJUDGED, f"{dumps} {near}; not checked: {next(_golden_left(check), 'the outputs of the run')}"
    return RIGHT, f"{dumps} {near}"


def _own_in_words(golden: ComparisonRecord, dtype: str) -> str:
    """Describe how the run's recorded outputs differ from this replay, with the largest differences; "" if they agree."""

    def beyond(name: str, figures: Iterable[Figures | None], limit: str) -> str:
        """Describe the largest difference in nats if it exceeds its limit, else ""; one-sided non-finite values exceed any."""
        known = [each for each in figures if each is not None]
        if any(each.nonfinite for each in known):
            return f"{name} by a non-finite amount"
        furthest = max((each.max_abs or 0.0 for each in known), default=0.0)
        return f"{name} by up to {number(furthest, 3)} nats" if furthest > (golden.thresholds.get(limit) or 0.0) else ""

    bad = [dump for dump in golden.dumps if dump.verdict == MISMATCH]
    if not bad:
        return ""
    log_probs = beyond("log-probs", (dump.log_probs for dump in bad), "max_abs")
    entropies = beyond("entropies", (dump.entropy for dump in bad), "entropy_max_abs")
    furthest = ", ".join(filter(None, (log_probs, entropies))) or bad[0].reasons[0]
    agree = "; its log-probs agree" if entropies and not log_probs else ""
    many = f"{len(bad):,} of {plural(len(golden.compared), 'dump')}"
    fault = f"; {LEAKED}" if any(LEAKED in dump.reasons for dump in bad) else ""
    return f"in {many} the run's outputs are not what its model gives in {dtype}: {furthest}{agree}{fault}"


def _not_judged(check: CheckFound, replay: ReplaySummary, toy: bool) -> Iterator[str]:
    """Yield what was not checked."""
    if toy:
        yield "your model"
    yield from _golden_left(check)
    if check.golden is not None and check.golden.verdict == MISMATCH and met_weights(check.data.resolved).get("unknown", 1):
        yield "whether the model has the weights of that step (run --hash-weights)"
    if check.comparison is not None:
        yield from check.comparison.unjudged
        if flat_where_it_matters(check.comparison):
            yield "rounding on these inputs (fixed limits were used)"
    if not any(result.grad_norm is not None for result in check.data.results):
        yield "gradients (--backward)"
    if replay.laws is None or not replay.laws.inputs:
        yield "the laws"
    elif replay.laws.not_checked:
        unchecked = sorted({why.partition(":")[0] for why in replay.laws.not_checked})
        yield f"the {'law' if len(unchecked) == 1 else 'laws'} {', '.join(unchecked)}"
    if replay.laws is not None and 0 < replay.laws.inputs < replay.laws.of:
        yield f"the laws of {plural(replay.laws.of - replay.laws.inputs, 'dump')}"
    if check.shared:
        yield f"modules of {', '.join(check.shared)} (shared with the truth)"


def _golden_left(check: CheckFound) -> Iterator[str]:
    """Yield how many recorded outputs were not compared, by reason; for other weights, with the condition that excludes them."""
    same = met_weights(check.data.resolved).get("same", [])
    steps = f"step={same[0]}" if len(same) == 1 else f"step in ({', '.join(map(str, same))})"
    known = f'--where "{steps}" excludes them' if same and None not in same else "pass that step's checkpoint as --model"
    left = Counter(next(iter(dump.not_compared.values()), "") for dump in check.goldens if dump.verdict == NOT_COMPARED)
    for why, count in left.most_common():
        text = f"the outputs of the run in {count:,} of {plural(len(check.goldens), 'dump')}: {why}"
        yield f"{text} ({known})" if why == OTHER_WEIGHTS else text


def _next(check: CheckFound, word: str, toy: bool, recorded: str | None) -> str:
    """Return the command to run next, with the same model and selection."""
    spec, golden = check.data.spec, check.golden
    model = f"--model {in_shell(spec.config.model)}"
    if word in (FAILED, UNJUDGED):
        return f"actordbg report {spec.replay_id}"
    if word == WRONG:
        lawless = [result.dump_id for result in check.data.results if violations(answers_of(result.extra), spec.config.accept)]
        if check.comparison and check.comparison.good and not lawless and golden and golden.verdict == MISMATCH:
            return f"actordbg compare {spec.replay_id} golden"
        worst = [*lawless, *(dump.dump_id for dump in check.truths)][0]
        where = in_shell(f"dump_id = '{worst}'")
        return f"actordbg matrix --where {where} {model}"
    if toy:
        return f"actordbg check --model {in_shell(recorded) if recorded else 'PATH'}"
    return f"actordbg matrix --where {in_shell(spec.where or 'rank=0')} --max-inputs 3 {model}"
