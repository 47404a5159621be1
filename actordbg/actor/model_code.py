"""Code that ships with a model: it never runs unless `--trust-remote-code` was typed.

A model's `config.json` may name modules that ship with the model (`auto_map`), which transformers imports. OpenRLHF's Actor
always allows that, so the model would decide what runs. Two walls stand before it:

* `require_consent` reads the model's files, and refuses before anything is loaded. The desk calls it, and each worker again.
* `guard` replaces the places in transformers where such code is executed, kernels of the hub included. So what the
  first wall does not see (a file that changed meanwhile, another key, another version) is refused there.

Weights are not code: transformers reads safetensors, and pickles with `weights_only=True`, which workers insist on
(`actordbg.replay.launch`).
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actordbg.actor.hub_model import find_model, looks_like_path, read_json
from actordbg.actor.models import require_tiny
from actordbg.base.errors import UnsafeInput
from actordbg.config import consent
from actordbg.config.choices import is_local
from actordbg.config.replay_config import TINY

HINT = (
    f"read that code; if you trust it, pass {consent.FLAG} on the command line (a file cannot set it). If transformers itself "
    "has the model's class, a copy without auto_map needs no flag"
)
_LOADERS = ("get_class_in_module", "get_class_from_dynamic_module")
"""The functions of transformers that execute a model's modules."""
_MOST_BASES = 8


def require_consent(model: str, models: Path | None = None) -> None:
    """Refuse (UnsafeInput) a model that ships with code, unless consent was given. Loads and runs nothing.

    models: the store's folder of models, where the tiny one may lie already. A hub name's config.json is fetched.
    """
    if model == TINY:
        return require_tiny(models) if models else None
    code = None if consent.is_given(model) else next(own_code(model), None)
    if code is not None:
        raise UnsafeInput(f"loading {model} would run code that ships with it: {code}", hint=HINT)
    return None


def own_code(model: str) -> Iterator[str]:
    """Yield what would run as a model's code, in words: the file that says so, and the class or module that it names."""
    queue, seen = [model], set[str]()
    while queue and len(seen) < _MOST_BASES:
        name = queue.pop()
        seen.add(name)
        where, config = _config(name)
        for value in _mappings(config):
            yield f"{where} says auto_map: {value}"
        if is_local(name):
            folder = Path(name).expanduser()
            if (folder / "custom_generate" / "generate.py").is_file():
                yield f"{folder}/custom_generate/generate.py"
            adapter = read_json(folder / "adapter_config.json")
            if adapter.get("megatron_config"):  # then peft imports a module by its name
                yield f"{folder}/adapter_config.json says megatron_core: {adapter.get('megatron_core')}"
            base = adapter.get("base_model_name_or_path")
            if isinstance(base, str) and base not in seen:
                queue.append(base)


def guard(model: str) -> None:
    """Make transformers refuse, in this process, to execute a model's code unless consent to `model` was given."""
    from transformers import dynamic_module_utils

    places: list[tuple[Any, str]] = [(dynamic_module_utils, name) for name in _LOADERS]
    with contextlib.suppress(ImportError):
        from transformers.integrations import hub_kernels

        places.append((hub_kernels, "get_kernel_hub"))
    for home, name in places:
        if (function := getattr(home, name, None)) is not None:
            guarded = _asking_first(function, model)
            for module in [module for key, module in sys.modules.items() if key.startswith("transformers.")]:
                if vars(module).get(name) is function:  # in its module, and in those that imported it by name already
                    setattr(module, name, guarded)


def _asking_first(function: Any, model: str) -> Callable[..., Any]:
    original = getattr(function, "guards", function)

    def ask_first(*given: Any, **named: Any) -> Any:
        if not consent.is_given(model):
            what = ", ".join(str(argument) for argument in given[:2])
            raise UnsafeInput(f"the model {model} would run its own code: {original.__name__}({what})", hint=HINT)
        return original(*given, **named)

    ask_first.guards = original  # type: ignore[attr-defined]
    return ask_first


def _mappings(config: dict[str, Any]) -> Iterator[str]:
    """Yield every `auto_map`, at any depth, as text."""
    level: list[Any] = [config]
    while level:
        value = level.pop()
        if isinstance(value, dict):
            if value.get("auto_map"):
                yield json.dumps(value["auto_map"])[:300]
            level += value.values()
        elif isinstance(value, list):
            level += value


def _config(model: str) -> tuple[str, dict[str, Any]]:
    """Return where a model's config.json lies, in words, and its content."""
    if is_local(model):
        path = Path(model).expanduser() / "config.json"
        return str(path), read_json(path)
    if model == TINY or looks_like_path(model):
        return model, {}
    return f"config.json of {model} on the hub", find_model(model) or {}
