"""Put together what is known of a replay: what is wrong, where, since when, what to do, what was ruled out, what was not checked.

    explained = explain(store, checked, checked.verdict(of=8))        # a `judge.check.CheckedReplay`
    headline(explained).sentence, explained.blocks, explained.data

What is wrong are the verdict's findings: causes say what, places say where, and the rules what to do. Beside them, each
generator in `_BESIDE` says where else it shows, since when, and what was ruled out. Nothing is computed here: `actordbg explain`
runs what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from actordbg.base.units import grouped, listed, plural
from actordbg.compare.dump_figures import scaled_gradients
from actordbg.document.blocks import RIGHT, UNCHECKED, WRONG, Block, Chart, Verdict, number, section
from actordbg.judge.agreement import ranks_in_words
from actordbg.judge.check import CheckedReplay, worst_unlocated
from actordbg.judge.comparison_document import comparison_verdict, excluded
from actordbg.judge.replay_findings import RANKS
from actordbg.judge.token_charts import heat_chart
from actordbg.judge.wrong_tokens import since, wrong_tokens
from actordbg.laws.rules import RULES
from actordbg.locate.rules import OPERATION, PLACES, SAME_MODEL
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, RECORDED, TRUTH, ComparisonRecord
from actordbg.records.finding import ISOLATION, KEPT, Finding, Rule, unchecked_in_brief
from actordbg.records.replay_record import WITHIN_ROUNDING, answers_of
from actordbg.store.layout import Store

WHAT, WHERE, SINCE, TODO, RULED_OUT, NOT_CHECKED = "what", "where", "since", "to do", "ruled out", "not checked"
TITLES = {
    WHAT: "What is wrong",
    WHERE: "Where",
    SINCE: "Since",
    TODO: "What to do",
    RULED_OUT: "Ruled out",
    NOT_CHECKED: "Not checked",
}
"""The kinds of what is said, in the order of the sections, and their headings."""
MOST = 5
REPLAY, RUN = "A", "run"
"""Sides: the replay, and the outputs that the training run recorded."""
Told = Iterator[tuple[str, str]]
"""Sentences, each with its kind."""
SCALE = Rule(
    "scale of gradients",
    "gradients have the truth's scale",
    remedy="look for a factor of the loss: by what it is divided, and whether ranks or micro-batches are counted twice",
)
_ACTS = (RANKS, *PLACES.values())
"""Rules that say where a fault shows, not what it is."""


@dataclass(frozen=True)
class Explanation:
    """Everything that is known of a replay, by kind, causes first, and the verdict that it explains. sides: what it is about."""

    verdict: Verdict
    lines: dict[str, list[str]]
    sides: tuple[str, ...]
    charts: tuple[Chart, ...] = ()

    @property
    def blocks(self) -> list[Block]:
        """The parts below the verdict, which names what was not checked: a section for each kind, and the charts."""
        titles = {kind: title for kind, title in TITLES.items() if kind != NOT_CHECKED or not self.verdict.not_checked}
        return [*(block for kind, title in titles.items() for block in section(title, self.lines[kind])), *self.charts]

    @property
    def data(self) -> dict[str, Any]:
        """The sentences by kind, and the sides that they are about."""
        return {kind.replace(" ", "_"): lines for kind, lines in self.lines.items()} | {"sides": sorted(self.sides)}


def explain(store: Store, check: CheckedReplay, verdict: Verdict) -> Explanation:
    """Explain the verdict on a replay by its findings, and by what its comparisons, laws, ranks and modules say beside them."""
    every = [*verdict.findings, *(check.judged.recorded() if verdict.word == UNCHECKED else ()), *_scale(check)]
    found = [each[0] for each in grouped((finding.key, finding) for finding in every).values()]
    what, where = _causes_and_places(found)
    beside = grouped(pair for examine in _BESIDE for pair in examine(store, check))
    said = {kind: beside.get(kind, []) for kind in TITLES}
    laws = [finding for finding in what if finding.rule.name in RULES]
    explained = laws[1:]  # by the first broken law
    todo = [_todo(finding) for finding in what or where if finding.todo and finding not in explained]
    said[WHAT] = _lines(what)
    said[WHERE] = [*_lines(where), *said[WHERE]]
    said[TODO] = list(dict.fromkeys([*todo, *said[TODO]]))
    if verdict.word == WRONG and not todo:
        said[WHAT].append("no cause is known: no tensor, attribute, module or law that was checked is wrong")
    said[NOT_CHECKED] = unchecked_in_brief(verdict.not_checked)
    judged_run = check.own is not None and check.own.verdict != NOT_COMPARED
    linted = check.lint is not None and (check.lint.held or check.lint.broken)
    sides = (REPLAY, RUN) if judged_run or linted else (REPLAY,)
    located = check.local.located if check.local else None
    chart = heat_chart(located) if located else None
    return Explanation(verdict, said, sides, (chart,) if chart else ())


def _causes_and_places(found: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return what is wrong, and where that shows. Without a known cause, the first place is what is wrong."""
    acts = [*_ACTS, OPERATION] if any(finding.rule == SAME_MODEL for finding in found) else _ACTS
    what = [finding for finding in found if finding.rule not in acts]
    where = [finding for finding in found if finding.rule in acts]
    known = any(finding.rule not in (TRUTH, RECORDED) for finding in what)
    return (what, where) if known else ([*where[:1], *what], where[1:])


def _todo(finding: Finding) -> str:
    """Return what to do, with the thread where people met it."""
    return f"{finding.todo} ({finding.rule.thread})" if finding.rule.thread else finding.todo


