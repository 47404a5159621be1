"""Measure on purpose: make inputs of chosen lengths, and replay them as an earlier replay ran.

The inputs are unpadded, so every position is computed, packed or not. They form a run of their own, in order of length, so the
first one that runs out of memory is the shortest that does. Each lane gets each length twice, because the first input of all
is warm-up.

Example::

    replay_id = measure(store, settled(config, resolved), [512, 1024, 2048], batch_size=2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from actordbg.actor.known_failures import check_config, refuse_hits
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.config.as_ran import as_ran
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.live_catalog import LiveCatalog
from actordbg.replay.plan import Plan, make_plan, new_replay_id
from actordbg.replay.supervise import Progress, run_replay
from actordbg.store.layout import Store

INPUTS = 2
"""How many inputs of each length every lane gets."""


def settled(config: ReplayConfig, resolved: dict[str, Any]) -> ReplayConfig:
    """The configuration with what was left to the recorded call filled in as it ran: made-up inputs record nothing."""
    ran = as_ran(config, resolved)
    open_settings = {name: value for name, value in ran.items() if getattr(config, name) is None and value is not None}
    return replace(config, **open_settings, keep_tensors=False, keep_gradients=False)


def measure(
    store: Store,
    config: ReplayConfig,
    lengths: Sequence[int],
    batch_size: int,
    *,
    command: str = "",
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_event: Callable[[Progress], None] = lambda event: None,
) -> str:
    """Make the inputs, replay them, and return the replay's id. Failures and running out of memory are results, too.

    Raises UsageError for impossible lengths, Unsupported for a configuration that cannot run here, and LaunchProblem or the
    worker's own error if the actor cannot be built.
    """
    from actordbg.dumps.create import create_dumps

    refuse_hits(check_config(config))
    run = f"curve-{new_replay_id()}"
    for length in sorted(set(lengths)):
        create_dumps(store, INPUTS * config.lanes, batch_size, length, padding="none", run=run)
    where = f"run='{run}'"
    rows = select_dumps(open_fresh(store, where), where, order="length")
    plan = make_plan(rows, config, order="length", where=where, command=command, versions=installed_versions())
    on_plan(plan)
    catalog = LiveCatalog(store)
    try:
        run_replay(store, plan.spec, on_event, on_tick=catalog.tick)
    finally:
        catalog.flush()
    return plan.spec.replay_id
