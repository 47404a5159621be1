"""`noise` and `compare-logs`: numerical noise, the losses of trainings step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actordbg.api.desk import Desk, DumpSelection, counting
from actordbg.base.errors import UsageError
from actordbg.document.command_result import CommandResult
from actordbg.judge.noise_floor import conclusion, deterministic, measure_noise, moves_most, noise_page, runs_of, tokens_of
from actordbg.measure.align_logs import compare_many, together
from actordbg.measure.log_document import log_charts, logs_page
from actordbg.measure.log_lines import read_log


def noise(desk: Desk, chosen: DumpSelection, flags: Mapping[str, Any]) -> CommandResult:
    """Replay the same inputs unchanged and in ways that must not matter, and measure how far the results move."""
    chosen = desk.selected(chosen)
    config = desk.asked(flags).config
    config = replace(config, keep_tensors=True, keep_gradients=config.backward is not False)
    plan = desk.planned("noise", config, chosen, "measure noise on")
    spec = plan.spec
    desk.client.begins(f"noise of {spec.replay_id}")
    desk.runnable(config, spec.inputs, announce=False)
    with desk.progress("measuring noise", len(spec.inputs) * runs_of(spec)) as advance:
        record = measure_noise(
            desk.store,
            spec,
            on_run=lambda name: advance(0, note=name),
            on_event=counting(advance),
            on_passed_over=advance,
        )
    most = moves_most(record)
    data = {name: getattr(record, name) for name in ("noise_id", "replay_id", "label", "dtype")} | {
        "dumps": len(record.dumps),
        "tokens": tokens_of(record),
        "floor": record.floor,
        "variants": record.variants,
        "moves_most": most.name if most else None,
        "deterministic": deterministic(record),
        "conclusion": conclusion(record),
        "reasons": record.reasons,
        "skipped": plan.skipped,
    }
    return CommandResult(True, data, noise_page(record))


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
