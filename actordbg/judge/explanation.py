"""Put together what is known of a replay: what is wrong, where, since when, what to do, what was ruled out, what was not checked.

    explained = explain(store, checked, checked.verdict(of=8))        # a `judge.check.CheckedReplay`
    headline(explained).sentence, explained.blocks, explained.data

Each examination (the model, its modules, laws, ranks, log-probs, recorded outputs) yields `Evidence`, and knows of no other. A
new examination is one more generator in `_EXAMINATIONS`. Evidence names its side, so that there can be more than one: "A" is the
replay, "run" are the outputs that the training run recorded. Nothing is computed here: `actordbg explain` runs what is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from actordbg.base.units import plural
from actordbg.document.blocks import RIGHT, UNCHECKED, WRONG, Block, Chart, Verdict, number, section
from actordbg.judge.agreement import ranks_in_words
from actordbg.judge.check import CheckedReplay, worst_unlocated
from actordbg.judge.comparison_document import conclusion, excluded
from actordbg.judge.dump_figures import scaled_gradients
from actordbg.judge.token_charts import heat_chart
from actordbg.judge.wrong_tokens import since, wrong_tokens
from actordbg.locate.rules import OPERATION
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, ComparisonRecord
from actordbg.records.finding import BROKEN, ISOLATION, KEPT, Finding
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
"""The kinds of evidence, in the order of the sections, and their headings."""
MOST = 5
REPLAY, RUN = "A", "run"
"""Sides: the replay, and the outputs that the training run recorded."""


@dataclass(frozen=True)
class Evidence:
    """What an examination says, a sentence without its period. remedy: what to do about it. side: whose values it is about.
    tokens: whether it says which tokens are wrong.
    """

    kind: str
    said: str
    remedy: str = ""
    side: str = REPLAY
    tokens: bool = False


@dataclass(frozen=True)
class Explanation:
    """All evidence on a replay, causes first, and the verdict that they explain."""

    verdict: Verdict
    evidence: tuple[Evidence, ...]
    charts: tuple[Chart, ...] = ()

    def said(self, kind: str) -> list[str]:
        """Return the sentences of a kind; of TODO the remedies, each once."""
        if kind == TODO:
            return list(dict.fromkeys(piece.remedy for piece in self.evidence if piece.remedy))
        return [piece.said for piece in self.evidence if piece.kind == kind]

    @property
    def blocks(self) -> list[Block]:
        """The parts below the verdict, which names what was not checked: a section for each kind of evidence, and the charts."""
        titles = {kind: title for kind, title in TITLES.items() if kind != NOT_CHECKED or not self.verdict.not_checked}
        return [*(block for kind, title in titles.items() for block in section(title, self.said(kind))), *self.charts]

    @property
    def data(self) -> dict[str, Any]:
        """The sentences by kind, and the sides that they are about."""
        return {kind.replace(" ", "_"): self.said(kind) for kind in TITLES} | {
            "sides": sorted({piece.side for piece in self.evidence})
        }


def explain(store: Store, check: CheckedReplay, verdict: Verdict) -> Explanation:
    """Explain the verdict on a replay by its comparisons, laws, ranks and modules."""
    evidence = [piece for examine in _EXAMINATIONS for piece in examine(store, check)]
    if verdict.word == WRONG and not any(piece.remedy for piece in evidence if piece.kind == WHAT):
        evidence.append(Evidence(WHAT, "no cause is known: no tensor, attribute, module or law that was checked is wrong"))
    if verdict.not_checked:  # which names all of it, in fewer words
        evidence = [piece for piece in evidence if piece.kind != NOT_CHECKED]
        evidence += [Evidence(NOT_CHECKED, text) for text in verdict.not_checked]
    located = check.local.located if check.local else None
    chart = heat_chart(located) if located else None
    return Explanation(verdict, tuple(evidence), (chart,) if chart else ())


def _failures(_store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    for group in check.summary.failures[:MOST]:
        said = f"{group.name} ({plural(group.count, 'input')})"
        yield Evidence(WHAT, f"{said}: {group.explanation or ' '.join(group.cause.split())}", "; or ".join(group.ways_out))


def _model(_store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    """Say what the model is, bit for bit, and what each of its modules does to the truth's input."""
    local = check.local
    if local is None:
        return (yield Evidence(NOT_CHECKED, "the model, module by module"))
    causes, of_model = local.causes, bool(local.findings)
    for finding in causes[:MOST]:
        acts = of_model and finding.rule == OPERATION  # where what the model is shows itself
        yield Evidence(WHERE if acts else WHAT, finding.said, "" if acts else finding.todo)
    located = local.located
    if located is not None and located.formulas and not located.formulas.differs:
        yield Evidence(
            RULED_OUT, f"{plural(located.formulas.modules, 'module')} of transformers: as in the formulas of their papers"
        )
    if located is not None and local.places:
        first = local.places[0]
        tokens = bool(located.wrong[0].pattern) and located.wrong[0].tokens < located.wrong[0].of_tokens
        yield Evidence(WHERE if causes else WHAT, first.said, "" if causes else first.todo, tokens=tokens)
        if also := [place.what for place in located.wrong[1 : 1 + MOST]]:
            yield Evidence(WHERE, f"also above {'its limit' if len(also) == 1 else 'their limits'}: {', '.join(also)}")
    if located is not None and located.places:
        near, every = "as near to the truth as a healthy model's", located.places + located.gradients
        many = f"{every - located.count:,} of {every:,}" if located.count else f"all {every:,}"
        gradients = f", {located.gradients:,} of them gradients" if located.gradients else ""
        largest = f" (at most {number(located.largest, 3)} times its error)" if not located.count and located.largest else ""
        said = f"{many} places{gradients}: {near}{largest}, in {', '.join(local.judged)}"
        if not worst_unlocated(check):  # whose fault may need what only they have
            yield Evidence(RULED_OUT, said)
    if local.looked_at and not local.findings:
        ranks = f" on {len(local.identities)} ranks" if len(local.identities) > 1 else ""
        when = "" if local.same_model else " when it was loaded"
        said = f"{local.looked_at:,} parameters, buffers, ties and attributes{ranks}: the checkpoint's, bit for bit{when}"
        yield Evidence(RULED_OUT, said)
    yield from (Evidence(NOT_CHECKED, why) for why in local.unchecked[:MOST])


