"""Open the backend that a configuration names, with its model found and, where asked for, compiled.

**torch.compile** as a replay needs it: dynamic shapes, no silent fallback to eager, and a count of what was compiled.

Every captured input has another length. Compiled with static shapes, each is compiled anew (24 shapes of real dumps: 24
graphs, 270 s), and after `recompile_limit` (8) of them torch runs the rest *eagerly, without a word*: a table of timings
would then compare nothing. So the model is compiled with `dynamic=True`: one graph for all lengths, 34 to 38 s. The
limit is raised, and passing it is an error. Each result says how many graphs and graph breaks it caused.

`actor.model` is compiled, not the Actor: the Actor's packing reads lengths with `.item()`, which would break the graph.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from actordbg.actor.actors import actors_of
from actordbg.actor.backends.backend import Backend, Place
from actordbg.actor.backends.training import Training
from actordbg.actor.models import locate
from actordbg.base.owners import own_cache
from actordbg.config.choices import Choices
from actordbg.config.replay_config import COMPILE_BACKENDS, DTYPES, ReplayConfig

CLASSES = {"plain": "PlainBackend", "deepspeed": "DeepspeedBackend", "fsdp2": "Fsdp2Backend"}
"""The class of each backend, in the module of its name beside this one: only the backend that is asked for is imported."""
GRAPH_LIMIT = 512


def open_backend(config: ReplayConfig, choices: Choices, cache: Path, training: Training | None = None) -> Backend:
    """Build the Actor in its backend. `cache` receives the tiny model and truncated ones. `training`: how weights are stepped."""
    dtype = DTYPES[choices.dtype] if actors_of(choices).loads_checkpoint_dtype(choices.dtype) else None
    path = locate(choices.model, cache, num_layers=choices.num_layers, dtype=dtype)
    compiled = config.compile or config.deepcompile
    if compiled:
        _prepare_compiler()
    module = import_module(f"actordbg.actor.backends.{config.backend}")
    opened = getattr(module, CLASSES[config.backend])
    backend: Backend = opened(path, choices, config, Place.from_environment(), training)
    if compiled:
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])
    return backend


def change_compilation(backend: Backend, config: ReplayConfig) -> None:
    """Compile a built backend's model as `config` says, or not at all, as if it never had been compiled otherwise."""
    backend.uncompile()
    torch._dynamo.reset()  # forgets every graph, guard and kernel of this process; kernels on disk are found by their content
    if config.compile:
        _prepare_compiler()
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])


def _prepare_compiler() -> None:
    """Set up torch.compile for this process. Compiled kernels, which later processes load and run, are kept in the user's
    own cache unless TORCHINDUCTOR_CACHE_DIR is set: never in a store, where others may write.
    """
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_cache("inductor"))
    import torch._dynamo.config as config

    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, GRAPH_LIMIT)
    for name in ("accumulated_recompile_limit", "accumulated_cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 8 * GRAPH_LIMIT)
    if hasattr(config, "fail_on_recompile_limit_hit"):
        config.fail_on_recompile_limit_hit = True


@dataclass(frozen=True)
class CompileCount:
    """Graphs compiled and graph breaks met in this process so far; subtract two of them."""

    graphs: int
    breaks: int

    @classmethod
    def now(cls) -> CompileCount:
        """Read torch's own counters."""
        counters = torch._dynamo.utils.counters
        return cls(int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values()))

    def __sub__(self, before: CompileCount) -> CompileCount:
        return CompileCount(self.graphs - before.graphs, self.breaks - before.breaks)
