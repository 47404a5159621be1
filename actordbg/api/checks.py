"""The answer of a check: the verdict as text, and its page with both comparisons and the replay's report."""

from __future__ import annotations

from actordbg.api.planning import Advance
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.document.blocks import Items
from actordbg.document.command_result import CommandResult
from actordbg.judge.check import CheckFound, check_blocks, check_data
from actordbg.judge.explanation import explain
from actordbg.judge.lint import Findings, lint
from actordbg.judge.load_replays import pictures
from actordbg.store.layout import Store

LINTED = 256
"""Most dumps whose recorded data `check` checks, the newest: whole steps, and about a second."""


def lint_newest(store: Store, where: str | None, most: int | None = LINTED, on_dump: Advance = lambda *_, **__: None) -> Findings:
    """Check the laws of the recorded data on the newest dumps, losses included, that a condition selects."""
    rows = select_dumps(open_fresh(store, where), where, order="newest", limit=most, losses=True)
    on_dump(0, total=len(rows))
    return lint(store.root, [row.path for row in rows], on_dump)


def check_answer(store: Store, checked: CheckFound, *, of: int, recorded: str | None = None) -> CommandResult:
    """Build the answer. of: the number of dumps that the sample was drawn from. recorded: the model that the dumps name."""
    verdict = checked.verdict(of=of, recorded=recorded)
    explained = explain(store, checked, verdict)
    data = check_data(checked, verdict, of=of) | {"explanation": explained.data}
    brief = (verdict, Items((f"configuration: {data['configuration']}",)))
    page = check_blocks(checked, verdict, explained.blocks, pictures(store, checked.data))
    return CommandResult(verdict.good, data, brief, page)
