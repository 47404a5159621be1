"""What tensors are, in words: the helpers `shapes` and `stats` of a prompt, and the lines of `replay --verbose`.

torch is not imported here: where there are tensors, it is there already.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

MOST = 60
"""How many tensors are listed at most."""


class Said(str):
    """Text that shows itself without quotes where a prompt prints the value of an expression."""

    def __repr__(self) -> str:
        return str(self)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch, a parameter or a DTensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def form(tensor: Any) -> str:
    """Shape, dtype and device: "[2, 96] int64 cpu"."""
    kind = f" {type(tensor).__name__}" if type(tensor).__name__ == "DTensor" else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}{kind}"


def tensors_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors among these values by name, also in lists, tuples and dicts one level down."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if is_tensor(value):
            found[name] = value
        elif isinstance(value, list | tuple):
            found |= {f"{name}[{place}]": one for place, one in enumerate(value) if is_tensor(one)}
        elif isinstance(value, Mapping):
            found |= {f"{name}[{key!r}]": one for key, one in value.items() if is_tensor(one)}
    return found


def shapes(values: Mapping[str, Any]) -> Said:
    """A line for each tensor among these values."""
    found = tensors_in({name: value for name, value in values.items() if not name.startswith("__")})
    lines = [f"{name:<24} {form(tensor)}" for name, tensor in list(found.items())[:MOST]]
    lines += [f"... and {len(found) - MOST} more"] if len(found) > MOST else []
    return Said("\n".join(lines) or "no tensors here")


def stats(tensor: Any) -> Said:
    """Shape, dtype, device, smallest, largest and mean value, and how many are NaN or infinite.

    Of a DTensor it is this rank's part: the whole would need all ranks, and `gather` does that.
    """
    if not is_tensor(tensor):
        return Said(f"{type(tensor).__name__}, no tensor: {tensor!r:.200}")
    torch = sys.modules["torch"]
    with torch.no_grad():
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        whole = "" if part is tensor else f"this rank's {list(part.shape)} of it: "
        if part.numel() == 0:
            return Said(f"{form(tensor)}  {whole}empty")
        values = part.detach().double() if not part.is_complex() else part.detach().abs().double()
        finite = values[torch.isfinite(values)]
        bad = f"NaN {int(torch.isnan(values).sum())}, infinite {int(torch.isinf(values).sum())}"
        if finite.numel() == 0:
            return Said(f"{form(tensor)}  {whole}nothing finite, {bad}")
        spread = f"min {finite.min():.6g}, max {finite.max():.6g}, mean {finite.mean():.6g}"
    return Said(f"{form(tensor)}  {whole}{spread}, {bad}")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the block random numbers may be drawn: afterwards all generators are where they were."""
    states = [(random.setstate, random.getstate())]
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        states.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        for put, state in states:
            put(state)
