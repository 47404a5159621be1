"""Findings as a document: the verdict, a table of places, what to do, what holds and what was not checked.

answer = answer_of(findings, verdict_of(findings, "run ppo: 3 conversations"), title="turns of run ppo")
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actordbg.base.units import plural, with_handles
from actordbg.document.blocks import RIGHT, UNCHECKED, WRONG, Block, Grid, Items, Verdict, section
from actordbg.document.command_result import CommandResult
from actordbg.records.finding import BROKEN, KEPT, PLACES, Findings, RuleOutcome, unchecked_by_rule

_NAMED = 3
"""Places of a rule that are named."""
_MOST = 20
"""Rows of the table."""


def verdict_of(findings: Findings, right: str, following: Mapping[str, str] | None = None) -> Verdict:
    """Return WRONG if a rule fails, RIGHT if some hold, else NOT CHECKED. right: what is said where none fails.

    following: the next command, by the word.
    """
    found = findings.found
    word = WRONG if found else RIGHT if findings.held else UNCHECKED
    said = in_words(findings) if found else right
    subject = findings.subject and f"{findings.subject}: "
    figures = [pair for outcome in findings.outcomes for pair in outcome.figures]
    following = following or {}
    return Verdict(word, subject + said, figures, findings.not_checked, next=following.get(word, ""), findings=found)


def in_words(findings: Findings) -> str:
    """Return the first finding and the names of the other rules that fail."""
    first, *others = [outcome.found[0] for outcome in findings.of(BROKEN)]
    where = f", in {first.where}" if first.where else ""
    thread = f" ({first.rule.thread})" if first.rule.thread else ""
    also = f"; also fails: {', '.join(each.rule.name for each in others)}" if others else ""
    return f"{first.rule.name}{thread}: {first.said}{where}{also}"


def blocks_of(findings: Findings) -> list[Block]:
    """Build what follows the verdict."""
    blocks: list[Block] = []
    if broken := findings.of(BROKEN):
        columns = [name for name in PLACES if any(name in finding.place for finding in findings.found)]
        rows = [row for outcome in broken for row in _rows(outcome, columns)][:_MOST]
        blocks.append(Grid(("rule", *columns, "what"), rows, left={"rule", "dump", "conversation", "what"}, wraps=True))
        blocks.append(Items([_remedy(outcome) for outcome in broken]))
    held = [f"{outcome.rule.name}: {outcome.rule.holds} ({plural(outcome.looked_at, 'check')})" for outcome in findings.of(KEPT)]
    return [*blocks, *section("Rules that hold", held), *section("Rules not checked", unchecked_by_rule(findings.not_checked))]


def _rows(outcome: RuleOutcome, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for finding in outcome.found[:_NAMED]:
        place = [with_handles(str(finding.place.get(name, "-"))) for name in columns]
        yield outcome.rule.name, *place, finding.said
    if (more := len(outcome.found) - _NAMED) > 0:
        yield outcome.rule.name, *["-"] * len(columns), plural(more, "more place")


def _remedy(outcome: RuleOutcome) -> str:
    rule, todo = outcome.rule, outcome.found[0].todo
    about = [text for text in (rule.holds, rule.thread, f"Try: {todo}" if todo else "") if text]
    return f"{rule.name}: {'. '.join(about)}"


def answer_of(findings: Findings, verdict: Verdict, *more: Block, title: str, **data: Any) -> CommandResult:
    """Build the result of a command that looks for broken rules. more: blocks after the verdict. data: beside the rules."""
    rules = [outcome.data for outcome in findings.outcomes]
    return CommandResult.of(verdict, {**data, "rules": rules}, *more, *blocks_of(findings), title=title)
