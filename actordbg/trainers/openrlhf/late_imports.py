"""What the trainer imports and a replay may never use is imported where it is used: a quarter of a plain replay's start.

| Imported by the trainer for | What that brings | Here |
|---|---|---|
| marking ZeRO 3's leaf modules | DeepSpeed | when a name of DeepSpeed is used, as its strategy does |
| `@torch.compile` on its entropy | torch's inductor | when the entropy is computed |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from actordbg.base.errors import EnvironmentProblem
from actordbg.base.imports import deferred, is_there, without_collecting

_PACKAGE = "openrlhf"


def absent() -> EnvironmentProblem | None:
    """What building an Actor would raise where OpenRLHF is not installed; nothing of it is imported."""
    return None if is_there(_PACKAGE) else cannot_import(f"No module named {_PACKAGE!r}")


def cannot_import(why: object) -> EnvironmentProblem:
    """What to raise where an Actor of OpenRLHF is asked for and it cannot be imported."""
    return EnvironmentProblem(
        f"OpenRLHF cannot be imported here: {why}",
        hint=f"`--through rows` needs no OpenRLHF; `actordbg doctor` says what is missing; pip install {_PACKAGE} --no-deps",
    )


def without_deepspeed(module: str) -> ModuleType:
    """Import this module of the trainer, which may name DeepSpeed and use nothing of it. One that uses it gets it."""
    with compiling_at_the_first_call(module):
        try:
            with deferred("deepspeed"):
                return import_module(module)
        except ImportError:
            return import_module(module)


@contextlib.contextmanager
def compiling_at_the_first_call(module: str) -> Iterator[None]:
    """Around the first import of `module`: functions are handed to `torch.compile` by their first call, with the same options."""
    import torch

    original = torch.compile

    def late(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(late, **options)
        return _late(original, model, options) if isinstance(model, FunctionType) else original(model, **options)

    torch.compile = late
    try:
        with without_collecting(module):
            yield
    finally:
        torch.compile = original


def _late(compile_it: Callable[..., Any], function: FunctionType, options: dict[str, Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_it(function, **options)  # type: ignore[no-any-return]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