_OF_SCALE = "look for a factor of the loss: by what it is divided, and whether ranks or micro-batches are counted twice"


def _recorded_data(_store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    """Say which laws of the recorded data fail: the inputs may be wrong, not what is computed from them."""
    if check.lint is None:
        return (yield Evidence(NOT_CHECKED, "the laws of the recorded data"))
    for outcome in check.lint.of(BROKEN)[:MOST]:
        first = outcome.found[0]
        said = f"recorded data: {first.said}, in {first.place['dump']} ({first.rule.thread})"
        yield Evidence(WHAT, said, first.todo, RUN)
    if held := check.lint.held:
        yield Evidence(RULED_OUT, f"{plural(len(held), 'law')} of recorded data: {', '.join(law.name for law in held)}", side=RUN)


def _laws(_store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    answers: dict[str, set[str]] = defaultdict(set)
    for result in check.data.results:
        for answer in answers_of(result.extra):
            answers[answer.law].add(answer.verdict)
    laws = check.summary.laws
    first: dict[tuple[str, str, str], Finding] = {}
    for violation in laws.violations if laws else ():
        first.setdefault(violation.key, violation)
    for index, violation in enumerate([*first.values()][:MOST]):  # the first broken law explains the others
        yield Evidence(WHAT, violation.said, "" if index else violation.todo)
    holding = [law for law, verdicts in answers.items() if verdicts <= {KEPT, WITHIN_ROUNDING}]
    if holding and laws:
        yield Evidence(RULED_OUT, f"laws that hold in {plural(laws.inputs, 'input')}: {', '.join(holding)}")


def _ranks(_store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    ranks = check.summary.ranks
    if ranks is not None and ranks.checked:
        first, *each = ranks_in_words(ranks)
        yield Evidence(WHERE if ranks.differ else RULED_OUT, "; ".join([first, *each[:2]]))


def _truth(store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    """Say how far log-probs and gradients are from the truth, in which tokens, and since which input."""
    record = check.comparison
    if record is None or record.verdict == NOT_COMPARED:
        return (yield Evidence(NOT_CHECKED, f"log-probs against the truth{f': {check.no_truth}' if check.no_truth else ''}"))
    if record.verdict != MISMATCH:
        yield Evidence(
            RULED_OUT, f"log-probs of {plural(len(record.compared), 'dump')}: the truth's to {record.a.dtype} rounding"
        )
        if known := excluded(record.excludes, record.a.dtype):
            yield Evidence(RULED_OUT, known.removesuffix("."))
        return
    yield from _causes(record, REPLAY)
    if (gain := scaled_gradients(record.dumps)) is not None:
        yield Evidence(WHAT, f"all gradients are {gain:g} times the truth's", _OF_SCALE)
    far = sum(dump.verdict == MISMATCH for dump in record.dumps)
    largest = f", by up to {number(record.furthest[0], 3)} nats" if record.furthest else ""
    if far:
        yield Evidence(WHAT, f"{far} of {plural(len(record.compared), 'dump')} differ from the truth{largest}")
    if (pattern := wrong_tokens(store, record)) is not None:
        remedy = ISOLATION if "packed" in pattern.features[:1] else ""
        yield Evidence(WHERE, f"wrong tokens: {pattern.sentence}", remedy, tokens=True)
    elif any(dump.verdict == MISMATCH and dump.worst_tokens for dump in record.dumps):
        yield Evidence(WHERE, "wrong tokens: no rule of rows, positions, lengths or ranks covers them", tokens=True)
    if record.furthest and (tokens := record.dumps[0].worst_tokens):
        worst = tokens[0]
        apart = f", {number(worst.difference, 3)} nats" if worst.difference is not None else ""
        yield Evidence(WHERE, f"the worst token: row {worst.row}, position {worst.position} of {record.dumps[0].dump_id}{apart}")
    if parameter := record.dumps[0].worst_parameter:
        ratio = number(record.dumps[0].parameter_distance, 3)
        yield Evidence(WHERE, f"the gradient that is furthest off: {parameter}, |a - b| / |b| = {ratio}")
    modules = check.local.said if check.local else ""  # of which the comparison tells too
    yield from (Evidence(WHERE, reason) for reason in record.reasons if reason != modules)
    if when := since(store, record.compared):
        yield Evidence(SINCE, when)


def _causes(record: ComparisonRecord, side: str) -> Iterator[Evidence]:
    """Say which causes were fitted to a side's values."""
    if (explained := record.explained) is not None:
        causes = explained.causes or explained.also
        remedies = "; or ".join(f"{cause.remedy} ({cause.thread})".removesuffix(" ()") for cause in causes)
        yield from (Evidence(WHAT, sentence, remedies, side) for sentence in explained.sentences)


def _run(_store: Store, check: CheckedReplay) -> Iterator[Evidence]:
    """Say whether what the training run recorded is what this model gives."""
    own = check.own
    if own is None or own.verdict == NOT_COMPARED:
        return
    good = own.verdict != MISMATCH
    yield from () if good else _causes(own, RUN)
    yield Evidence(RULED_OUT if good else WHAT, conclusion(own), side=RUN)


_EXAMINATIONS = (_failures, _model, _laws, _ranks, _recorded_data, _truth, _run)


def headline(explanation: Explanation) -> Verdict:
    """Return the verdict with its sentence made of the evidence: what, where, since when."""
    verdict = explanation.verdict
    if verdict.word in (RIGHT, UNCHECKED):
        return verdict
    what = [piece for piece in explanation.evidence if piece.kind == WHAT][:1]
    where = [piece for piece in explanation.evidence if piece.kind == WHERE][:1]
    twice = any(piece.tokens for piece in what) and any(piece.tokens for piece in where)  # which tokens are wrong was said
    parts = [piece.said for piece in (what if twice else [*what, *where])]
    parts += [f"since {when}" for when in explanation.said(SINCE)[:1]]
    return replace(verdict, said="; ".join(parts) or verdict.said)
