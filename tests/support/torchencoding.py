"""How dumps were encoded with torch's operators, before numpy's views did it: what `formats.encoding` has to agree with, to the byte."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from actordbg.base.fault import Unsupported
from actordbg.formats.dump_record import (
    SAFETENSORS_DTYPES,
    UINT24,
    DumpRecord,
    TensorSpec,
    dtype_name,
    label,
    stored_layout,
)

DTYPES = {name: getattr(torch, name) for name, _ in SAFETENSORS_DTYPES.values()}
"""The torch dtypes that can be stored, by name."""
_CODES = {DTYPES[name]: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
