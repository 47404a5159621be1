"""Check the laws of recorded data on the dumps that a condition selects, and say the result. Reads dumps; runs no model.
What they say of each dump is kept for its last verdict (`catalog.dump_verdicts`).

findings = lint(store, paths)
findings.verdict().sentence      # "RIGHT: 5 laws of recorded data hold on 1,024 dumps; not checked: 11 laws, ..."
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from actordbg.base.errors import ActordbgError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import grouped, new_replay_id, plural
from actordbg.catalog.dump_verdicts import LINTED
from actordbg.catalog.query import Catalog, answers
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Block, Verdict
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, in_words, verdict_of
from actordbg.formats.dump_record import LOSS, now_timestamp
from actordbg.recorded import mask_laws
from actordbg.recorded.recorded_calls import Answer, Calls, RecordedCall
from actordbg.recorded.recorded_laws import LAWS
from actordbg.records.comparison_record import LintRecord
from actordbg.records.finding import KEPT, NOT_CHECKED, Finding, Findings, NotChecked, Rule, RuleOutcome
from actordbg.store.layout import Store

NO_LOSSES = "policy losses (dump enable --calls forward,loss, where the trainer's are read)"
_HOW = {
    LOSS: NO_LOSSES,
    "log_probs": "log-probs (dump enable --with-outputs, or --calls forward,loss)",
}
"""How to record what a law needs, where it is not the trainer that has to hand it over."""
_IN_FILES = {
    LOSS: "a trainer's log-probs or advantages, which these files lack",
    "log_probs": "log-probs, which these files lack",
}
"""What a law needs, where all dumps were made of files that a run left behind."""
READ = Rule("readable", "every dump can be read")
Judged: TypeAlias = tuple[RecordedCall | None, list[Answer], set[str], str]
"""A call, trimmed; what the laws of single calls said of it; the names of what it has; what of it cannot be read, and why."""
_ODD = (ValueError, TypeError, LookupError, ArithmeticError)
"""What a law raises on facts of a type that no recorder writes."""


@dataclass
class LintFindings(Findings):
    """The answers of all laws. recorded: names of everything that the calls have. read: ids of the dumps. unreadable: the
    messages of those that could not be read. forwards: not all dumps are losses. imported: all dumps were made of files; files:
    their names, if there are no others, and rows: how many they have.
    """

    outcomes: Sequence[RuleOutcome] = field(default_factory=lambda: [Answer(law) for law in LAWS])
    recorded: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)
    files: Sequence[str] = ()
    rows: int = 0
    imported: bool = False
    forwards: bool = False

    @property
    def dumps(self) -> int:
        """Return how many dumps were read."""
        return len(self.read)

    def finish(self) -> None:
        """Say of each law that nothing recorded could check what it lacks, and how to record that."""
        for answer in self.of(NOT_CHECKED):
            missing = [name for name in answer.rule.needs if name not in self.recorded]
            if self.imported and answer.lacks:
                continue  # files name no settings, so a law goes by what it finds in them
            answer.lacks = (
                (_IN_FILES if self.imported else _HOW).get(missing[0], missing[0])
                if missing
                else answer.lacks or "calls that it is about"
            )
        if self.unreadable:
            self.left = [NotChecked(READ, f"{plural(len(self.unreadable), 'dump')} that cannot be read whole")]

    def in_words(self) -> str:
        """Return the result in words, for the sentence of a command that checks the recorded data first."""
        if self.broken:
            return in_words(self)
        if not self.held:
            return "no law of recorded data could be checked"
        hold = "holds" if len(self.held) == 1 else "hold"
        return f"{plural(len(self.held), 'law')} of recorded data {hold}"

    def verdict(self) -> Verdict:
        """Return the verdict: WRONG if a law fails, RIGHT if some hold, else NOT CHECKED."""
        files = " ".join(map(in_shell, self.files))
        of = plural(self.rows, "row") if self.rows else plural(self.dumps, "dump")
        checked = f"actordbg check {files}".rstrip() if self.forwards else ""
        following = dict.fromkeys((RIGHT, UNCHECKED), checked)
        if self.broken:
            shown = self.found[0].place.get("dump")
            following[WRONG] = f"actordbg dump show {shown}" if shown else f"actordbg dump import {files}"
        return verdict_of(self, f"{self.in_words()} on {of}", following)


def lint(store: Path, paths: Sequence[str], on_dump: Callable[[int], None] = lambda count: None) -> LintFindings:
    """Check all laws on the dumps at `paths`, below the folder `store`. A dump that cannot be read is counted and named."""
    linting = Linting()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for judged in pool.map(lambda path: _judged(lambda: RecordedCall.read(str(store / path)), path), paths):
            on_dump(1)
            linting.keep(*judged)
    for call in linting.kept:
        call.root = store
    return linting.finish()


class Linting:
    """A check of calls as they come: `judge` or `keep` each, then `finish`. kept: the calls, trimmed."""

    def __init__(self) -> None:
        self.findings, self.kept = LintFindings(), list[RecordedCall]()

    def judge(self, call: RecordedCall) -> None:
        """Check the laws of single calls."""
        self.keep(*_judged(lambda: call, call.record.dump_id))

    def keep(self, call: RecordedCall | None, answers: Sequence[Answer], names: set[str], unread: str) -> None:
        """Add what `_judged` returned."""
        if unread:
            self.findings.unreadable.append(unread)
        if call is not None:
            self.kept.append(call)
        self.findings.recorded |= names
        for answer in answers:
            add(self.findings[answer.rule.name], answer)

    @np.errstate(all="ignore")  # of log-probs that are not finite, which a law names
    def judge_steps(self, calls: Calls) -> None:
        """Check the laws over many calls on those of whole steps."""
        for law, total in zip(LAWS, self.findings.outcomes, strict=True):
            if law.over_calls:
                answer = Answer(law)
                with contextlib.suppress(*_ODD):
                    law.judge(calls, answer)
                    add(total, answer)

    def finish(self) -> LintFindings:
        """Check the laws over all calls, and return what all laws said."""
        findings, kept = self.findings, self.kept
        findings.read, findings.imported = {call.record.dump_id for call in kept}, all(call.imported for call in kept)
        findings.forwards = not all(call.is_loss for call in kept)
        self.judge_steps(kept)
        findings.finish()
        findings.left += [NotChecked(each.rule, each.unjudged) for each in findings.of(KEPT) if each.unjudged]
        if any(map(_has_terms_apart, kept)):
            said, by = "KL and entropy terms beside the recorded losses", "`actordbg step`"
            findings.left.append(NotChecked(findings["formula"].rule, said, by))
        if (rows := mask_laws.unsure_beginnings(kept)) and not findings["first action"].found:
            said = f"where answers begin, as {rows} differ in the token before it"
            by = "end prompts without a space, which a tokenizer merges with the answer: its first token is not trained on then"
            findings.left.append(NotChecked(findings["first action"].rule, said, by))
        return findings


def _has_terms_apart(call: RecordedCall) -> bool:
    """Check whether its trainer adds terms to what its recorded loss returns."""
    penalized = call.fact("kl.use_loss") and call.fact("kl.init_coef")
    return call.is_loss and bool(penalized or call.fact("entropy_coef"))


def add(total: RuleOutcome, outcome: RuleOutcome) -> None:
    """Add what was found of a rule elsewhere."""
    total.looked_at += outcome.looked_at
    total.found += outcome.found
    total.lacks, total.figures = outcome.lacks or total.lacks, outcome.figures or total.figures
    total.unjudged = outcome.unjudged or total.unjudged


@np.errstate(all="ignore")
def _judged(read: Callable[[], RecordedCall], name: str) -> Judged:
    """Check the laws of single calls on a call, and trim it. What stops one law does not stop the others."""
    answers, names, reasons = list[Answer](), set[str](), list[str]()
    kept = None
    try:
        call = read()
        for law in LAWS:
            if law.over_calls:
                continue
            try:
                law.judge(call, answer := Answer(law))
                answers.append(answer)
            except _ODD as error:
                reasons.append(f"{law.name}: {error!r:.200}")
        names = call.recorded_names
        kept = call.trim()
    except (ActordbgError, OSError, *_ODD) as error:
        reasons.append(str(getattr(error, "message", error)))
    why = "; ".join(reasons)
    return kept, answers, names, f"{name}: {why}" if why else ""


def lint_answer(findings: LintFindings, *more: Block) -> CommandResult:
    """Return what `actordbg lint` says. more: blocks after the verdict."""
    about = {"dumps": findings.dumps, "unreadable": findings.unreadable}
    return answer_of(findings, findings.verdict(), *more, title="laws of recorded data", **about)


def keep(store: Store, findings: LintFindings) -> None:
    """Write what these findings add to what earlier lints said of the dumps, or take back; nothing if that is nothing.

    A finding is taken back by a lint that reads its dump and judges its law as often. Raises StoreProblem.
    """
    known = {(law, dump_id): looked_at for dump_id, law, looked_at in answers(store, LINTED.format(""))}
    looked = {outcome.rule.name: outcome.looked_at for outcome in findings.outcomes}
    broken = {(finding.rule.name, str(finding.place["dump"])) for finding in findings.found}
    kept = [
        (law, dump_id)
        for (law, dump_id), before in known.items()
        if dump_id in findings.read and (law, dump_id) not in broken and looked.get(law, before) >= before
    ]
    new = grouped(sorted(broken - known.keys()))
    if new or kept:
        record = LintRecord(new_replay_id(), now_timestamp(), new, grouped(kept), {law: looked[law] for law in new})
        store.publish_text(store.lints / f"{record.lint_id}.json", record.to_json())


def with_known(source: Store | Catalog, findings: LintFindings, dumps: Collection[str]) -> LintFindings:
    """Add to findings what lints of more data found broken in these dumps, and return them."""
    found = {(finding.rule.name, finding.place["dump"]) for finding in findings.found}
    for dump_id, law, _ in answers(source, LINTED.format("")):
        for outcome in findings.outcomes:
            if outcome.rule.name == law and dump_id in dumps and (law, dump_id) not in found:
                outcome.found.append(Finding(outcome.rule, f"it does not hold that {outcome.rule.holds}", {"dump": dump_id}))
    return findings


def with_lint(verdict: Verdict, findings: LintFindings) -> Verdict:
    """Return the verdict of a check together with that of the laws of the recorded data, which comes first if one fails."""
    further = (*verdict.further, findings.in_words())
    if not findings.broken:
        return replace(verdict, further=further, not_checked=(*verdict.not_checked, *findings.not_checked))
    if verdict.word == FAILED:
        return replace(verdict, further=further, findings=(*verdict.findings, *findings.found))
    said = f"recorded data: {findings.in_words()}; {verdict.told}"
    return replace(
        verdict, word=WRONG, said=said, further=(), next="actordbg lint", findings=(*findings.found, *verdict.findings)
    )
