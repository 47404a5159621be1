"""What an adapter needs to call a trainer's own function again, on a model that is alone: in a replay, never in a training.

    def again(model, rows):
        return calling.function("my_trainer:Loop.score")(calling.stand_in(temperature=rows.temperature), model, rows.sequences)

`again(model, rows)` returns what the function returns, with its graph: `Seam.result` reads it as it reads a recorded call's.
"""

from __future__ import annotations

import contextlib
import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from actordbg.base.errors import Unsupported
from actordbg.trainers.find_adapter import cannot_import
from actordbg.trainers.seam import Rows


def function(where: str) -> Any:
    """The function at `module:Class.method`, without decorators around it."""
    module, _, name = where.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise cannot_import(where, error) from error
    return inspect.unwrap(found)


def stand_in(**known: Any) -> Any:
    """In the place of a trainer's instance, for a function that asks it for little: what is `known`, and an idle accelerator."""
    return SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext), **known)


def actions(rows: Rows) -> torch.Tensor:
    """Which of the last next tokens count; refused where rows do not say."""
    if rows.action_mask is None or rows.attention_mask is None:
        raise Unsupported("the trainer's function scores actions of padded rows, and this call has none", hint="--through rows")
    return rows.action_mask


def labelled(rows: Rows) -> dict[str, Any]:
    """The rows as a model with labels takes them: -100 where no token counts; packed rows with their positions."""
    real = torch.ones_like(rows.sequences) if rows.attention_mask is None else rows.attention_mask
    counted = (real[:, 1:] * real[:, :-1]) != 0
    if rows.action_mask is not None:
        counted = torch.zeros_like(counted)
        counted[:, -rows.action_mask.shape[1] :] = rows.action_mask != 0
    labels = torch.full_like(rows.sequences, -100)
    labels[:, 1:] = rows.sequences[:, 1:].where(counted, labels[:, 1:])
    places = {"position_ids": rows.positions} if rows.packed else {"attention_mask": real}
    return {"input_ids": rows.sequences, "labels": labels, **places}
