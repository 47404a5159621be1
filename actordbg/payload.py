"""Tensors of one dump to safetensors bytes and back, exactly.

Tensors are stored narrow where nothing is lost: int64 token ids as int32 when they fit, integer and float masks that
hold only 0 and 1 as bool. The record keeps the logical dtype, shape and strides; reading gives back what was captured,
strides included (a slice of a larger tensor replays as a tensor with the same strides).

Encoding runs in the training process's writer thread; decoding in a replay worker. Needs torch and safetensors.

Example::

    blob = encode(record, {"sequences": ids, "attention_mask": mask})
    dump = load(path)
    dump.tensors["sequences"]            # int64 [B, S], as the actor received it
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch

from actordbg import dumpfile
from actordbg.errors import CorruptDump
from actordbg.record import OUTPUT_PREFIX, DumpRecord, TensorSpec

_HINT = "run `actordbg dump verify` to list every damaged file"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Dump:
    """A dump in memory: its record, and its tensors by argument name as they were captured (CPU)."""

    record: DumpRecord
    tensors: dict[str, torch.Tensor]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call received."""
        return {name: t for name, t in self.tensors.items() if not name.startswith(OUTPUT_PREFIX)}

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors that the call returned, where they were recorded, without their prefix."""
        return {name[len(OUTPUT_PREFIX) :]: t for name, t in self.tensors.items() if name.startswith(OUTPUT_PREFIX)}


def storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype and layout can be stored (dense, and of a dtype that safetensors knows)."""
    return tensor.layout is torch.strided and dtype_name(tensor.dtype) in _DTYPES and not tensor.is_quantized


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int64` as "int64"."""
    return str(dtype).removeprefix("torch.")


def encode(record: DumpRecord, tensors: dict[str, torch.Tensor], level: int = 3) -> tuple[DumpRecord, bytes]:
    """The finished record (tensor specs and hash filled in) and the bytes of its dump file. Tensors must be on the CPU."""
    specs, narrow = {}, {}
    for name, tensor in tensors.items():
        stored = _narrow(tensor)
        specs[name] = TensorSpec(
            dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), dtype_name(stored.dtype)
        )
        narrow[name] = stored.contiguous()
    described = record.with_payload(specs, "")
    payload = safetensors.torch.save(narrow, metadata={"actordbg": described.to_json()})
    finished = record.with_payload(specs, hashlib.sha256(payload).hexdigest())
    return finished, dumpfile.pack(finished, payload, level)


def load(path: str | os.PathLike[str], max_bytes: int = dumpfile.DEFAULT_CAP) -> Dump:
    """Read, check and widen one dump file. Raises CorruptDump, NewerFormat or StoreProblem; never returns wrong tensors."""
    record, payload = dumpfile.read_payload(path, max_bytes)
    return widen(record, payload, str(path), max_bytes)


def widen(record: DumpRecord, payload: bytes, name: str = "dump", max_bytes: int = dumpfile.DEFAULT_CAP) -> Dump:
    """Tensors as captured from a record and its checked safetensors payload."""
    _check_header(payload, name)
    try:
        stored = safetensors.torch.load(payload)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CorruptDump(f"{name}: damaged safetensors payload: {error}", hint=_HINT) from None
    if stored.keys() != record.tensors.keys():
        raise CorruptDump(f"{name}: the payload's tensors are not those of its record", hint=_HINT)
    return Dump(record, {key: _widen(key, stored[key], spec, name, max_bytes) for key, spec in record.tensors.items()})


def _check_header(payload: bytes, name: str) -> None:
    """A safetensors header nested thousands deep would be a stack problem for other readers: refuse what is not plain."""
    size = struct.unpack("<Q", payload[:8])[0] if len(payload) >= 8 else -1
    if not 0 < size <= min(len(payload) - 8, dumpfile.MAX_RECORD):
        raise CorruptDump(f"{name}: the payload is not a safetensors file", hint=_HINT)
    try:
        header = json.loads(payload[8 : 8 + size])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CorruptDump(f"{name}: the payload's safetensors header is damaged", hint=_HINT)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The narrowest lossless form: 0/1 to bool (float masks too, but not -0.0), int64 that fits to int32, else itself."""
    if tensor.dtype is torch.bool or tensor.numel() == 0 or tensor.is_complex():
        return tensor
    if tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        low, high = (int(v) for v in torch.aminmax(tensor))
        if low >= 0 and high <= 1:
            return tensor.bool()
        if tensor.dtype is torch.int64 and low >= -(2**31) and high < 2**31:
            return tensor.int()
        return tensor
    if tensor.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        ones = tensor == 1
        if bool((ones | ((tensor == 0) & ~torch.signbit(tensor))).all()):
            return ones
    return tensor


def _widen(key: str, stored: torch.Tensor, spec: TensorSpec, name: str, max_bytes: int) -> torch.Tensor:
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None or dtype_name(stored.dtype) != spec.stored or tuple(stored.shape) != spec.shape:
        raise CorruptDump(f"{name}: tensor {key!r} is not what the record says", hint=_HINT)
    if tuple(stored.stride()) == spec.strides:
        return stored.to(dtype)
    if stored.numel() == 0:
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
    if extent * dtype.itemsize > max_bytes:
        raise CorruptDump(f"{name}: tensor {key!r} claims strides that span {extent} elements", hint=_HINT)
    return _with_strides(stored.to(dtype), spec)


def _with_strides(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same values in a tensor with the captured strides; a stride of 0 (expanded) is expanded again."""
    base, shape = tensor, list(spec.shape)
    for dim, (size, stride) in enumerate(zip(spec.shape, spec.strides, strict=True)):
        if stride == 0 and size > 1:
            base, shape[dim] = base.narrow(dim, 0, 1), 1
    laid_out = torch.empty_strided(shape, spec.strides, dtype=tensor.dtype)
    if any(n > 1 for n in shape):
        _refuse_overlap(shape, spec)
    return laid_out.copy_(base).expand(spec.shape)


def _refuse_overlap(shape: list[int], spec: TensorSpec) -> None:
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, spec.strides, strict=True) if n > 1):
        if stride <= reach:
            raise CorruptDump(f"a tensor's strides {spec.strides} overlap for shape {spec.shape}", hint=_HINT)
        reach += stride * (size - 1)
