"""Open the backend that a configuration names, with its model found and, where asked for, compiled."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from actordbg.actor import compiling
from actordbg.actor.backends.backend import Backend, Place
from actordbg.actor.models import locate
from actordbg.config.choices import Choices
from actordbg.config.replay_config import COMPILE_BACKENDS, DTYPES, ReplayConfig
from actordbg.host.trainer import TRAINER

CLASSES = {"plain": "PlainBackend", "deepspeed": "DeepspeedBackend", "fsdp2": "Fsdp2Backend"}
"""The class of each backend, in the module of its name beside this one: only the backend that is asked for is imported."""


def open_backend(config: ReplayConfig, choices: Choices, cache: Path) -> Backend:
    """Build the Actor in its backend. `cache` receives the tiny model, truncated models and compiled kernels."""
    dtype = DTYPES[choices.dtype] if TRAINER.loads_checkpoint_dtype(choices.dtype) else None
    path = locate(choices.model, cache, num_layers=choices.num_layers, dtype=dtype)
    compiled = config.compile or config.deepcompile
    if compiled:
        compiling.prepare(cache)
    module = import_module(f"actordbg.actor.backends.{config.backend}")
    backend: Backend = getattr(module, CLASSES[config.backend])(path, choices, config, Place.from_environment())
    if compiled:
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])
    return backend


def change_compilation(backend: Backend, config: ReplayConfig, cache: Path) -> None:
    """Compile a built backend's model as `config` says, or not at all, as if it never had been compiled otherwise."""
    backend.uncompile()
    torch._dynamo.reset()  # forgets every graph, guard and kernel of this process; kernels on disk are found by their content
    if config.compile:
        compiling.prepare(cache)
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])
