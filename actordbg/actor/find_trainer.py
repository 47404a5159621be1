"""Is the trainer whose code a replay runs installed? Asked before any worker is started, and nothing of it is imported.

A trainer that is there and cannot be imported is found by the worker that tries.

Example::

    find_trainer(ReplayConfig(), record)     # EnvironmentProblem where the trainer is not installed
"""

from __future__ import annotations

import sys

from actordbg.base.errors import EnvironmentProblem
from actordbg.base.imports import is_there
from actordbg.config.choices import Recorded, adapter_of, are_elsewhere, through_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.trainers.find_adapter import absent_trainer
from actordbg.trainers.trainer import TRAINER


def find_trainer(config: ReplayConfig, defaults: Recorded | None = None) -> None:
    """EnvironmentProblem where torch, or the trainer whose code a configuration asks for, is not installed."""
    require_torch()
    if problem := missing_trainer(config, defaults):
        raise problem


def missing_trainer(config: ReplayConfig, defaults: Recorded | None = None) -> EnvironmentProblem | None:
    """Returns the same as a value; None where nothing is missing, the truth is asked for, or replays run on other machines."""
    if config.truth or are_elsewhere():
        return None
    adapter = adapter_of(defaults.actor) if defaults else None
    if through_of(config, adapter) == "rows":
        return None
    return TRAINER.absent() if adapter is None else absent_trainer(adapter)


def require_torch() -> None:
    """EnvironmentProblem where nothing can be computed, unless replays run on other machines."""
    missing = [name for name in ("torch", "transformers") if not is_there(name)]
    if missing and not are_elsewhere():
        raise EnvironmentProblem(
            f"nothing can be replayed here: {' and '.join(missing)} not installed in {sys.executable}'s environment",
            hint=f"run it in the training environment; or {sys.executable} -m pip install 'actordbg[replay]'",
        )
