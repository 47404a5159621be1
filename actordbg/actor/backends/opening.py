"""Open the backend that a configuration names, with its model found and, where asked for, compiled."""

from __future__ import annotations

from pathlib import Path

from actordbg.actor import compiling
from actordbg.actor.backends.backend import Backend, Place
from actordbg.actor.models import locate
from actordbg.config.choices import Choices
from actordbg.config.replay_config import COMPILE_BACKENDS, DTYPES, ReplayConfig
from actordbg.host.trainer import TRAINER


def open_backend(config: ReplayConfig, choices: Choices, cache: Path) -> Backend:
    """Build the Actor in its backend. `cache` receives the tiny model, truncated models and compiled kernels."""
    dtype = DTYPES[choices.dtype] if TRAINER.loads_checkpoint_dtype(choices.dtype) else None
    path = locate(choices.model, cache, num_layers=choices.num_layers, dtype=dtype)
    compiled = config.compile or config.deepcompile
    if compiled:
        compiling.prepare(cache)
    backend = _build(path, config, choices)
    if compiled:
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])
    return backend


def change_compilation(backend: Backend, config: ReplayConfig, cache: Path) -> None:
    """Compile a built backend's model as `config` says, or not at all, as if it never had been compiled otherwise."""
    backend.uncompile()
    compiling.forget()
    if config.compile:
        compiling.prepare(cache)
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])


def _build(path: str, config: ReplayConfig, choices: Choices) -> Backend:
    place = Place.from_environment()
    if config.backend == "plain":
        from actordbg.actor.backends.plain import PlainBackend

        return PlainBackend(path, choices, place)
    if config.backend == "fsdp2":
        from actordbg.actor.backends.fsdp2 import Fsdp2Backend

        return Fsdp2Backend(path, choices, config, place)
    from actordbg.actor.backends.deepspeed import DeepspeedBackend

    return DeepspeedBackend(path, choices, config, place)
