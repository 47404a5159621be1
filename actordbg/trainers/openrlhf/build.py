"""Build OpenRLHF's Actor, whatever its version calls its arguments, and check that it became what was asked for.

The arguments of `Actor.__init__` changed three times in the versions that a replay supports:

| OpenRLHF | attention | dtype |
|---|---|---|
| 0.7.0 to 0.8.9 | `use_flash_attention_2: bool` (else eager; sdpa is set afterwards) | `bf16: bool` (else the checkpoint's) |
| 0.8.10 to 0.9.1 | `attn_implementation: str` | `bf16: bool` |
| 0.9.2 and later | `attn_implementation: str` | `param_dtype: str` |

Its `**kwargs` swallows whatever it does not know, in silence, so arguments are chosen by its signature, and the result is
compared with the request: another attention or dtype than asked for is an error here, never a footnote.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any

from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.base.imports import deferred, is_there, without_collecting
from actordbg.config.choices import Choices
from actordbg.trainers.built_model import change_attention, check, follow_adapters


def import_actor() -> type[Any]:
    """Import OpenRLHF's Actor class; EnvironmentProblem, with the module that is missing, when that fails.

    Its module may name DeepSpeed and use nothing of it. One that uses it gets it.
    """
    module = "openrlhf.models"
    try:
        with compiling_at_the_first_call(module):
            try:
                with deferred("deepspeed"):
                    models = import_module(module)
            except ImportError:
                models = import_module(module)
        return models.Actor  # type: ignore[no-any-return]
    except ImportError as error:
        raise cannot_import(error) from error


def init_parameters(actor_class: type[Any]) -> frozenset[str]:
    """Names of the arguments that this Actor really takes (what `**kwargs` swallows is not among them)."""
    found = inspect.signature(actor_class.__init__).parameters.values()
    return frozenset(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def loads_checkpoint_dtype(dtype: str) -> bool:
    """Say whether this Actor can load `dtype` only by taking the checkpoint's own (bf16=False in old versions)."""
    return dtype != "bf16" and "param_dtype" not in init_parameters(import_actor())


def actor_arguments(names: frozenset[str], choices: Choices, ds_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments for an Actor that takes `names`; Unsupported if it has no way to do what `choices` says."""
    wanted: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        (
            "choose an attention implementation", True,
            {"attn_implementation": choices.attn, "use_flash_attention_2": choices.attn == "flash_attention_2"},
        ),
        ("choose a dtype", True, {"param_dtype": choices.dtype, "bf16": choices.dtype == "bf16"}),
        ("pack samples", choices.packing, {"packing_samples": choices.packing}),
        ("divide logits by a temperature", choices.temperature != 1.0, {"temperature": choices.temperature}),
        ("be given a DeepSpeed configuration", ds_config is not None, {"ds_config": dict(ds_config)} if ds_config else {}),
    )  # fmt: skip
    arguments: dict[str, Any] = {}
    for what, needed, spellings in wanted:
        if name := next((spelling for spelling in spellings if spelling in names), None):
            arguments[name] = spellings[name]
        elif needed:
            raise Unsupported(
                f"the installed OpenRLHF's Actor cannot {what}",
                hint="replays support OpenRLHF 0.7 to 0.11; captured dumps do not depend on the version that replays them",
            )
    return arguments


def build_actor(path: str, choices: Choices, ds_config: Mapping[str, Any] | None = None) -> Any:
    """An Actor of the model at `path`, on the CPU or wherever its loading puts it, checked against `choices`.

    `ds_config` makes loading partition the weights where its ZeRO stage is 3.
    """
    actor_class = import_actor()
    names = init_parameters(actor_class)
    actor = actor_class(path, **actor_arguments(names, choices, ds_config))
    if "attn_implementation" not in names and choices.attn == "sdpa":
        change_attention(actor.model, choices)
    follow_adapters(actor.model, {})
    check(actor.model, choices)
    return actor


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
