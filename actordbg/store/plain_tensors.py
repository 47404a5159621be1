"""Tensors of one dump without torch: for the desk, which imports, makes and exports dumps also where only numpy is.

The same forms as `formats.encoding` (the trainer's half) and `store.payload` (the workers' half), to the byte; tests compare.
numpy has no bfloat16 and no float8, so values of these are their bits, as unsigned integers of the same width.

Example::

    record, blob = encode_plain(record, {"sequences": of_array(ids)})
    load_plain(path)[1]["sequences"].values          # int64 [B, S]
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np

from actordbg.formats import dumpfile
from actordbg.formats import dumpfile as contents
from actordbg.formats.dump_record import UINT24, DumpRecord, contiguous_strides
from actordbg.formats.encoding import BITS, ONES, Array, PlainTensor, array_dtype, serialize
from actordbg.store import places

_parse: dumpfile.Parser
try:
    from actordbg.store.quick_record import quick_record as _parse
except ImportError:  # a worker's environment may be without msgspec
    from actordbg.formats.record_reading import parse_record as _parse


def of_array(values: Array) -> PlainTensor:
    """A contiguous array of a dtype that numpy has."""
    return PlainTensor(values.dtype.name, values, contiguous_strides(values.shape))


def strided(dtype: str, raw: bytes, shape: tuple[int, ...], strides: tuple[int, ...]) -> PlainTensor:
    """A tensor over these bytes, which reach as far as shape and strides do."""
    kind = array_dtype(dtype)
    if math.prod(shape) == 0:
        return PlainTensor(dtype, np.empty(shape, kind), strides)
    base = np.frombuffer(raw, kind)
    laid_out = np.lib.stride_tricks.as_strided(base, shape, tuple(step * kind.itemsize for step in strides), writeable=False)
    return PlainTensor(dtype, laid_out, strides)


def numbers_of(tensor: PlainTensor) -> Array:
    """The values as numbers: bfloat16 as float32, float8 as float16 or float32, all exact."""
    if tensor.dtype == "bfloat16":
        return (tensor.values.astype("<u4") << 16).view("<f4")
    if tensor.dtype == "float8_e5m2":
        return (tensor.values.astype("<u2") << 8).view("<f2")
    return _e4m3fn()[tensor.values] if tensor.dtype == "float8_e4m3fn" else tensor.values


def _e4m3fn() -> Array:
    """What each of the 256 bit patterns of float8_e4m3fn is, float32: it has no infinity, and a NaN of each sign."""
    bits = np.arange(256)
    power, digits = (bits >> 3) & 15, bits & 7
    size = np.where(power == 0, digits / 8 * 2.0**-6, (1 + digits / 8) * 2.0 ** (power - 7.0))
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -size, size)).astype(np.float32)


def encode_plain(record: DumpRecord, tensors: Mapping[str, PlainTensor], level: int = 3) -> tuple[DumpRecord, bytes]:
    """The finished record (tensor specs and hash filled in) and the bytes of its dump file."""
    finished, data = serialize(record, tensors)
    return finished, dumpfile.pack(finished, data, level)


def load_plain(path: str | os.PathLike[str], max_bytes: int = dumpfile.DEFAULT_CAP) -> tuple[DumpRecord, dict[str, PlainTensor]]:
    """Read, check and widen one dump, from its file or out of a pack; errors as of `payload.load`."""
    record, data = places.read_payload(path, max_bytes, hash_too=False, parse=_parse)
    return record, widen_plain(record, data, str(path), max_bytes)


def widen_plain(
    record: DumpRecord, data: bytes, name: str = "dump", max_bytes: int = dumpfile.DEFAULT_CAP
) -> dict[str, PlainTensor]:
    """Tensors as captured, each contiguous and in memory of its own, from a record and its checked safetensors payload."""
    entries = contents.check(record, data, name, max_bytes)
    found: dict[str, PlainTensor] = {}
    for name, spec in record.tensors.items():
        kind = array_dtype(spec.dtype)
        if spec.stored == UINT24:
            (low, _), (high, _) = spec.parts(name)
            values = _view(data, entries[low]).astype(kind)
            if values.size:  # in the third byte of each it has 0
                third = np.ndarray(values.shape, np.uint8, values, 2, values.strides)
                third[...] = _view(data, entries[high])
        else:
            values = _view(data, entries[name]).astype(kind)
            if spec.stored == "bool" and spec.dtype in BITS:
                values *= kind.type(ONES[spec.dtype])
        found[name] = PlainTensor(spec.dtype, values, spec.strides)
    return found


def _view(data: bytes, entry: dumpfile.Entry) -> Array:
    dtype, shape, offset = entry
    values: Array = np.ndarray(shape, array_dtype(dtype), data, offset)
    return values
