"""Check the laws of recorded data on the dumps that a condition selects, and say the result. Reads dumps; runs no model.

findings = lint(store, paths)
findings.verdict(of=1024).sentence      # "RIGHT: 5 laws of recorded data hold on 1,024 dumps; not checked: 11 laws, ..."
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from actordbg.base.errors import ActordbgError
from actordbg.base.units import grouped, plural, with_handles
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Block, Grid, Items, Verdict, section
from actordbg.formats.dump_record import LOSS
from actordbg.judge.recorded_calls import Answer, RecordedCall, RecordedLaw, Violation
from actordbg.judge.recorded_laws import LAWS
from actordbg.records.replay_record import BROKEN, KEPT, NOT_CHECKED

_NAMED = 3
"""Violations of a law that are named."""
_HOW = {
    LOSS: "policy losses (dump enable --calls forward,loss)",
    "log_probs": "log-probs (dump enable --with-outputs, or --calls forward,loss)",
}
"""How to record what a law needs, where it is not the trainer that has to hand it over."""
_ODD = (ValueError, TypeError, LookupError, ArithmeticError)
"""What a law raises on facts of a type that no recorder writes."""


@dataclass
class Findings:
    """The answers of all laws, by name. recorded: names of everything that the calls have. dumps: how many were read. unreadable:
    the messages of those that were not.
    """

    answers: dict[str, Answer] = field(default_factory=lambda: {law.name: Answer() for law in LAWS})
    recorded: set[str] = field(default_factory=set)
    dumps: int = 0
    unreadable: list[str] = field(default_factory=list)

    def state(self, law: RecordedLaw) -> str:
        """Return how a law stands: BROKEN, KEPT, or NOT_CHECKED if nothing recorded could check it."""
        answer = self.answers[law.name]
        return BROKEN if answer.violations else KEPT if answer.looked_at else NOT_CHECKED

    @property
    def broken(self) -> list[RecordedLaw]:
        """The laws that fail, in the order of the table."""
        return [law for law in LAWS if self.state(law) == BROKEN]

    @property
    def held(self) -> list[RecordedLaw]:
        """The laws that hold."""
        return [law for law in LAWS if self.state(law) == KEPT]

    @property
    def unchecked(self) -> list[RecordedLaw]:
        """The laws that nothing recorded could check."""
        return [law for law in LAWS if self.state(law) == NOT_CHECKED]

    def lacking(self, law: RecordedLaw) -> str:
        """Return what was not recorded that a law needs, and how to record it; or, if all was, what it could not judge."""
        missing = [name for name in law.needs if name not in self.recorded]
        return _HOW.get(missing[0], missing[0]) if missing else self.answers[law.name].lacks or "calls that it is about"

    @property
    def wrong(self) -> tuple[str, ...]:
        """The side that is wrong by the first law that fails: ROLLOUT, TRAINER or EITHER; none if no side is."""
        sides = (self.answers[law.name].violations[0].side or law.side for law in self.broken[:1])
        return tuple(filter(None, sides))

    def in_words(self) -> str:
        """Return the result in words, for the sentence of a command that checks the recorded data first."""
        if self.broken:
            first = self.broken[0]
            violation = self.answers[first.name].violations[0]
            others = f"; also fails: {', '.join(law.name for law in self.broken[1:])}" if self.broken[1:] else ""
            row = "" if violation.row is None else f"row {violation.row} of "
            return f"{first.name} ({first.thread}): {violation.words}, in {row}{with_handles(violation.dump_id)}{others}"
        held = f"{plural(len(self.held), 'law')} of recorded data {'holds' if len(self.held) == 1 else 'hold'}"
        return held if self.held else "no law of recorded data could be checked"

    def verdict(self) -> Verdict:
        """Return the verdict: WRONG if a law fails, RIGHT if some hold, else NOT CHECKED."""
        left = [f"{plural(len(self.unchecked), 'law')}, for lack of recorded data (listed below)"] if self.unchecked else []
        left += [f"{plural(len(self.unreadable), 'dump')} that cannot be read"] if self.unreadable else []
        figures = [pair for answer in self.answers.values() for pair in answer.figures]
        if self.broken:
            violation = self.answers[self.broken[0].name].violations[0]
            following = f"actordbg dump show {violation.dump_id}"
            return Verdict(WRONG, self.in_words(), figures, left, following, wrong=self.wrong)
        said = f"{self.in_words()} on {plural(self.dumps, 'dump')}"
        return Verdict(RIGHT if self.held else UNCHECKED, said, figures, left, "actordbg check")


@np.errstate(all="ignore")  # of log-probs that are not finite, which a law names
def lint(store: Path, paths: Sequence[str], on_dump: Callable[[int], None] = lambda count: None) -> Findings:
    """Check all laws on the dumps at `paths`, below the folder `store`. A dump that cannot be read is counted and named."""
    findings, kept = Findings(), list[RecordedCall]()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for call, answers, names in pool.map(lambda path: _read(store, path), paths):
            on_dump(1)
            if isinstance(call, str):
                findings.unreadable.append(call)
                continue
            kept.append(call)
            findings.recorded |= names
            for name, answer in answers.items():
                findings.answers[name].looked_at += answer.looked_at
                findings.answers[name].violations += answer.violations
                findings.answers[name].lacks = answer.lacks or findings.answers[name].lacks
    findings.dumps = len(kept)
    for law in LAWS:
        if law.over_calls:
            try:
                law.judge(kept, findings.answers[law.name])
            except _ODD:
                findings.answers[law.name] = Answer()
    return findings


@np.errstate(all="ignore")
def _read(store: Path, path: str) -> tuple[RecordedCall | str, dict[str, Answer], set[str]]:
    """Read a dump, check the laws of single calls, and return the call trimmed, with the names of what it has; or why it cannot
    be read.
    """
    answers = {law.name: Answer() for law in LAWS if not law.over_calls}
    try:
        call = RecordedCall.read(str(store / path))
        call.root = store
        for law in LAWS:
            if not law.over_calls:
                law.judge([call], answers[law.name])
        names = call.recorded_names
        return call.trim(), answers, names
    except (ActordbgError, OSError, *_ODD) as error:
        return f"{path}: {getattr(error, 'message', error)}", answers, set()


def lint_blocks(findings: Findings) -> list[Block]:
    """Build what follows the verdict: for each law that fails what holds elsewhere, where it fails, and the remedy."""
    blocks: list[Block] = []
    if findings.broken:
        rows = [row for law in findings.broken for row in _rows(law, findings.answers[law.name].violations)]
        blocks.append(Grid(("law", "dump", "row", "what"), rows, left=("law", "dump", "what"), wraps=True))
        blocks.append(Items([f"{law.name}: {law.holds}. {law.thread}. Try: {law.remedy}" for law in findings.broken]))
    held = [f"{law.name}: {law.holds} ({plural(findings.answers[law.name].looked_at, 'check')})" for law in findings.held]
    needs = grouped((findings.lacking(law), law.name) for law in findings.unchecked).items()
    lacking = [f"{', '.join(names)}: {'needs' if len(names) == 1 else 'need'} {need}" for need, names in needs]
    return [*blocks, *section("Laws that hold", held), *section("Not checked", lacking)]


def _rows(law: RecordedLaw, violations: Sequence[Violation]) -> Iterator[tuple[str, str, str, str]]:
    for violation in violations[:_NAMED]:
        row = "-" if violation.row is None else str(violation.row)
        yield law.name, with_handles(violation.dump_id), row, violation.words
    if len(violations) > _NAMED:
        yield law.name, "...", "-", f"{plural(len(violations) - _NAMED, 'more place')}"


def lint_data(findings: Findings) -> dict[str, Any]:
    """Return the result as data: each law with its state, what it looked at, thread, remedy and violations."""
    laws = [
        {"law": law.name, "verdict": findings.state(law)}
        | {name: getattr(law, name) for name in ("holds", "thread", "remedy")}
        | {"needs": findings.lacking(law) if findings.state(law) == NOT_CHECKED else ""}
        | {"looked_at": answer.looked_at, "figure": "; ".join(map(": ".join, answer.figures))}
        | {"violations": [asdict(each) | {"side": each.side or law.side} for each in answer.violations]}
        for law, answer in ((law, findings.answers[law.name]) for law in LAWS)
    ]
    return {"dumps": findings.dumps, "unreadable": findings.unreadable, "laws": laws}


def with_lint(verdict: Verdict, findings: Findings) -> Verdict:
    """Return the verdict of a check together with that of the laws of the recorded data, which comes first if one fails."""
    said = f"{verdict.said.removesuffix('.')}; {findings.in_words()}"
    if not findings.broken:
        left = (f"{plural(len(findings.unchecked), 'law')} of recorded data (`actordbg lint`)",) * bool(findings.unchecked)
        return replace(verdict, said=said, not_checked=(*verdict.not_checked, *left))
    if verdict.word == FAILED:
        return replace(verdict, said=said)
    said = f"recorded data: {findings.in_words()}; {verdict.said}"
    return replace(verdict, word=WRONG, said=said, next="actordbg lint", wrong=findings.wrong)
