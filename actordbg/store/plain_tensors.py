"""Tensors of one dump without torch: for the desk, which imports, makes and exports dumps also where only numpy is.

The same forms as `formats.encoding` (the trainer's half) and `store.payload` (the workers' half), to the byte; tests compare.
numpy has no bfloat16 and no float8, so values of these are their bits, as unsigned integers of the same width.

Example::

    record, blob = encode_plain(record, {"sequences": PlainTensor.of(ids)})
    load_plain(path)[1]["sequences"].values          # int64 [B, S]
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from actordbg.base.errors import Unsupported
from actordbg.formats import dumpfile
from actordbg.formats import payload_check as contents
from actordbg.formats.dump_record import (
    SAFETENSORS_DTYPES,
    UINT24,
    DumpRecord,
    TensorSpec,
    contiguous_strides,
    label,
    stored_layout,
)
from actordbg.store import places

Array = np.ndarray[Any, Any]
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Dtypes that numpy lacks, and what holds their bits."""
_SIZES = dict(SAFETENSORS_DTYPES.values())
_CODES = {name: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_ONES = {"float64": 0x3FF0000000000000, "float32": 0x3F800000, "float16": 0x3C00, "bfloat16": 0x3F80}
"""The bits of 1."""


@dataclass(frozen=True)
class PlainTensor:
    """dtype: by torch's name. values: in that dtype, or its bits where numpy lacks it. strides: in elements, as captured."""

    dtype: str
    values: Array
    strides: tuple[int, ...]

    @classmethod
    def of(cls, values: Array) -> PlainTensor:
        """A contiguous array of a dtype that numpy has."""
        return cls(values.dtype.name, values, contiguous_strides(values.shape))

    @classmethod
    def strided(cls, dtype: str, raw: bytes, shape: tuple[int, ...], strides: tuple[int, ...]) -> PlainTensor:
        """A tensor over these bytes, which reach as far as shape and strides do."""
        kind = array_dtype(dtype)
        if math.prod(shape) == 0:
            return cls(dtype, np.empty(shape, kind), strides)
        base = np.frombuffer(raw, kind)
        laid_out = np.lib.stride_tricks.as_strided(base, shape, tuple(step * kind.itemsize for step in strides), writeable=False)
        return cls(dtype, laid_out, strides)

    @property
    def numbers(self) -> Array:
        """The values as numbers: bfloat16 as float32, float8 as float16 or float32, all exact."""
        if self.dtype == "bfloat16":
            return (self.values.astype("<u4") << 16).view("<f4")
        if self.dtype == "float8_e5m2":
            return (self.values.astype("<u2") << 8).view("<f2")
        return _e4m3fn()[self.values] if self.dtype == "float8_e4m3fn" else self.values

    @property
    def nonzero(self) -> int:
        """How many values are not zero. Minus zero has bits, and is zero."""
        bits = self.values if self.dtype not in _BITS else self.values & (0x7FFF if self.dtype == "bfloat16" else 0x7F)
        return int(np.count_nonzero(bits))


def _e4m3fn() -> Array:
    """What each of the 256 bit patterns of float8_e4m3fn is, float32: it has no infinity, and a NaN of each sign."""
    bits = np.arange(256)
    power, digits = (bits >> 3) & 15, bits & 7
    size = np.where(power == 0, digits / 8 * 2.0**-6, (1 + digits / 8) * 2.0 ** (power - 7.0))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


def array_dtype(name: str) -> np.dtype[Any]:
    """What numpy holds a dtype in, little-endian."""
    kind: np.dtype[Any] = np.dtype(_BITS.get(name, name)).newbyteorder("<")
    return kind


def encode_plain(record: DumpRecord, tensors: Mapping[str, PlainTensor], level: int = 3) -> tuple[DumpRecord, bytes]:
    """The finished record (tensor specs and hash filled in) and the bytes of its dump file."""
    specs: dict[str, TensorSpec] = {}
    entries: dict[str, tuple[str, Array]] = {}
    for name, tensor in tensors.items():
        stored, parts = _narrow(tensor)
        shape = tuple(tensor.values.shape)
        specs[name] = spec = TensorSpec(tensor.dtype, shape, stored_layout(shape, tensor.strides), stored)
        for (key, dtype), part in zip(spec.parts(name), parts, strict=True):
            if key in entries:
                raise Unsupported(f"two tensors of one call would both be stored as {key!r:.80}", hint="rename one of them")
            entries[key] = (dtype, part)
    data = plain_safetensors(entries, {"actordbg": label(record)})
    finished = record.with_payload(specs, hashlib.sha256(data).hexdigest())
    return finished, dumpfile.pack(finished, data, level)


def plain_safetensors(entries: Mapping[str, tuple[str, Array]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file: 8 bytes of length, a JSON header padded to 8 bytes, then the tensors, wider elements first."""
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, end = [], 0
    for name, (dtype, values) in sorted(entries.items(), key=lambda entry: (-_SIZES[entry[1][0]], entry[0])):
        raw = np.ascontiguousarray(values, array_dtype(dtype)).tobytes()
        header[name] = {"dtype": _CODES[dtype], "shape": list(values.shape), "data_offsets": [end, end + len(raw)]}
        parts.append(raw)
        end += len(raw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def load_plain(path: str | os.PathLike[str], max_bytes: int = dumpfile.DEFAULT_CAP) -> tuple[DumpRecord, dict[str, PlainTensor]]:
    """Read, check and widen one dump, from its file or out of a pack; errors as of `payload.load`."""
    record, data = places.read_payload(path, max_bytes, hash_too=False)
    entries = contents.check(record, data, str(path), max_bytes)
    return record, {name: _widened(name, data, entries, spec) for name, spec in record.tensors.items()}


def _widened(name: str, data: bytes, entries: Mapping[str, dumpfile.Entry], spec: TensorSpec) -> PlainTensor:
    parts = [_view(data, entries[key]) for key, _ in spec.parts(name)]
    if len(parts) == 2:
        values = parts[0].astype(array_dtype(spec.dtype)) + (parts[1].astype(array_dtype(spec.dtype)) << 16)
    elif spec.stored == "bool" and spec.dtype in _BITS:
        values = parts[0].astype(array_dtype(spec.dtype)) * _ONES[spec.dtype]
    else:
        values = parts[0].astype(array_dtype(spec.dtype))
    return PlainTensor(spec.dtype, values.reshape(spec.shape), spec.strides)


def _view(data: bytes, entry: dumpfile.Entry) -> Array:
    kind, count = array_dtype(entry.dtype), math.prod(entry.shape)
    return np.frombuffer(data, kind, count, entry.offset if count else 0).reshape(entry.shape)


def _narrow(tensor: PlainTensor) -> tuple[str, tuple[Array, ...]]:
    """The narrowest lossless form: what `TensorSpec.stored` says of it, and its parts."""
    values = tensor.values
    if tensor.dtype in _INTEGERS and values.size:
        low, high = int(values.min()), int(values.max())
        if low >= 0 and high <= 1:
            return "bool", (values.astype(np.bool_),)
        if tensor.dtype in ("int64", "int32"):
            return _narrow_ids(tensor, low, high)
    elif tensor.dtype in _ONES and values.size:
        bits = np.ascontiguousarray(values).view(f"<u{_SIZES[tensor.dtype]}")
        ones = bits == _ONES[tensor.dtype]
        if bool((ones | (bits == 0)).all()):
            return "bool", (ones,)
    return tensor.dtype, (values,)


def _narrow_ids(tensor: PlainTensor, low: int, high: int) -> tuple[str, tuple[Array, ...]]:
    values = tensor.values
    if low >= 0 and high < 2**16:
        return "uint16", (values.astype("<u2"),)
    if low >= 0 and high < 2**24:
        return UINT24, ((values & 0xFFFF).astype("<u2"), (values >> 16).astype(np.uint8))
    if low >= -(2**31) and high < 2**31:
        return "int32", (values.astype("<i4"),)
    return tensor.dtype, (values,)
