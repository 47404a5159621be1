"""The content of a call's record: its arguments, the actor and the process.

**Arguments** (`Binder`). A trainer's `forward` has had 8 signatures and forks have more, so names come from `inspect.signature`,
read once per class. An argument given by position or by name, or left to its default, ends up under the same name. It becomes:

| value | goes to |
|---|---|
| a dense tensor of a plain dtype | `tensors`, by name (so do the tensors in `**mm_inputs`) |
| None, bool, int, finite float, str, and lists, tuples or dicts of them | `arguments` |
| a ProcessGroup (or None for a parameter called `..._group`) | `groups`: its size and this process's rank in it |
| a context that does nothing (`nullcontext`, an empty `ExitStack`) | `arguments`: its type as `context.NAME`, not replayed |
| anything else | `extra`: its name and *type*, not its text (but of half a surrogate pair); a replay may leave it out |

Plain arguments are copied here, on the training thread: together at most MAX_ARGUMENTS, counted before; others go to `extra`.
A default that cannot be stored is left out: a replay leaves that argument to its default as well.

**Facts** are of the process (rank, host, versions), of the actor (model and configuration) and of the call (grad mode, training,
step, temperature). Rank alone is not an identity (policy and reference both have a rank 0): a record has pid, instance and role.

No environment variable is ever stored except three numbers (RANK, WORLD_SIZE, LOCAL_RANK), where torch.distributed does not
know them. Nothing is imported for a fact. Reading the RNG state changes nothing, and waits for no device.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from actordbg.base.fault import clean_keys, scrub
from actordbg.formats.dump_record import SURROGATE, UNKNOWN_TYPE, dtype_name, storable

Args = tuple[Any, ...]  # a call's arguments by position
Named = dict[str, Any]  # those by name
DISTRIBUTIONS = ["openrlhf", "torch", "transformers", "deepspeed", "flash-attn", "peft"]
_CONFIG_FACTS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "use_cache", "sliding_window",
    "bos_token_id",
)  # fmt: skip
_ROLES = (("reference", "reference"), ("policy", "policy"), ("actormodel", "policy"), ("ema", "ema"), ("critic", "critic"))


def note_trainer(actor_cls: Any) -> None:
    """Name the trainer in the records of an Actor, unless it is the trainer that needs no adapter, or belongs to no package."""
    package, _, inside = actor_cls.__module__.partition(".")
    if inside and package not in DISTRIBUTIONS and not hasattr(actor_cls, "recorded_as"):
        where = f"{actor_cls.__module__}:{actor_cls.__qualname__}.forward"
        actor_cls.recorded_as = {"trainer": package, "adapter": "patch", "function": where}
        DISTRIBUTIONS.extend(importlib.metadata.packages_distributions().get(package, ()))


def rank_of_process() -> dict[str, int | None]:
    """Return rank, world size and local rank: from torch.distributed if initialized, else the launcher's variables, else rank 0.

    `world_size` and `local_rank` are None if unknown.
    """
    numbers = {name: os.environ.get(name.upper(), "") for name in ("rank", "world_size", "local_rank")}
    known = {name: int(text) if text.isdigit() else None for name, text in numbers.items()}
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return known | {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return known | {"rank": known["rank"] or 0}


def versions() -> dict[str, str]:
    """Return the versions of packages that matter to a replay, from metadata; imports nothing. Takes some milliseconds."""
    installed = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


NO_STEP = -1


def facts_of_call(actor: Any) -> tuple[int, bool, str | None, Any, Any, Any]:
    """Read a call's step, gradient mode and autocast, and its raw training, packing and temperature (for `plain_facts`)."""
    state = actor.__dict__  # of a module: its plain attributes, without the detour that getattr makes for missing ones
    engine = state.get("_modules", state).get("model")
    step = engine.__dict__.get("global_steps") if engine is not None else None
    step, autocast = step if type(step) is int else NO_STEP, _autocast_dtype() if _any_autocast() else None
    return step, is_grad_enabled(), autocast, state.get("training"), state.get("packing_samples"), state.get("temperature")


def plain_facts(grad: bool, autocast: str | None, training: Any, packing: Any, temperature: Any) -> dict[str, Any]:
    """Convert these values to the fields of a record."""
    return {
        "training": training if training is True or training is False else None,
        "grad_enabled": grad,
        "autocast_dtype": autocast,
        "packing_samples": packing if packing is True or packing is False else None,
        "temperature": float(temperature) if isinstance(temperature, (int, float)) else None,
    }


