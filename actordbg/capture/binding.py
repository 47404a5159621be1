"""From a call of `Actor.forward` to what can be stored of it: tensors, plain arguments, process groups, and the rest.

OpenRLHF's `forward` has had 8 signatures and forks have more, so nothing is known here about any of them: names come from
`inspect.signature`, read once per class. An argument given by position or by name, or left to its default, ends up under
the same name. What each value becomes:

| value | goes to |
|---|---|
| a dense tensor of a plain dtype | `tensors`, by name (so do the tensors in `**mm_inputs`) |
| None, bool, int, finite float, str, and lists, tuples or dicts of them | `arguments` |
| a ProcessGroup (or None for a parameter called `..._group`) | `groups`: its size and this process's rank in it |
| anything else | `extra`: its name and its *type*, never its text; the dump is not replayable |

A default that cannot be stored (a fork has typing objects as defaults) is left out: a replay leaves that argument to its
default as well.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from actordbg.payload import storable

MAX_STRING = 4096
MAX_ITEMS = 1_000_000
"""Longest string, and most items of a (nested) list or dict, that count as a plain argument."""

_UNSTORABLE = object()
_PLAIN_DTYPES: set[torch.dtype] = set()
"""Dtypes that `storable` has accepted: asked once, since its answer takes microseconds."""


@dataclass(slots=True)
class Bound:
    """One call's arguments, sorted by what can be stored of them. Tensors are the caller's own, not copies."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, int] | None] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    first: str = "sequences"

    def shape(self) -> tuple[int, int]:
        """(B, S) of the call: of `sequences`, or of the first parameter where a fork calls it otherwise; (0, 0) without."""
        ids = self.tensors.get("sequences", self.tensors.get(self.first))
        if ids is None or ids.dim() == 0:
            return 0, 0
        return (1, ids.shape[0]) if ids.dim() == 1 else (ids.shape[0], ids.shape[1])


class Binder:
    """Binds the arguments of calls of one function whose first parameter is `self`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = tuple(p.name for p in parameters if p.kind in positional)
        self._rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        self._first = self.names[0] if self.names else "sequences"
        self._defaults = Bound()
        for parameter in parameters:
            if parameter.default is not inspect.Parameter.empty:
                _sort_into(self._defaults, parameter.name, parameter.default)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Sort the arguments of one call (`args` without `self`)."""
        bound = Bound({}, self._defaults.arguments.copy(), self._defaults.groups.copy(), {}, self._first)
        for name, value in zip(self.names, args, strict=False):
            _sort_into(bound, name, value)
        for name, value in kwargs.items():
            _sort_into(bound, name, value)
        if len(args) > len(self.names):
            bound.extra[self._rest or "args"] = f"{len(args) - len(self.names)} positional arguments without a name"
        return bound


def _sort_into(bound: Bound, name: str, value: Any) -> None:
    kind = type(value)
    if kind is torch.Tensor and value.dtype in _PLAIN_DTYPES and value.layout is torch.strided and not value.is_meta:
        bound.tensors[name] = value
        bound.arguments.pop(name, None)
    elif kind is bool:
        bound.arguments[name] = value
    else:
        _sort_rest_into(bound, name, value)


def _sort_rest_into(bound: Bound, name: str, value: Any) -> None:
    """What is not one of the two most frequent kinds."""
    if isinstance(value, torch.Tensor):
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
    plain = _plain(value, [MAX_ITEMS])
    if plain is not _UNSTORABLE:
        bound.arguments[name] = plain
        return
    bound.arguments.pop(name, None)
    group = _process_group(value)
    if group is not None:
        bound.groups[name] = group
    else:
        bound.groups.pop(name, None)
        bound.extra[name] = f"an argument of type {type(value).__module__}.{type(value).__qualname__}"


def _unstorable_tensor(tensor: torch.Tensor) -> str:
    """Why this tensor cannot be stored; "" if it can."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"a tensor subclass {type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_meta or not storable(tensor) or tensor.is_complex():
        return f"a tensor of dtype {tensor.dtype}, layout {tensor.layout} on {tensor.device.type}"
    _PLAIN_DTYPES.add(tensor.dtype)
    return ""


def _plain(value: Any, budget: list[int]) -> Any:
    """`value` as plain JSON data, or _UNSTORABLE. `budget` holds how many items may still come."""
    budget[0] -= 1
    if value is None or isinstance(value, bool):
        return value
    if budget[0] < 0:
        return _UNSTORABLE
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _UNSTORABLE
    if isinstance(value, str):
        return str(value) if len(value) <= MAX_STRING else _UNSTORABLE
    if isinstance(value, (list, tuple)):
        items = [_plain(item, budget) for item in value]
        return _UNSTORABLE if any(item is _UNSTORABLE for item in items) else items
    if isinstance(value, dict) and all(type(key) is str for key in value):
        pairs = {key: _plain(item, budget) for key, item in value.items()}
        return _UNSTORABLE if any(item is _UNSTORABLE for item in pairs.values()) else pairs
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _plain(value.item(), budget)
    return _UNSTORABLE


def _process_group(value: Any) -> dict[str, int] | None:
    """Size and own rank of a torch.distributed process group; None for anything else."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not isinstance(value, dist.ProcessGroup):
        return None
    return {"size": int(value.size()), "rank": int(value.rank())}
