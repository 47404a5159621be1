"""The answer of a check: the verdict as text, and its page with both comparisons and the replay's report."""

from __future__ import annotations

from actordbg.document.blocks import Items
from actordbg.document.command_result import CommandResult
from actordbg.judge.check import CheckFound, check_blocks, check_data
from actordbg.judge.explanation import explain
from actordbg.judge.load_replays import pictures
from actordbg.store.layout import Store


def check_answer(store: Store, checked: CheckFound, *, of: int, recorded: str | None = None) -> CommandResult:
    """Build the answer. of: the number of dumps that the sample was drawn from. recorded: the model that the dumps name."""
    verdict = checked.verdict(of=of, recorded=recorded)
    explained = explain(store, checked, verdict)
    data = check_data(checked, verdict, of=of) | {"explanation": explained.data}
    brief = (verdict, Items((f"configuration: {data['configuration']}",)))
    page = check_blocks(checked, verdict, explained.blocks, pictures(store, checked.data))
    return CommandResult(verdict.good, data, brief, page)