def facts_of_actor(actor: Any) -> dict[str, Any]:
    """Read the constant facts of an actor: model name, dtype, and the configuration needed to build a similar one."""
    wrapped = getattr(actor, "model", None)
    model = unwrap(wrapped)
    config: Any = getattr(model, "config", None)
    facts: dict[str, Any] = {"actor_class": type(actor).__name__, **getattr(actor, "recorded_as", {})}
    if wrapped is not None:
        facts["wrapper_class"] = type(wrapped).__name__
        facts["model_class"] = type(model).__name__
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _CONFIG_FACTS:
        value = getattr(text_config, name, None)
        if isinstance(value, (bool, int, str)):
            facts[name] = value
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str):
        facts["attn_implementation"] = attention
    facts["lora"] = hasattr(model, "peft_config")
    facts["gradient_checkpointing"] = bool(getattr(model, "is_gradient_checkpointing", False))
    stage = getattr(wrapped, "zero_optimization_stage", None)
    if callable(stage):
        facts["zero_stage"] = int(stage())
    path = getattr(config, "_name_or_path", None)
    facts = {name: scrub(value) if isinstance(value, str) else value for name, value in facts.items()}
    if isinstance(path, str):  # a path that is not UTF-8 has halves of surrogate pairs, which JSON cannot hold
        path = path.encode("utf-8", "backslashreplace").decode()
    model_name = scrub(path) if isinstance(path, str) and path else None
    parameters = getattr(model, "parameters", None)
    first = next(iter(parameters()), None) if callable(parameters) else None
    return {"model_name": model_name, "model_dtype": dtype_name(first.dtype) if first is not None else None, "actor": facts}


def unwrap(model: Any) -> Any:
    """Return the model inside a DeepSpeed engine, DDP or `torch.compile` (a DeepSpeed engine's `.config` is a plain dict)."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (hasattr(model, "global_steps") or type(model).__name__ == "DistributedDataParallel"):
            inner = getattr(model, "module", None)
        if inner is None:
            return model
        model = inner
    return model


def role_from_ray() -> str | None:
    """Return `policy`, `reference`, `ema` or `critic` by the class of the Ray actor that runs this process; None if unknown."""
    ray = sys.modules.get("ray")
    context = ray.get_runtime_context() if ray is not None and getattr(ray, "is_initialized", bool)() else None
    if context is None or context.get_actor_id() is None:
        return None
    name = getattr(context, "get_task_function_name", context.get_task_name)  # "module.PolicyModelActor.fit"
    actor_class = (name() or "").rpartition(".")[0].rpartition(".")[2].lower()
    return next((role for part, role in _ROLES if actor_class.startswith(part)), None)


# One quick query instead of a query per device; in a torch without it, "perhaps" is safe.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _autocast_dtype() -> str | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return dtype_name(torch.get_autocast_dtype(device))
    return None


def states(device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the current RNG states (uint8, on the CPU) by device: the CPU's and, if this process has initialized CUDA, that of
    `device`, by default the current one.
    """
    by_device = {"cpu": torch.default_generator.get_state()}
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if ready and not torch.cuda.is_current_stream_capturing():
        index = torch.cuda.current_device() if device is None or device.index is None else device.index
        by_device[f"cuda:{index}"] = torch.cuda.default_generators[index].get_state()
    return by_device


