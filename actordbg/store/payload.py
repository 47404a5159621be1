"""Tensors of one dump, out of its file or a pack, exactly as they were captured. This half runs in workers and at the desk.

`actordbg.formats.encoding` says in which narrower forms tensors are stored. Reading gives back the logical dtype, shape and
strides (a slice of a larger tensor replays as a tensor with the same strides). Needs torch.

Example::

    dump = load(path)
    dump.tensors["sequences"]            # int64 [B, S], as the actor received it
    record, blob = encode(record, dump.tensors)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from actordbg.formats import dumpfile
from actordbg.formats.dump_record import OUTPUT_PREFIX, RNG_PREFIX, SIZES, DumpRecord, contiguous_strides
from actordbg.formats.encoding import BITS, PlainTensor, of_torch
from actordbg.formats.nested_values import CONTEXT
from actordbg.store.plain_tensors import encode_plain, load_plain, widen_plain

DTYPES = {name: getattr(torch, name) for name in SIZES}
"""The torch dtypes that can be stored, by name."""


@dataclass(frozen=True)
class Dump:
    """A dump in memory: its record, and its tensors by argument name as they were captured (CPU)."""

    record: DumpRecord
    tensors: dict[str, torch.Tensor]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call received."""
        return {name: t for name, t in self.tensors.items() if not name.startswith((OUTPUT_PREFIX, RNG_PREFIX, CONTEXT))}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call returned, where they were recorded, without their prefix."""
        return self._named(OUTPUT_PREFIX)

    @property
    def rng(self) -> dict[str, torch.Tensor]:
        """Generator states (uint8) before the call by device ("cpu", "cuda:0"), where they were recorded."""
        return self._named(RNG_PREFIX)

    def _named(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def encode(
    record: DumpRecord,
    tensors: dict[str, torch.Tensor],
    level: int = 3,
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[DumpRecord, bytes]:
    """The finished record (tensor specs and hash filled in) and the bytes of its dump file. Tensors must be on the CPU.

    `strides` gives, by name, the strides that a tensor had where `tensors` holds a compact copy of it.
    """
    known = strides or {}
    return encode_plain(record, {name: of_torch(tensor, known.get(name)) for name, tensor in tensors.items()}, level)


def load(path: str | os.PathLike[str], max_bytes: int = dumpfile.DEFAULT_CAP) -> Dump:
    """Read, check and widen one dump, from its file or out of a pack (`actordbg.store.places`).

    Raises CorruptDump, NewerFormat or StoreProblem; never returns wrong tensors.
    """
    return _dump(*load_plain(path, max_bytes))


def widen(record: DumpRecord, payload: bytes, name: str = "dump", max_bytes: int = dumpfile.DEFAULT_CAP) -> Dump:
    """Tensors as captured from a record and its checked safetensors payload."""
    return _dump(record, widen_plain(record, payload, name, max_bytes))


def _dump(record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> Dump:
    return Dump(record, {name: _tensor(plain) for name, plain in tensors.items()})


def _tensor(plain: PlainTensor) -> torch.Tensor:
    """A tensor over memory that numpy widened: what torch does for one small tensor takes several times as long."""
    shape, strides, dtype = plain.values.shape, plain.strides, DTYPES[plain.dtype]
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    tensor = torch.from_numpy(plain.values)
    if plain.dtype in BITS:
        tensor = tensor.view(dtype)
    return tensor if strides == contiguous_strides(shape) else _with_strides(tensor, strides)


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values in a tensor with the captured strides; a stride of 0 (expanded) is expanded again."""
    base, shape = tensor, list(tensor.shape)
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            base, shape[dim] = base.narrow(dim, 0, 1), 1
    laid_out = torch.empty_strided(shape, strides, dtype=tensor.dtype)
    return laid_out.copy_(base).expand(tensor.shape)
