"""torch.compile as a replay needs it: dynamic shapes, no silent fallback to eager, and a count of what was compiled.

Every captured input has another length. Compiled with static shapes, each is compiled anew (24 shapes of real dumps: 24
graphs, 270 s), and after `recompile_limit` (8) of them torch runs the rest *eagerly, without a word*: a table of timings
would then compare nothing. So the model is compiled with `dynamic=True`: one graph for all lengths, 34 to 38 s. The
limit is raised, and passing it is an error. Each result says how many graphs and graph breaks it caused.

`actor.model` is compiled, not the Actor: the Actor's packing reads lengths with `.item()`, which would break the graph.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

GRAPH_LIMIT = 512


def prepare(cache: Path) -> None:
    """Set up torch.compile for this process; compiled kernels are kept in `cache` unless TORCHINDUCTOR_CACHE_DIR is set."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
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
