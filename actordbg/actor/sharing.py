"""Configurations that can share a loaded Actor, one after another. Pure: no torch, so the desk can plan with it.

A loaded Actor can change these settings, and a cell after the change gives, bit for bit, what a fresh process gives:

| Setting | How |
|---|---|
| packing, temperature | attributes of the Actor, set before each call anyway |
| attn | transformers' `set_attn_implementation`; what the model then says is checked |
| compile, compile_backend | the module's plain call is restored, torch's compiler is reset, and the module is recompiled |
| seed, timeout_s, vary, keep_tensors, keep_gradients, memory_snapshot, laws, accept | settings of the run, not of the Actor |
| backward | on the plain backend only: DeepSpeed's engine is built with an optimizer or without |

Everything else is what was loaded: the model, its layers, its dtype, the backend and how many processes it spans. A setting that
this module does not know counts as such, so a new one is never shared by mistake.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict

from actordbg.config.choices import Choices
from actordbg.config.replay_config import LAUNCHERS, SETTINGS, ReplayConfig

CHANGEABLE = tuple(name for name, setting in SETTINGS.items() if setting.switchable)
"""The settings that a loaded Actor can be switched to."""
_DEEPCOMPILED = ("attn", "compile", "compile_backend")
"""What DeepCompile has put into the engine's graph and hooks: it stays there."""
LEAST_TIMEOUT_S = 1800.0
"""DeepSpeed's collectives get twice an input's timeout, at least an hour, when their process group is made."""


def host_key(config: ReplayConfig, choices: Choices) -> Hashable:
    """Configurations with equal keys can share one loaded Actor, in any order. `choices`: what `config` resolves to here.

    A truth is loaded separately: it changes how the Actor is called. The key is hashable and has no other meaning.
    """
    fixed = {name: value for name, value in asdict(config).items() if name not in CHANGEABLE}
    fixed |= {"model": choices.model, "dtype": choices.dtype, "num_layers": choices.num_layers, "through": choices.through}
    fixed["backward"] = None if config.backend == "plain" else choices.backward
    if config.deepcompile:
        fixed |= {name: getattr(config, name) for name in _DEEPCOMPILED} | {"attn": choices.attn}
    if config.ring > 1:  # a ring puts its own attention function in when it is built
        fixed["attn"] = choices.attn
    if config.backend != "plain":
        fixed["timeout_s"] = max(config.timeout_s, LEAST_TIMEOUT_S)
    return tuple(sorted(fixed.items()))


def reopens(config: ReplayConfig) -> Hashable | None:
    """Return the kind of process that this Actor needs; a process can replace its Actor by another of the same kind.

    A kind is a launcher and a number of processes that compute together, with their process group, which stays. So do imports,
    which are most of the start time of a small model. None if compiled: torch.compile leaves too much behind.
    """
    if config.compiles:
        return None
    launcher = LAUNCHERS[config.backend]
    return launcher, config.nproc if launcher != "python" else 1, config.dist_backend