def _lines(found: list[Finding]) -> list[str]:
    """Return what is said, each once, MOST at most of a rule."""
    by_rule = grouped((finding.rule, finding.said) for finding in found)
    return list(dict.fromkeys(said for each in by_rule.values() for said in each[:MOST]))


def _scale(check: CheckedReplay) -> Iterator[Finding]:
    record = check.comparison
    if record is not None and record.verdict == MISMATCH and (gain := scaled_gradients(record.dumps)) is not None:
        yield Finding(SCALE, f"all gradients are {gain:g} times the truth's", size=gain)


def _model(_store: Store, check: CheckedReplay) -> Told:
    """Say what of the model and of its modules is right."""
    local = check.local
    if local is None:
        return
    located = local.located
    if located is not None and located.formulas and not located.formulas.differs:
        yield RULED_OUT, f"{plural(located.formulas.modules, 'module')} of transformers: as in the formulas of their papers"
    if located is not None and located.places and not worst_unlocated(check):  # whose fault may need what only they have
        every = located.places + located.gradients
        many = f"{every - located.count:,} of {every:,}" if located.count else f"all {every:,}"
        gradients = f", {located.gradients:,} of them gradients" if located.gradients else ""
        largest = f" (at most {located.largest:.0%} of its error)" if not located.count and located.largest else ""
        near = f"as near to the truth as a healthy model's{largest}"
        yield RULED_OUT, f"{many} places{gradients}: {near}, in {plural(len(local.judged), 'dump')}"
    if local.looked_at and not local.findings:
        ranks = f" on {len(local.identities)} ranks" if len(local.identities) > 1 else ""
        when = "" if local.same_model else " when it was loaded"
        what = f"{local.looked_at:,} parameters, buffers, ties and attributes{ranks}"
        yield RULED_OUT, f"{what}: the checkpoint's, bit for bit{when}"


def _laws(_store: Store, check: CheckedReplay) -> Told:
    """Say which laws hold, of the loaded model and of the recorded data."""
    answers: dict[str, set[str]] = defaultdict(set)
    for result in check.data.results:
        for answer in answers_of(result.extra):
            answers[answer.law].add(answer.verdict)
    laws = check.summary.laws
    holding = [law for law, verdicts in answers.items() if verdicts <= {KEPT, WITHIN_ROUNDING}]
    if holding and laws:
        yield RULED_OUT, f"laws that hold in {plural(laws.inputs, 'input')}: {listed(holding)}"
    if check.lint is not None and (held := check.lint.held):
        yield RULED_OUT, f"{plural(len(held), 'law')} of recorded data: {', '.join(law.name for law in held)}"


def _ranks(_store: Store, check: CheckedReplay) -> Told:
    ranks = check.summary.ranks
    if ranks is not None and ranks.checked and not any(check.judged.ranks()):
        first, *each = ranks_in_words(ranks)
        yield WHERE if ranks.differ else RULED_OUT, "; ".join([first, *each[:2]])


def _truth(store: Store, check: CheckedReplay) -> Told:
    """Say how far log-probs and gradients are from the truth, in which tokens, and since which input."""
    record = check.comparison
    if record is None or record.verdict == NOT_COMPARED:
        return
    if record.verdict != MISMATCH:
        yield RULED_OUT, f"log-probs of {plural(len(record.compared), 'dump')}: the truth's to {record.a.dtype} rounding"
        if known := excluded(record.excludes, record.a.dtype):
            yield RULED_OUT, known.removesuffix(".")
        return
    yield from _tokens(store, record)
    worst = next(iter(record.mismatches), None)
    if worst is None:  # every log-prob is within rounding: what is wrong is a place, not a token
        return
    if record.furthest and worst.worst_tokens:
        token = worst.worst_tokens[0]
        apart = f", {number(token.difference, 3)} nats" if token.difference is not None else ""
        yield WHERE, f"the worst token: row {token.row}, position {token.position} of {worst.dump_id}{apart}"
    if worst.worst_parameter:
        ratio = number(worst.parameter_distance, 3)
        yield WHERE, f"the gradient that is furthest off: {worst.worst_parameter}, |a - b| / |b| = {ratio}"
    if when := since(store, record.compared):
        yield SINCE, when


def _tokens(store: Store, record: ComparisonRecord) -> Told:
    """Say which tokens are wrong."""
    if (pattern := wrong_tokens(store, record)) is not None:
        yield WHERE, f"wrong tokens: {pattern.sentence}"
        if "packed" in pattern.features[:1]:
            yield TODO, ISOLATION
    elif any(dump.worst_tokens for dump in record.mismatches):
        yield WHERE, "wrong tokens: no rule of rows, positions, lengths or ranks covers them"


def _run(_store: Store, check: CheckedReplay) -> Told:
    """Say that what the training run recorded is what this model gives, or how it is not."""
    own = check.own
    if own is not None and own.verdict != NOT_COMPARED:
        yield WHERE if own.verdict == MISMATCH else RULED_OUT, comparison_verdict(own).told


_BESIDE = (_model, _laws, _ranks, _truth, _run)


def headline(explanation: Explanation) -> Verdict:
    """Return the verdict with its sentence made of the evidence: what, where, since when."""
    verdict, said = explanation.verdict, explanation.lines
    if verdict.word in (RIGHT, UNCHECKED):
        return verdict
    parts = [*said[WHAT][:1], *said[WHERE][:1], *(f"since {when}" for when in said[SINCE][:1])]
    return replace(verdict, said="; ".join(parts) or verdict.said)
