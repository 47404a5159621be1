"""Tensors of one dump, from its file or a pack, exactly as they were captured: torch tensors, or numpy arrays without torch.

`actordbg.formats.encoding` lists the narrower forms in which tensors are stored. Reading restores the logical dtype, shape and
strides (a slice of a larger tensor replays as a tensor with the same strides). numpy has no bfloat16 and no float8, so arrays of
these hold the bits, as unsigned integers of the same width. Only functions that return torch tensors import torch: the desk
imports, creates and exports dumps with numpy alone.

Example::

    dump = load(path)
    dump.tensors["sequences"]                        # int64 [B, S], as the actor received it
    load_plain(path)[1]["sequences"].values          # as a numpy array
    record, blob = encode(record, dump.tensors)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from actordbg.formats import dumpfile
from actordbg.formats.dump_record import OUTPUT_PREFIX, RNG_PREFIX, UINT24, DumpRecord, contiguous_strides
from actordbg.formats.encoding import BITS, ONES, Array, PlainTensor, array_dtype, of_torch, serialize
from actordbg.formats.nested_values import CONTEXT
from actordbg.formats.store_files import AnyPath
from actordbg.store import places

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dump:
    """A dump in memory: its record, and its captured tensors by argument name (CPU)."""

    record: DumpRecord
    tensors: dict[str, torch.Tensor]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call received."""
        return {name: t for name, t in self.tensors.items() if not name.startswith((OUTPUT_PREFIX, RNG_PREFIX, CONTEXT))}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call returned, if they were recorded, by name without the prefix."""
        return self._named(OUTPUT_PREFIX)

    @property
    def rng(self) -> dict[str, torch.Tensor]:
        """RNG states (uint8) before the call by device ("cpu", "cuda:0"), if they were recorded."""
        return self._named(RNG_PREFIX)

    def _named(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name[len(prefix) :]: t for name, t in self.tensors.items() if name.startswith(prefix)}


def encode(record: DumpRecord, tensors: Mapping[str, torch.Tensor], level: int = 3) -> tuple[DumpRecord, bytes]:
    """Return the finished record (tensor specs and hash filled in) and the bytes of its dump file. Tensors must be on the CPU."""
    return encode_plain(record, {name: of_torch(tensor) for name, tensor in tensors.items()}, level)


def encode_plain(record: DumpRecord, tensors: Mapping[str, PlainTensor], level: int = 3) -> tuple[DumpRecord, bytes]:
    """Return the finished record (tensor specs and hash filled in) and the bytes of its dump file."""
    finished, data = serialize(record, tensors)
    return finished, dumpfile.pack(finished, data, level)


def load(path: AnyPath) -> Dump:
    """Read, check and widen one dump, from its file or from a pack (`actordbg.store.places`).

    Raises CorruptDump, NewerFormat or StoreProblem; never returns wrong tensors.
    """
    record, tensors = load_plain(path)
    return Dump(record, {name: as_torch(plain) for name, plain in tensors.items()})


def load_plain(path: AnyPath) -> tuple[DumpRecord, dict[str, PlainTensor]]:
    """Read, check and widen one dump without torch; errors as of `load`."""
    record, data = places.read_payload(path, hash_too=False)
    return record, widen_plain(record, data, str(path))


def widen_plain(record: DumpRecord, data: bytes, name: str = "dump") -> dict[str, PlainTensor]:
    """Return tensors as captured, each contiguous and in separate memory, from a record and its checked safetensors payload."""
    entries = dumpfile.check(record, data, name)
    stored = {key: np.ndarray(entry.shape, array_dtype(entry.dtype), data, entry.offset) for key, entry in entries.items()}
    tensors: dict[str, PlainTensor] = {}
    for name, spec in record.tensors.items():
        kind = array_dtype(spec.dtype)
        if spec.stored == UINT24:
            (low, _), (high, _) = spec.parts(name)
            values = stored[low].astype(kind)
            if values.size:  # the third byte of each value is still 0
                np.ndarray(values.shape, np.uint8, values, 2, values.strides)[...] = stored[high]
        else:
            values = stored[name].astype(kind)
            if spec.stored == "bool" and spec.dtype in BITS:
                values *= kind.type(ONES[spec.dtype])
        tensors[name] = PlainTensor(spec.dtype, values, spec.strides)
    return tensors


def as_torch(plain: PlainTensor) -> torch.Tensor:
    """Return a tensor over memory that numpy widened, with the captured strides; a stride of 0 (expanded) is expanded again."""
    import torch

    shape, strides, dtype = plain.values.shape, plain.strides, getattr(torch, plain.dtype)
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    tensor = torch.from_numpy(plain.values).view(dtype)
    if strides == contiguous_strides(shape):
        return tensor
    base, own = tensor, list(shape)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and size > 1:
            base, own[dim] = base.narrow(dim, 0, 1), 1
    return torch.empty_strided(own, strides, dtype=dtype).copy_(base).expand(shape)


def numbers_of(tensor: PlainTensor) -> Array:
    """Return the values as numbers: bfloat16 as float32, float8 as float16 or float32, all exact."""
    if tensor.dtype == "bfloat16":
        return (tensor.values.astype("<u4") << 16).view("<f4")
    if tensor.dtype == "float8_e5m2":
        return (tensor.values.astype("<u2") << 8).view("<f2")
    if tensor.dtype != "float8_e4m3fn":
        return tensor.values
    bits = np.arange(256)  # the format has no infinity, and one NaN of each sign
    power, digits = (bits >> 3) & 15, bits & 7
    size = np.where(power == 0, digits / 8 * 2.0**-6, (1 + digits / 8) * 2.0 ** (power - 7.0))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)[tensor.values]
