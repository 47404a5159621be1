"""The replay of a recorded optimizer step, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from actordbg.api.desk import Desk, counting
from actordbg.api.reports import texts_of
from actordbg.config.replay_config import TINY
from actordbg.document.blocks import Verdict, verdict_in
from actordbg.document.command_result import CommandResult
from actordbg.steps.recorded_step import recorded_step
from actordbg.steps.run_step import run_step
from actordbg.steps.step_document import step_blocks, step_data, step_page


def replayed_step(
    desk: Desk, number: int, run: str | None, flags: Mapping[str, Any], tokenizer: str | Path | None
) -> CommandResult:
    """Replay a step of a run under these settings. tokenizer: adds text to the charts of tokens.

    Raises what `recorded_step` and `run_step` raise, and Unsupported or EnvironmentProblem for what cannot run here.
    """
    store, texts = desk.store.require_writable(), texts_of(tokenizer)
    step = recorded_step(store, run, number)
    config = desk.asked(flags, step.micro_batches[0].loss.record).config
    inputs = tuple(each.forward for each in step.micro_batches)
    desk.runnable(config, inputs, announce=False)
    with desk.progress("replaying the step", 2 * len(inputs)) as advance:
        figures = run_step(store, step, config, counting(advance))
    blocks, page = step_blocks(figures), step_page(figures, texts)
    if config.model == TINY:
        blocks, page = ([replace(b, toy=True) if isinstance(b, Verdict) else b for b in each] for each in (blocks, page))
    verdict = verdict_in(blocks)
    good = verdict is not None and verdict.good
    return CommandResult(good, step_data(figures) | {"good": good}, blocks, page)
