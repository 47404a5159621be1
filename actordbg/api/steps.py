"""The replay of a recorded optimizer step, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actordbg.actor.hub_model import find_model
from actordbg.actor.rules import check_config, find_trainer, refuse_hits
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.document.blocks import verdict_in
from actordbg.document.command_result import CommandResult
from actordbg.judge.recorded_calls import RecordedCall
from actordbg.judge.token_charts import Texts
from actordbg.replay.selection import defaults_of
from actordbg.replay.supervise import Progress
from actordbg.steps.recorded_step import recorded_step
from actordbg.steps.run_step import run_step
from actordbg.steps.step_document import step_blocks, step_data, step_page
from actordbg.store.layout import Store

_OTHERS = 256
"""Most losses of other steps that the page's mismatch by step is drawn from."""


def step_answer(
    store: Store, run: str | None, number: int, config: ReplayConfig, on_event: Callable[[Progress], None],
    on_total: Callable[[int], object] = lambda total: None, texts: Texts | None = None,
) -> CommandResult:  # fmt: skip
    """Replay a step under `config`, and build the answer. on_total: told of the number of replays. texts: decodes tokens.

    Raises what `run_step` and `recorded_step` raise, and Unsupported or EnvironmentProblem for what cannot run here.
    """
    step = recorded_step(store, run, number)
    inputs = tuple(each.forward for each in step.micro_batches)
    defaults = defaults_of(store.root, inputs)
    refuse_hits(check_config(config, defaults=defaults))
    find_trainer(config, defaults)
    find_model(config.model)
    on_total(2 * len(inputs))
    figures = run_step(store, step, config, on_event)
    where = f"point = 'loss' and run = '{step.run}' and step != {number}"
    rows = select_dumps(open_fresh(store), where, order="newest", limit=_OTHERS, losses=True)
    others = [RecordedCall.read(str(store.root / row.path)) for row in rows]
    blocks, page = step_blocks(figures), step_page(figures, others, texts)
    if config.model == TINY:
        blocks, page = ([replace(b, toy=True) if b is verdict_in(each) else b for b in each] for each in (blocks, page))
    verdict = verdict_in(blocks)
    good = verdict is not None and verdict.good
    return CommandResult(good, step_data(figures) | {"good": good}, blocks, page)
