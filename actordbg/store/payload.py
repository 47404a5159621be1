"""Tensors of one dump to safetensors bytes and back, exactly.

Tensors are stored narrow where nothing is lost: integer and float masks that hold only 0 and 1 as bool, token ids below
65,536 as uint16, below 2**24 as their low 16 and high 8 bits apart (`<name>.lo`, `<name>.hi`: 8 % smaller after zstd than
int32, and a generic reader still sees plain integers), other int64 that fit as int32. The record keeps the logical dtype,
shape and strides; reading gives back what was captured, strides included (a slice of a larger tensor replays as a tensor
with the same strides).

Encoding runs in the training process's writer thread; decoding in a replay worker. Needs torch and safetensors.

Example::

    blob = encode(record, {"sequences": ids, "attention_mask": mask})
    dump = load(path)
    dump.tensors["sequences"]            # int64 [B, S], as the actor received it
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actordbg.base.errors import Unsupported
from actordbg.formats import dumpfile
from actordbg.formats import payload_check as contents
from actordbg.formats.dump_record import OUTPUT_PREFIX, RNG_PREFIX, UINT24, DumpRecord, TensorSpec, contiguous_strides
from actordbg.store import places

_HINT = "run `actordbg dump verify` to list every damaged file"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


_CODES = {_DTYPES[name]: code for code, (name, _) in dumpfile.SAFETENSORS_DTYPES.items()}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Dump:
    """A dump in memory: its record, and its tensors by argument name as they were captured (CPU)."""

    record: DumpRecord
    tensors: dict[str, torch.Tensor]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call received."""
        return {name: t for name, t in self.tensors.items() if not name.startswith((OUTPUT_PREFIX, RNG_PREFIX))}

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


def storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype and layout can be stored (dense, and of a dtype that safetensors knows)."""
    return tensor.layout is torch.strided and dtype_name(tensor.dtype) in _DTYPES and not tensor.is_quantized


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int64` as "int64"."""
    return str(dtype).removeprefix("torch.")


def encode(
    record: DumpRecord,
    tensors: dict[str, torch.Tensor],
    level: int = 3,
    strides: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[DumpRecord, bytes]:
    """The finished record (tensor specs and hash filled in) and the bytes of its dump file. Tensors must be on the CPU.

    `strides` gives, by name, the strides that a tensor had where `tensors` holds a compact copy of it.
    """
    finished, data = serialize(record, tensors, strides)
    return finished, dumpfile.pack(finished, data, level)


def serialize(
    record: DumpRecord, tensors: Mapping[str, torch.Tensor], strides: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[DumpRecord, bytes]:
    """The finished record and the safetensors bytes of its payload. As `encode`, before compression."""
    known = strides or {}
    specs: dict[str, TensorSpec] = {}
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored, parts = _narrow(tensor)
        layout = _layout(tuple(tensor.shape), known.get(name, tuple(tensor.stride())))
        specs[name] = spec = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape), layout, stored)
        for (key, _), part in zip(spec.parts(name), parts, strict=True):
            if key in entries:
                raise Unsupported(
                    f"two tensors of one call would both be stored as {key!r:.80}", hint="rename one of them"
                )
            entries[key] = part.contiguous()
    data = _safetensors(entries, {"actordbg": contents.label(record)})
    return record.with_payload(specs, hashlib.sha256(data).hexdigest()), data


def _safetensors(entries: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, as `safetensors.torch.save` makes one, in a fifth of its time: the training process makes every dump.

    8 bytes of length, a JSON header padded with spaces to 8 bytes, then the tensors, those with wider elements first.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, end = [], 0
    for name, tensor in sorted(entries.items(), key=lambda entry: (-entry[1].element_size(), entry[0])):
        nbytes = tensor.nbytes
        code = _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [end, end + nbytes]}
        parts.append(ctypes.string_at(tensor.data_ptr(), nbytes) if nbytes else b"")
        end += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def load(path: str | os.PathLike[str], max_bytes: int = dumpfile.DEFAULT_CAP) -> Dump:
    """Read, check and widen one dump, from its file or out of a pack (`actordbg.store.places`).

    Raises CorruptDump, NewerFormat or StoreProblem; never returns wrong tensors.
    """
    record, payload = places.read_payload(path, max_bytes, hash_too=False)
    return widen(record, payload, str(path), max_bytes)


def widen(record: DumpRecord, payload: bytes, name: str = "dump", max_bytes: int = dumpfile.DEFAULT_CAP) -> Dump:
    """Tensors as captured from a record and its checked safetensors payload."""
    entries = contents.check(record, payload, name, max_bytes)
    stored = bytearray(payload)  # tensors must be able to write to their memory
    return Dump(record, {key: _widen(key, stored, entries, spec) for key, spec in record.tensors.items()})


def _narrow(tensor: torch.Tensor) -> tuple[str, tuple[torch.Tensor, ...]]:
    """The narrowest lossless form: what `TensorSpec.stored` says of it, and its parts (see `TensorSpec.parts`)."""
    if tensor.dtype in _INTEGERS and tensor.numel():
        low, high = (int(value) for value in torch.aminmax(tensor))
        if low >= 0 and high <= 1:
            return "bool", (tensor.bool(),)
        if tensor.dtype in (torch.int64, torch.int32):
            return _narrow_ids(tensor, low, high)
    elif tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1:
        ones = tensor == 1
        if bool((ones | ((tensor == 0) & ~torch.signbit(tensor))).all()):
            return "bool", (ones,)
    return dtype_name(tensor.dtype), (tensor,)


def _narrow_ids(tensor: torch.Tensor, low: int, high: int) -> tuple[str, tuple[torch.Tensor, ...]]:
    if low >= 0 and high < 2**16:
        return "uint16", (tensor.to(torch.uint16),)
    if low >= 0 and high < 2**24:
        return UINT24, ((tensor & 0xFFFF).to(torch.uint16), (tensor >> 16).to(torch.uint8))
    if low >= -(2**31) and high < 2**31:
        return "int32", (tensor.int(),)
    return dtype_name(tensor.dtype), (tensor,)


def _widen(key: str, stored: bytearray, entries: dict[str, dumpfile.Entry], spec: TensorSpec) -> torch.Tensor:
    dtype = _DTYPES[spec.dtype]
    parts = [_view(stored, entries[part]) for part, _ in spec.parts(key)]
    tensor = parts[0].to(dtype)
    if len(parts) == 2:
        tensor.add_(parts[1], alpha=2**16)
    if spec.strides == contiguous_strides(spec.shape):
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype)
    return _with_strides(tensor, spec)


def _view(stored: bytearray, entry: dumpfile.Entry) -> torch.Tensor:
    """A tensor over the bytes of one entry; nothing is copied."""
    dtype, count = _DTYPES[entry.dtype], math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(stored, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def _with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same values in a tensor with the captured strides; a stride of 0 (expanded) is expanded again."""
    base, shape = tensor, list(spec.shape)
    for dim, (size, stride) in enumerate(zip(spec.shape, spec.strides, strict=True)):
        if stride == 0 and size > 1:
            base, shape[dim] = base.narrow(dim, 0, 1), 1
    laid_out = torch.empty_strided(shape, spec.strides, dtype=tensor.dtype)
    return laid_out.copy_(base).expand(spec.shape)


def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides to store: windows that overlap (`unfold`) come back as a contiguous tensor of the same values."""
    return contiguous_strides(shape) if contents.reach_of(shape, strides) is None else strides
