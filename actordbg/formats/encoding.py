"""Turns a call's tensors and its record into the bytes of a dump file. This half runs in the training process.

Tensors are stored narrow where nothing is lost: integer and float masks that hold only 0 and 1 as bool, token ids below
65,536 as uint16, below 2**24 as their low 16 and high 8 bits apart (`<name>.lo`, `<name>.hi`: 8 % smaller after zstd than
int32, and a generic reader still sees plain integers), other int64 that fit as int32. The record keeps the logical dtype,
shape and strides, so that `actordbg.store.payload` gives back exactly what was captured.

Example::

    record, data = serialize(record, {"sequences": ids, "attention_mask": mask})
    blob = pack(record, data)
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import zstandard

from actordbg.base.fault import Unsupported
from actordbg.formats.dump_record import (
    SAFETENSORS_DTYPES,
    UINT24,
    DumpRecord,
    TensorSpec,
    checked_line,
    framed,
    label,
    stored_layout,
)

DTYPES = {name: getattr(torch, name) for name, _ in SAFETENSORS_DTYPES.values()}
"""The torch dtypes that can be stored, by name."""
_CODES = {DTYPES[name]: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype and layout can be stored (dense, and of a dtype that safetensors knows)."""
    return tensor.layout is torch.strided and dtype_name(tensor.dtype) in DTYPES and not tensor.is_quantized


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int64` as "int64"."""
    return str(dtype).removeprefix("torch.")


def pack(record: DumpRecord, payload: bytes, level: int = 3) -> bytes:
    """One dump file's bytes from a finished record and its safetensors payload, compressed at zstd `level`.

    Raises Unsupported for a record or a payload that no reader would accept.
    """
    head = framed(checked_line(record, payload))
    return head + zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True).compress(payload)


def serialize(
    record: DumpRecord, tensors: Mapping[str, torch.Tensor], strides: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[DumpRecord, bytes]:
    """The finished record and the safetensors bytes of its payload, with tensor specs and hash.

    Tensors must be on the CPU. `strides` gives, by name, those that a tensor had where `tensors` holds a compact copy of it.
    """
    known = strides or {}
    specs: dict[str, TensorSpec] = {}
    entries: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored, parts = _narrow(tensor)
        layout = stored_layout(tuple(tensor.shape), known.get(name, tuple(tensor.stride())))
        specs[name] = spec = TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape), layout, stored)
        for (key, _), part in zip(spec.parts(name), parts, strict=True):
            if key in entries:
                raise Unsupported(f"two tensors of one call would both be stored as {key!r:.80}", hint="rename one of them")
            entries[key] = part.contiguous()
    data = _safetensors(entries, {"actordbg": label(record)})
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