def digests(states: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256, in hex, of each state's bytes."""
    return {name: hashlib.sha256(ctypes.string_at(t.data_ptr(), t.numel())).hexdigest() for name, t in states.items()}


MAX_STRING = 4096
"""Longest string, in characters, that counts as a plain argument."""
MAX_ARGUMENTS = 2**20
"""Most bytes of one call's plain arguments: a quarter of the largest record that a reader accepts. Some 15,000 numbers."""
MAX_DEPTH = 32
"""Deepest nesting of lists and dicts: far below the limit of JSON parsers."""
_MAX_BITS = 4096
_MAX_NAMES = 512
_VALUE = 64
"""Bytes charged for any value besides its text: at least its memory here, and at least a number's text in the record."""
_TOO_LARGE = " that is too large to be stored"


class _NotPlain(Exception):
    """A value that is not a plain argument. The message is appended to its type."""


@dataclass(slots=True)
class Bound:
    """The arguments of a call, sorted by how they can be stored. Tensors are the caller's own, not copies.

    `room`: bytes of MAX_ARGUMENTS that plain arguments may still take.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, int] | None] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    first: str = "sequences"
    room: int = MAX_ARGUMENTS

    @property
    def argument_bytes(self) -> int:
        """Return the size of the plain arguments: an upper bound of their JSON in bytes, and roughly their memory."""
        return MAX_ARGUMENTS - self.room

    @property
    def leading(self) -> int:
        """Return the index of the tensor of shape (B, S): `sequences`, or the first parameter if a fork renamed it; else -1."""
        names = list(self.tensors)
        return next((names.index(name) for name in ("sequences", self.first) if name in names), -1)


class Binder:
    """Binds the arguments of calls of a function whose first parameter is `self`. `returns`: names of a loss's results."""

    returns: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = tuple(p.name for p in parameters if p.kind in positional)
        self._rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        self._first = self.names[0] if self.names else "sequences"
        self._known = {p.name for p in parameters}
        self._defaults = Bound()
        for parameter in parameters:
            if parameter.default is not inspect.Parameter.empty:
                sort_into(self._defaults, parameter.name, parameter.default)

    def bind(self, args: Args, kwargs: Named) -> Bound:
        """Sort the arguments of one call (`args` without `self`)."""
        known = self._defaults
        bound = Bound({}, known.arguments.copy(), known.groups.copy(), {}, self._first, known.room)
        if not self._known.issuperset(kwargs):  # names chosen by the caller, for a `**kwargs`
            kwargs = clean_keys(kwargs)
            self._known.update(kwargs if len(self._known) < _MAX_NAMES else ())
        for name, value in (*zip(self.names, args, strict=False), *kwargs.items()):
            sort_into(bound, name, value)
        if len(args) > len(self.names):
            bound.extra[self._rest or "args"] = f"{len(args) - len(self.names)} positional arguments without a name"
        return bound


def sort_into(bound: Bound, name: str, value: Any) -> None:
    """Sort one argument into its place; see the table above."""
    if isinstance(value, Tensor):
        bound.arguments.pop(name, None)
        reason = _unstorable_tensor(value)
        if reason:
            bound.extra[name] = reason
        else:
            bound.tensors[name] = value
        return
    if value is None and name.endswith("_group"):
        bound.groups[name] = None
        return
    room = bound.room
    try:
        bound.arguments[name] = _plain(value, bound)
        return
    except _NotPlain as error:
        bound.room, why = room, str(error) if isinstance(value, str) or str(error) == _TOO_LARGE else ""
    bound.arguments.pop(name, None)
    bound.groups.pop(name, None)
    idle = type(value) in (ExitStack, AsyncExitStack) and not value.__dict__.get("_exit_callbacks")
    if idle or (type(value) is nullcontext and value.enter_result is None):  # as trainers pass where nothing is to be entered
        bound.arguments[f"context.{name}"] = f"{type(value).__name__}, which does nothing"
        return
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and isinstance(value, dist.ProcessGroup):
        bound.groups[name] = {"size": int(value.size()), "rank": int(value.rank())}
    else:
        what = "a value of type" if why else UNKNOWN_TYPE  # what is plain, and was not stored, matters to a replay
        bound.extra[name] = scrub(f"{what} {type(value).__module__}.{type(value).__qualname__}{why}")


def _unstorable_tensor(tensor: Tensor) -> str:
    """Return why this tensor cannot be stored; "" if it can."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_meta or not storable(tensor.layout, tensor.dtype) or tensor.is_complex():
        return f"a tensor of dtype {tensor.dtype}, layout {tensor.layout} on {tensor.device.type}"
    return ""


def _plain(value: Any, bound: Bound, depth: int = 0) -> Any:
    """Return `value` as plain JSON data and charge its bytes to `bound.room`. _NotPlain if it is not plain or too large."""
    _take(bound, _VALUE if depth <= MAX_DEPTH else MAX_ARGUMENTS)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        bits = value.bit_length()
        _take(bound, bits // 3 if bits <= _MAX_BITS else MAX_ARGUMENTS)
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str):
        return scrub(_text(value, bound))
    if isinstance(value, (list, tuple, dict)) and len(value) * _VALUE > bound.room:  # before looking at any item
        raise _NotPlain(_TOO_LARGE)
    if isinstance(value, (list, tuple)):
        return [_plain(item, bound, depth + 1) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return clean_keys({_text(key, bound, _VALUE): _plain(item, bound, depth + 1) for key, item in value.items()})
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _plain(value.item(), bound, depth + 1)
    raise _NotPlain


def _text(text: str, bound: Bound, more: int = 0) -> str:
    """Return a string that can be stored, charging the bytes of its JSON (up to 12 per character) and `more`."""
    _take(bound, more + (len(json.dumps(text)) if len(text) <= MAX_STRING else MAX_ARGUMENTS))
    if SURROGATE.search(text):
        raise _NotPlain(f" with half of a surrogate pair: {scrub(text)!a}")
    return str(text)


def _take(bound: Bound, nbytes: int) -> None:
    bound.room -= nbytes
    if bound.room < 0:
        raise _NotPlain(_TOO_LARGE)
