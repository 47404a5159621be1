"""The replay of a recorded optimizer step, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actordbg.api.desk import Desk, counting
from actordbg.config.replay_config import TINY
from actordbg.document.blocks import Verdict, verdict_in
from actordbg.document.command_result import CommandResult
from actordbg.steps.recorded_step import recorded_step
from actordbg.steps.run_step import run_step
from actordbg.steps.step_verdict import step_blocks, step_data


def replayed_step(desk: Desk, number: int, run: str | None, flags: Mapping[str, Any]) -> CommandResult:
    """Replay a step of a run under these settings.

    Raises what `recorded_step` and `run_step` raise, and Unsupported or EnvironmentProblem for what cannot run here.
    """
    store = desk.store.require_writable()
    step = recorded_step(store, run, number)
    config = desk.asked(flags, step.micro_batches[0].loss.record).config
    inputs = tuple(each.forward for each in step.micro_batches)
    desk.runnable(config, inputs, announce=False)
    with desk.progress("replaying the step", 2 * len(inputs)) as advance:
        figures = run_step(store, step, config, counting(advance))
    blocks = step_blocks(figures)
    if config.model == TINY:
        blocks = [replace(each, toy=True) if isinstance(each, Verdict) else each for each in blocks]
    verdict = verdict_in(blocks)
    good = verdict is not None and verdict.good
    return CommandResult(good, step_data(figures) | {"good": good}, blocks)
