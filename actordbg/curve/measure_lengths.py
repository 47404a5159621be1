"""Measure on purpose: make inputs of chosen lengths, and replay them as an earlier replay ran.

The inputs are unpadded, so every position is computed, packed or not. They form a run of their own, in order of length, so the
first one that runs out of memory is the shortest that does. Each lane gets each length twice, because the first input of all
is warm-up.

Example::

    run_replay(store, plan_lengths(store, settled(config, resolved), [512, 1024, 2048], batch_size=2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actordbg.actor.find_trainer import find_trainer
from actordbg.actor.hub_model import find_model
from actordbg.actor.known_failures import check_config, refuse_hits
from actordbg.base.ids import new_replay_id
from actordbg.catalog.query import open_fresh, select_dumps
from actordbg.config.as_ran import as_ran
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.replay_record import ReplaySpec
from actordbg.replay.plan import make_plan
from actordbg.store.layout import Store

INPUTS = 2
"""How many inputs of each length every lane gets."""


def settled(config: ReplayConfig, resolved: dict[str, Any]) -> ReplayConfig:
    """The configuration with what was left to the recorded call filled in as it ran: made-up inputs record nothing."""
    ran = as_ran(config, resolved)
    open_settings = {name: value for name, value in ran.items() if getattr(config, name) is None and value is not None}
    return replace(config, **open_settings, keep_tensors=False, keep_gradients=False, memory_snapshot=False)


def plan_lengths(store: Store, config: ReplayConfig, lengths: Sequence[int], batch_size: int, *, command: str = "") -> ReplaySpec:
    """Make the inputs, and the replay that measures them. Failures and running out of memory are results, too.

    Raises UsageError for impossible lengths, Unsupported for a configuration that cannot run here, EnvironmentProblem for a
    model that cannot be had, or a trainer that is not installed.
    """
    from actordbg.dumps.create import create_dumps

    refuse_hits(check_config(config))
    find_trainer(config)
    find_model(config.model)
    run = f"curve-{new_replay_id()}"
    for length in sorted(set(lengths)):
        create_dumps(store, INPUTS * config.lanes, batch_size, length, padding="none", run=run)
    where = f"run='{run}'"
    rows = select_dumps(open_fresh(store, where), where, order="length")
    return make_plan(rows, config, order="length", where=where, command=command, versions=installed_versions()).spec
