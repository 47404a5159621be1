"""`compare-logs`: the losses of trainings, step by step, from their logs."""

from __future__ import annotations

from collections.abc import Sequence

from actordbg.base.errors import UsageError
from actordbg.document.command_result import CommandResult
from actordbg.measure.align_logs import compare_many, together
from actordbg.measure.log_document import log_charts, logs_page
from actordbg.measure.log_lines import read_log


def compare_logs(
    logs: Sequence[str], *, each: bool = False, metric: str | None = None, threshold: float = 0.05,
    rule: str = "first-mean-last", worst: int = 10, charts: bool = True,
) -> CommandResult:  # fmt: skip
    """Compare the losses of logs with those of the first, or, with `each`, every pair. "-" is standard input.

    threshold: the relative difference at which values are too far apart. worst: how many steps the text lists.
    """
    if len(logs) < 2:
        raise UsageError("compare-logs needs at least two logs", hint="name two or more")
    if list(logs).count("-") > 1:
        raise UsageError("standard input can be only one of the logs", hint="pass - once, and files for the others")
    read = [read_log(path, metric) for path in logs]
    pairs = compare_many(read, each=each, metric=metric, threshold=threshold, rule=rule, limit=worst)
    whole = together(pairs)
    blocks = logs_page(pairs, log_charts(pairs, read) if charts else [])
    return CommandResult(whole.good, vars(pairs[0] if len(logs) == 2 else whole), blocks)
