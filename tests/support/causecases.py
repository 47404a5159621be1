"""Causes planted in small random models, and what the bank names from log-probs alone. Run in a process of its own.

python causecases.py SCENARIO MODEL_CACHE
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from actorcases import main
from lawcases import dump_of
from locatecases import attribute, four_layers

from actordbg.actor.session import open_actor
from actordbg.causes import bank, fit, gather
from actordbg.config.replay_config import ReplayConfig

ROWS, LENGTH, ACTIONS = 6, 96, 80


def sampled(model: Any, seed: int, **sampler: Any) -> Any:
    """A call whose answers the model sampled itself, padded on both sides."""
    dump = dump_of("both", rows=ROWS, length=LENGTH, actions=ACTIONS, seed=seed)
    torch.manual_seed(seed)
    ids, attention = dump.tensors["sequences"], dump.tensors["attention_mask"]
    for row in range(ROWS):
        real = attention[row].bool()
        start = ids[row, real][:16][None]
        made = model.generate(
            start,
            do_sample=True,
            max_new_tokens=int(real.sum()) - 16,
            eos_token_id=None,
            pad_token_id=0,
            **({"top_k": 0} | sampler),
        )
        ids[row, real] = made[0]
    return dump


@dataclass
class Family:
    """A family's model: its truth under all causes, healthy computations, and log-probs under what is planted."""

    model: str
    dtype: str
    cache: Path
    temperature: float = 1.0

    def ran(self, dumps: list[Any], plant: Any = None, **settings: Any) -> list[Any]:
        given = {"model": self.model, "dtype": self.dtype, "through": "rows", "temperature": self.temperature}
        config = ReplayConfig(**(given | settings))
        with (
            open_actor(config, model_cache=self.cache) as session,
            (plant or contextlib.nullcontext)(*([session.model] if plant else [])),
        ):
            self.resolved = session.resolved
            return [session.run(dump, backward=False, keep=True) for dump in dumps]


def arrays(outcomes: list[Any]) -> list[Any]:
    return [outcome.log_probs.double().numpy() for outcome in outcomes]
