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

import inspect
from collections.abc import Mapping
from typing import Any

from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices
from actordbg.trainers.built_model import change_attention, check, follow_adapters
from actordbg.trainers.openrlhf.late_imports import cannot_import, without_deepspeed


def import_actor() -> type[Any]:
    """OpenRLHF's Actor class; EnvironmentProblem, with the module that is missing, when it cannot be imported."""
    try:
        actor: type[Any] = without_deepspeed("openrlhf.models").Actor
    except ImportError as error:
        raise cannot_import(error) from error
    return actor


def init_parameters(actor_class: type[Any]) -> frozenset[str]:
    """Names of the arguments that this Actor really takes (what `**kwargs` swallows is not among them)."""
    found = inspect.signature(actor_class.__init__).parameters.values()
    return frozenset(p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def loads_checkpoint_dtype(names: frozenset[str], dtype: str) -> bool:
    """Whether this Actor can load `dtype` only by taking the checkpoint's own (bf16=False in old versions)."""
    return "param_dtype" not in names and dtype != "bf16"


def actor_arguments(names: frozenset[str], choices: Choices, ds_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments for an Actor that takes `names`; Unsupported if it has no way to do what `choices` says."""
    arguments: dict[str, Any] = {}
    if "attn_implementation" in names:
        arguments["attn_implementation"] = choices.attn
    elif "use_flash_attention_2" in names:
        arguments["use_flash_attention_2"] = choices.attn == "flash_attention_2"
    else:
        raise _cannot("choose an attention implementation")
    if "param_dtype" in names:
        arguments["param_dtype"] = choices.dtype
    elif "bf16" in names:
        arguments["bf16"] = choices.dtype == "bf16"
    else:
        raise _cannot("choose a dtype")
    if "packing_samples" in names:
        arguments["packing_samples"] = choices.packing
    elif choices.packing:
        raise _cannot("pack samples")
    if "temperature" in names:
        arguments["temperature"] = choices.temperature
    elif choices.temperature != 1.0:
        raise _cannot("divide logits by a temperature")
    if ds_config is not None:
        if "ds_config" not in names:
            raise _cannot("be given a DeepSpeed configuration")
        arguments["ds_config"] = dict(ds_config)
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


def _cannot(what: str) -> Unsupported:
    return Unsupported(
        f"the installed OpenRLHF's Actor cannot {what}",
        hint="replays support OpenRLHF 0.7 to 0.11; captured dumps do not depend on the version that replays them",
    )
