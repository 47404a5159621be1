"""Weights, buffers and AdamW's state of a training as files of torch.distributed.checkpoint, for backends with `AdamSteps`.

Every rank writes and reads its own part; a parameter that `fully_shard` or tensor parallelism cut is a DTensor, and torch knows
which part is whose. Names are the model's. Only tensors are in there. What else a step depends on is set anew by each
micro-batch (seeds, recorded generator states) or is a number of the check (learning rate, clipping).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from actordbg.actor.backends.training import AdamSteps

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, model: Any, adam: AdamSteps) -> None:
    """Write this rank's part. Every rank has to call it."""
    _quietly(lambda: state_dict_saver.save(_tensors(model, adam), storage_writer=FileSystemWriter(folder)))


def load(folder: Path, model: Any, adam: AdamSteps) -> None:
    """Read into what is there; its values before do not matter. Every rank has to call it."""
    _quietly(lambda: state_dict_loader.load(_tensors(model, adam), storage_reader=FileSystemReader(folder)))
    adam.write_back()


def _tensors(model: Any, adam: AdamSteps) -> dict[str, Any]:
    """All tensors by name, not copied. A parameter that was never stepped has the state that its first step makes."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
    for own, stepped in zip(adam.parameters, adam.stepped, strict=True):
        name, state = names[id(own)], adam.optimizer.state[stepped]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state.update({moment: torch.zeros_like(stepped, memory_format=torch.preserve_format) for moment in _MOMENTS})
        found |= {f"{part}.{name}": value for part, value in state.items()}
        found[f"weight.{name}"] = stepped.detach()
    return found


def _quietly(call: Any) -> None:
    """One process alone is meant here, and torch warns of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        call()
