"""Flatten nested values to dotted names, and back: dicts, lists, dataclasses, TensorDicts, nested tensors and other arguments.

    flat({"images": [a, b], "loss": ppo_loss})    {"images.0": a, "images.1": b, "loss": "function losses.ppo_loss"}

| Value | Kept as |
|---|---|
| tensor, number, text, None | itself |
| dict, TensorDict, DataProto, dataclass | its parts, by name; for a DataProto tensors and all other parts |
| list, tuple (or an object with a list `tensors`) | its parts, by number |
| nested tensor | jagged: `.values` and `.offsets` (`.lengths`, if it has holes); older layout: its rows |
| DTensor | this process's shard, and `.placement`: how it was sharded |
| function, class, module | its qualified name |
| anything else, or too deep | "left out: " and its type |

Nothing is copied and no tensor's values are read. Standard library only: torch's types are recognized by their attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

CONTEXT = "context."
"""Name prefix of parts that belong to a call but are not needed to repeat it."""
RUN_ON = "positions never restart: packed rows would be one row"
ROWS_LEAK, FLASH_ROWS_LEAK = f"{CONTEXT}rows_leak", f"{CONTEXT}flash_rows_leak"
"""Arguments of a record: the packed rows of its call see each other; with flash attention they do."""
LEFT_OUT = "left out: "
MOST_PARTS, MOST_DEPTH = 256, 6


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return all parts of a value by dotted name, at most MOST_PARTS; then `name` itself says that there are more."""
    parts: dict[str, Any] = {}
    for at, part in _parts(value, name, 0):
        if len(parts) >= MOST_PARTS:
            parts[name] = f"{LEFT_OUT}more than {MOST_PARTS} parts"
            break
        parts[at] = part
    return parts


def nested(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild dicts and lists from dotted names; consecutive numbers make a list."""
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        *way, last = name.split(".")
        holder = tree
        for step in way:
            holder = holder.setdefault(step, {})
        holder[last] = part
    return {name: _listed(branch) for name, branch in tree.items()}


def named(value: Any) -> str:
    """Describe a value that is not kept: the qualified name of code, the type of anything else."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        kind = "class" if isinstance(value, type) else "function"
        return f"{kind} {getattr(value, '__module__', '?')}.{value.__qualname__}"
    if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        return f"partial of {named(value.func)}"
    if hasattr(value, "named_parameters"):
        return f"module {type(value).__module__}.{type(value).__qualname__}"
    return f"{LEFT_OUT}{type(value).__module__}.{type(value).__qualname__}"


def _parts(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    inside = _inside(value)
    if inside is None or depth >= MOST_DEPTH:
        plain = inside is None and (value is None or isinstance(value, (bool, int, float, str)) or _is_tensor(value))
        yield name, value if plain else named(value)
        return
    for key, part in inside.items():
        yield from _parts(part, f"{name}.{key}" if name else str(key), depth + 1)


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a nested value; None for a leaf."""
    if _is_tensor(value):
        return _inside_tensor(value)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)) and not (len(value) > 16 and isinstance(value[0], (bool, int, float, str))):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "batch") and hasattr(value, "non_tensor_batch"):
        return {"batch": value.batch, "non_tensor_batch": value.non_tensor_batch, "meta_info": getattr(value, "meta_info", None)}
    if hasattr(value, "batch_size") and hasattr(value, "items") and hasattr(value, "keys"):  # TensorDict
        return dict(value.items())
    if hasattr(value, "tensors") and isinstance(value.tensors, (list, tuple)):
        return dict(enumerate(value.tensors))
    data = getattr(value, "data", value)
    return {"data": data} if type(value).__name__ in ("NonTensorData", "NonTensorStack") and data is not value else None


def _inside_tensor(value: Any) -> Mapping[Any, Any] | None:
    if getattr(value, "is_nested", False):
        if str(value.layout) != "torch.jagged":
            return dict(enumerate(value.unbind()))
        lengths = value.lengths()
        return {"values": value.values(), "offsets": value.offsets()} | ({} if lengths is None else {"lengths": lengths})
    if hasattr(value, "to_local") and hasattr(value, "placements"):
        cut = f"{', '.join(map(str, value.placements))} of {list(value.shape)} over {tuple(value.device_mesh.shape)}"
        return {"shard": value.to_local(), "placement": cut}
    return None


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "stride") and hasattr(value, "layout")


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: _listed(part) for key, part in value.items()}
    return list(parts.values()) if [*parts] == [str(number) for number in range(len(parts))] else parts


def with_flash_leak(arguments: dict[str, Any], tensors: Mapping[str, Any], positions: Any) -> dict[str, Any]:
    """Add whether transformers' flash attention ignores the positions of packed rows, [S] or [B, S], if that is known of sdpa.

    It looks at those of one row only, and first at a mask with padding. Rows that are given to it as `cu_seq_lens_q` stay apart.
    """
    if ROWS_LEAK not in arguments:
        return arguments
    mask = tensors.get("attention_mask")
    padded = mask is not None and not mask.values.all()
    several = positions.size > positions.shape[-1] and "cu_seq_lens_q" not in tensors
    return {**arguments, FLASH_ROWS_LEAK: bool(padded or several)}


def note_of_packing(packing: bool, *, masked: bool) -> dict[str, str]:
    """Return what a record notes of a call with positions: {"rows": words}, or {}. packing: they begin anew within a row."""
    if packing and masked:
        return {"rows": "packed with a mask: sdpa and eager attention do not separate such rows"}
    return {} if packing or masked else {"rows": RUN_ON}
