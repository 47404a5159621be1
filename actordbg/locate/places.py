"""Places of a model, where it is held against the truth: which there are, their values, and how far those are apart.

    tape.at(("model.norm", OUT, 0, 0))       # the truth's values there, [T, features]

Values beyond a budget of memory go to temporary files (`Spill`), which have no names, so nothing is left behind, whatever ends
the process. They lie in TMPDIR.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.backends.fsdp2 import decoder_layers
from actordbg.actor.forward_outcome import plain_name
from actordbg.records.locate_record import INTO, OUT

MOST_BYTES = 4 * 2**30
"""Bytes of the truth's values that are held in memory; what is beyond lies in temporary files."""
Key = tuple[str, str, int, int]
"""A place: module, kind, which call of the module in one forward, which of the call's tensors."""


@dataclass
class Tape:
    """What the truth's modules took and gave, and the gradients, by place: a tensor [n, features...] for each row, on the host.

    lengths: the tokens n of each row. strange: modules with tensors whose tokens cannot be told apart. spill: keeps the tensors.
    """

    values: dict[Key, list[Tensor]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    strange: set[str] = field(default_factory=set)
    spill: Spill = field(default_factory=lambda: Spill(MOST_BYTES))
    _whole: dict[Key, Tensor] = field(default_factory=dict)

    def leave_out_positions(self) -> None:
        """Forget which tokens a sparse attention chose: their numbers are those of the row alone, not of a batch or a pack."""
        for key, parts in [*self.values.items()]:
            if parts[0].dtype in (torch.int32, torch.int64) and parts[0].dim() == 2 and all(map(_are_positions, parts)):
                del self.values[key]

    def at(self, key: Key) -> Tensor | None:
        """Return a place's values [T, features...], not to be changed; None unless each row with tokens has them."""
        if key in self._whole:
            return self._whole[key]
        parts = self.values.get(key, [])
        if len(parts) != sum(map(bool, self.lengths)) or len({part.shape[1:] for part in parts}) != 1:
            return None
        whole = torch.cat(parts)
        if not self.spill.spilled:  # asked for again by each forward; the rows are views of it from now on
            self._whole[key], self.values[key] = whole, list(whole.split([len(part) for part in parts]))  # type: ignore[no-untyped-call]
        return whole


def _are_positions(chosen: Tensor) -> bool:
    """Check whether each token of a row chose all tokens up to itself, or as many of them as it may choose.

    Experts pass too if all of them are chosen: then no number reaches their count.
    """
    length, count = chosen.shape
    own = torch.arange(length)
    if not (chosen <= own[:, None]).sum(1).equal((own + 1).clamp(max=count)):
        return False
    return count == length or int(chosen.max()) >= count


@dataclass
class Sums:
    """What one place adds up over `tokens` tokens of `width` elements. errors: squared error of each of the truth's T tokens,
    float64. own: sum of the values times the truth's; truths: sum of the truth's squares.
    """

    errors: Tensor
    width: int
    tokens: int = 0
    own: float = 0.0
    truths: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        """Put together the sums over different tokens."""
        tokens, own, truths = self.tokens + other.tokens, self.own + other.own, self.truths + other.truths
        return Sums(self.errors + other.errors, self.width, tokens, own, truths)

    @classmethod
    def of(cls, have: Tensor, want: Tensor) -> Sums:
        """Compare values that belong to no token, one by one."""
        wide, truth = have.double(), want.double()
        errors = (wide - truth).square().nan_to_num(torch.inf, torch.inf)
        return cls(errors, 1, len(truth), float((wide * truth).sum()), float(truth.square().sum()))


def layer_of(module: str) -> str:
    """Return the name of the decoder layer that a module is in, up to the first number; its own name outside of layers."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


Places = dict[str, tuple[Any, tuple[str, ...]]]
"""Modules by plain name, each with the kinds of places that it has."""


def places_of(model: Any) -> Places:
    """Return the modules that are places.

    Both ends of those without children and of those with parameters of their own (experts), the outputs of decoder layers, and
    what comes into the blocks of a layer (its attention, its MLP), which is one tensor for several modules in them.
    """
    layers = {id(layer) for layer in decoder_layers(model)}
    blocks = {id(block) for layer in model.modules() if id(layer) in layers for block in layer.children()}
    places: Places = {}
    inside = ""
    for name, module in model.named_modules():
        whole = next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
        kinds: tuple[str, ...] = ()
        if whole:
            kinds = (INTO, OUT)
        elif id(module) in layers:
            kinds = (OUT,)
        elif id(module) in blocks:
            kinds = (INTO,)
        in_experts = inside and name.startswith(f"{inside}.")  # called with the tokens of one expert
        inside = name if name.endswith(".experts") and whole and not in_experts else inside
        if name and kinds and not in_experts:
            places[plain_name(name)] = module, kinds
    return places


def in_tokens(values: Tensor, count: int, module: Any) -> tuple[Tensor | None, bool]:
    """View a tensor of `count` tokens as [b, s, ...] with b * s = `count`, and say whether two axes were turned for that.

    Known: [b, s, ...], [count, ...], heads before tokens [b, h, s, d], and, in norms of heads, [count * h, d]. None for others.
    """
    shape = values.shape
    if values.dim() >= 2 and shape[0] * shape[1] == count:
        return values, False
    if values.dim() == 4 and shape[0] * shape[2] == count:
        return values.transpose(1, 2), True
    if values.dim() and shape[0] == count:
        return values[None], False
    if values.dim() == 2 and shape[0] % count == 0 and "Norm" in type(module).__name__:
        return values.reshape(1, count, -1, shape[1]), False
    return None, False


_PART = 2**26
"""Bytes of a file, unless a tensor is larger."""


class Spill:
    """Copies of tensors. memory: most bytes that are held in memory. held, spilled: bytes in memory, and in files."""

    def __init__(self, memory: int) -> None:
        self.memory, self.held, self.spilled = memory, 0, 0
        self._part, self._start = mmap.mmap(-1, 1), 1

    @property
    def nbytes(self) -> int:
        """Size of all copies."""
        return self.held + self.spilled

    def copy(self, values: Tensor) -> Tensor:
        """Copy a tensor to the host. Raises OSError if the disk is full."""
        if not values.nbytes or self.held + values.nbytes <= self.memory:
            self.held += values.nbytes
            return values.detach().to("cpu", copy=True)
        size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._start + size > len(self._part):
            self._map(max(size, _PART))
        copy = torch.frombuffer(self._part, dtype=values.dtype, count=values.numel(), offset=self._start).view(values.shape)
        copy.copy_(values.detach())
        self._part.madvise(mmap.MADV_DONTNEED, self._start, size)  # the pages stay in its file
        self._start += size
        self.spilled += size
        return copy

    @staticmethod
    def room() -> int:
        """Return the bytes that files may take: half of what is free."""
        return shutil.disk_usage(tempfile.gettempdir()).free // 2

    def _map(self, size: int) -> None:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)  # writing to a mapping of a full disk would kill the process
            self._part, self._start = mmap.mmap(file.fileno(), size), 0
