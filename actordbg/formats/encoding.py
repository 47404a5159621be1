"""Turns a call's tensors and its record into the bytes of a dump file: in the training process, in its writer, and at the desk.

Tensors are stored narrow where nothing is lost: masks of 0 and 1 as bool, ids below 65,536 as uint16, below 2**24 as their low
16 and high 8 bits apart (`<name>.lo`, `<name>.hi`), other int64 that fit as int32. The record keeps the logical dtype, shape
and strides: `actordbg.store.payload` gives back exactly what was captured.

Works on numpy's views of memory: torch costs many times as much here, and a writer process has none. bfloat16 and float8, which
numpy lacks, are their bits, as unsigned integers.

    record, data = serialize(record, {"sequences": of_torch(ids)})
    blob = pack(record, data, level=3)
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard

from actordbg.base.fault import Unsupported
from actordbg.formats.dump_record import (
    MAGIC,
    MAX_DIMS,
    MAX_RECORD,
    MAX_VALUES,
    OUTPUT_PREFIX,
    SAFETENSORS_DTYPES,
    SIZES,
    SURROGATE,
    UINT24,
    DumpRecord,
    TensorSpec,
    contiguous_strides,
    dtype_name,
    label,
    make_dump_id,
    reach_of,
    timestamp_of,
)
from actordbg.formats.ringfile import OWN_NUMBERS

Array = np.ndarray[Any, Any]
_CODES = {name: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Dtypes that numpy lacks, and what holds their bits."""
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
ONES = {"float64": 0x3FF0000000000000, "float32": 0x3F800000, "float16": 0x3C00, "bfloat16": 0x3F80}
"""The bits of 1."""
MOST_DIMS = 64
"""torch has no tensors of more dimensions."""


@dataclass(frozen=True)
class PlainTensor:
    """dtype: by torch's name. values: in that dtype, or its bits where numpy lacks it. strides: in elements, as captured."""

    dtype: str
    values: Array
    strides: tuple[int, ...]

    @property
    def nonzero(self) -> int:
        """How many values are not zero. Minus zero has bits, and is zero."""
        bits = self.values if self.dtype not in BITS else self.values & (0x7FFF if self.dtype == "bfloat16" else 0x7F)
        return int(np.count_nonzero(bits))


@functools.cache
def array_dtype(name: str) -> np.dtype[Any]:
    """What numpy holds a dtype in, little-endian."""
    kind: np.dtype[Any] = np.dtype(BITS.get(name, name)).newbyteorder("<")
    return kind


def of_torch(tensor: Any, strides: tuple[int, ...] | None = None) -> PlainTensor:
    """A tensor on the CPU, over its memory. `strides`: those that it had where it is a compact copy."""
    import torch

    name, values = dtype_name(tensor.dtype), tensor.detach()
    if name in BITS:
        values = values.view(torch.int16 if SIZES[name] == 2 else torch.uint8)
    return PlainTensor(name, values.numpy().view(array_dtype(name)), strides or tuple(tensor.stride()))


def tensors_of(numbers: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """Yield (shape, strides, offset, bytes) of each tensor that `numbers` describes; ValueError if they describe none."""
    place = OWN_NUMBERS
    while place < len(numbers):
        dims = numbers[place]
        if not 0 <= dims <= MOST_DIMS or min(numbers[place:]) < 0:
            raise ValueError("a tensor has an impossible shape")
        shape, strides = (tuple(numbers[first : first + dims]) for first in (place + 1, place + 1 + dims))
        offset, nbytes = numbers[place + 1 + 2 * dims : place + 3 + 2 * dims]
        yield shape, strides, offset, nbytes
        place += 3 + 2 * dims


def tensors_in(memory: Any, first: int, numbers: Sequence[int], names: Sequence[Sequence[str]]) -> dict[str, PlainTensor]:
    """Return the tensors of a call over a ring's memory: `numbers` as `ringfile` has them, `names` its names and dtypes, `first`
    where its data begin. ValueError, KeyError or TypeError where numbers and names are not those of tensors in this memory.
    """
    tensors = {}
    for (name, dtype), (shape, strides, offset, nbytes) in zip(names, tensors_of(numbers), strict=True):
        count = math.prod(shape)
        if name in tensors or type(name) is not str or SIZES[dtype] * count != nbytes:
            raise ValueError(f"{name!r:.80} lies outside of its extent")
        values = np.frombuffer(memory, array_dtype(dtype), count, first + offset) if count else np.empty(0, array_dtype(dtype))
        plain = contiguous_strides(shape)  # the stride of a dimension of size 1 means nothing
        same = count and all(size == 1 or one == other for size, one, other in zip(shape, strides, plain, strict=True))
        tensors[name] = PlainTensor(dtype, values.reshape(shape), plain if same else strides)
    return tensors


def record_of(
    fields: Mapping[str, Any], numbers: Sequence[int], tensors: Mapping[str, PlainTensor], versions: dict[str, str], **more: Any
) -> DumpRecord:
    """The record of a call, all but what `serialize` fills in. `fields`: what it has in common with others of its kind."""
    number, time_ns, monotonic_ns, step, token, batch, seq_len = numbers[:OWN_NUMBERS]
    attention, action, timestamp = tensors.get("attention_mask"), tensors.get("action_mask"), timestamp_of(time_ns)
    return DumpRecord(
        dump_id=make_dump_id(timestamp, number, int(fields["pid"]), f"{token:08x}"),
        timestamp=timestamp,
        monotonic_ns=monotonic_ns,
        call_index=number,
        step=step if step >= 0 else None,
        batch_size=batch,
        seq_len=seq_len,
        action_len=action.values.shape[-1] if action is not None and action.values.ndim else None,
        tokens=attention.nonzero if attention is not None else batch * seq_len,
        replayable=not fields["extra"] and bool(seq_len),
        versions=versions,
        **fields,
        **more,
    )


def pack(record: DumpRecord, payload: bytes, level: int) -> bytes:
    """One dump file's bytes from a finished record and its safetensors payload, compressed at zstd `level`.

    Raises Unsupported for a record or a payload that no reader would accept.
    """
    return pack_line(checked_line(record, payload), payload, level)


_own = threading.local()


def compress(content: bytes, level: int) -> bytes:
    """Return one zstd frame with content size and checksum."""
    kept: Any = vars(_own)  # making a compressor takes longer than what it does to a small payload
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return kept[level].compress(content)  # type: ignore[no-any-return]


def pack_line(line: bytes, payload: bytes, level: int = 3) -> bytes:
    """Return a dump file's bytes from an encoded record, which must come from `checked_line` or from a file."""
    header = b"%b\n%08x" % (line, zlib.crc32(line))
    return MAGIC + len(header).to_bytes(4, "little") + header + compress(payload, level)


def serialize(record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> tuple[DumpRecord, bytes]:
    """The finished record and the safetensors bytes of its payload, with tensor specs and hash. Packed rows are taken apart."""
    if "adapter" in record.actor:
        record, tensors = rows_apart(record, tensors)
    specs: dict[str, TensorSpec] = {}
    entries: dict[str, tuple[str, Array]] = {}
    for name, tensor in tensors.items():
        stored, parts = _narrow(tensor)
        shape, strides = tensor.values.shape, tensor.strides
        if reach_of(shape, strides) is None:  # windows that overlap (`unfold`) come back as a contiguous tensor
            strides = contiguous_strides(shape)
        specs[name] = spec = TensorSpec(tensor.dtype, shape, strides, stored)
        for (key, dtype), part in zip(spec.parts(name), parts, strict=True):
            if key in entries:
                raise Unsupported(f"two tensors of one call would both be stored as {key!r:.80}", hint="rename one of them")
            entries[key] = (dtype, part)
    data = plain_safetensors(entries, {"actordbg": label(record)})
    return replace(record, tensors=specs, payload_sha256=hashlib.sha256(data).hexdigest()), data


def plain_safetensors(entries: Mapping[str, tuple[str, Array]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, as `safetensors.torch.save` makes one, in a fraction of its time.

    8 bytes of length, a JSON header padded with spaces to 8 bytes, then the tensors, those with wider elements first.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    parts, end = [], 0
    for name, (dtype, values) in sorted(entries.items(), key=lambda entry: (-SIZES[entry[1][0]], entry[0])):
        part = np.ascontiguousarray(values, array_dtype(dtype))
        header[name] = {"dtype": _CODES[dtype], "shape": list(values.shape), "data_offsets": [end, end + part.nbytes]}
        parts.append(part.data if part.size else b"")
        end += part.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _narrow(tensor: PlainTensor) -> tuple[str, tuple[Array, ...]]:
    """The narrowest lossless form: what `TensorSpec.stored` says of it, and its parts (see `TensorSpec.parts`)."""
    values, dtype = tensor.values, tensor.dtype
    if dtype in _INTEGERS and values.size:
        bits = int(np.bitwise_or.reduce(values, axis=None))  # negative if a value is, and else as long as the longest value
        if bits in (0, 1):
            return "bool", (values.astype(np.bool_),)
        if dtype in ("int64", "int32") and 0 <= bits < 2**24:
            low = values.astype("<u2")
            return ("uint16", (low,)) if bits < 2**16 else (UINT24, (low, (values >> 16).astype(np.uint8)))
        if dtype == "int64" and values.min() >= -(2**31) and values.max() < 2**31:
            return "int32", (values.astype("<i4"),)
    elif dtype in ONES and values.size:
        word = np.ascontiguousarray(values).view(f"<u{SIZES[dtype]}")
        ones = word == ONES[dtype]
        if bool((ones | (word == 0)).all()):
            return "bool", (ones.reshape(values.shape),)  # numpy makes [1] of a single value
    return dtype, (values,)


def checked_line(record: DumpRecord, payload: bytes) -> bytes:
    """The record's line of JSON. Raises Unsupported if a reader would refuse it or the payload: what is written can be read.

    Checks sizes, counts, ranges and characters; how deep a captured call's values are nested is bounded where they are sorted
    (`actordbg.capture.facts.MAX_DEPTH`). Any other record goes through `actordbg.formats.dumpfile.pack`, which reads it as a
    reader does.
    """
    line = record.to_json().encode()
    header = int.from_bytes(payload[:8], "little")
    for what, size in (("record", len(line) + 9), ("list of tensors", header)):
        if size > MAX_RECORD:
            raise _unreadable(record, f"its {what} has {size} bytes, over the limit of {MAX_RECORD}")
    for part in (line, payload[8 : 8 + header]):
        if sum(map(part.count, (b"[", b"{", b","))) > MAX_VALUES:
            raise _unreadable(record, f"it has more than {MAX_VALUES} values")
    numbers = [max(one, ~one) if name == "temperature" else one for name, one in vars(record).items() if type(one) is int]
    if min(numbers) < 0 or max(numbers) >= 2**63:
        raise _unreadable(record, "a number is out of range")
    if "__metadata__" in record.tensors or any(len(spec.shape) > MAX_DIMS for spec in record.tensors.values()):
        raise _unreadable(record, "a tensor has a reserved name or too many dimensions")
    if b"\\ud" in line.lower() and SURROGATE.search(json.dumps(json.loads(line), ensure_ascii=False)):
        raise _unreadable(record, "a text holds half of a surrogate pair")
    return line


def _unreadable(record: DumpRecord, why: str) -> Unsupported:
    hint = "large lists belong into tensors; leave out the arguments that the replay does not need"
    return Unsupported(f"dump {record.dump_id}: {why}", hint=hint)


PREFIX = "packed."
OFFSETS, POSITIONS = PREFIX + "offsets", PREFIX + "positions"
"""Names of the tensors that say where rows begin. With neither a call is not packed."""
MOST_PLACES = 2**27
"""Most positions, padding included, that a call's rows may take: one long row beside many short ones would fill the memory."""
_Array = Any


def rows_apart(record: DumpRecord, tensors: Mapping[str, Any]) -> tuple[DumpRecord, Mapping[str, Any]]:
    """Return what an adapter read of a call, packed rows apart. Unsupported where its masks cannot be those of its tokens."""
    if OFFSETS in tensors or POSITIONS in tensors:
        record, tensors = _unpacked(record, tensors)
    require_fit({name: one.values for name, one in tensors.items()}, hint="correct what the adapter reads as rows")
    return record, tensors


def require_fit(tensors: Mapping[str, Any], hint: str) -> None:
    """Raise Unsupported where masks cannot be those of the sequences beside them."""
    shapes = {name: tuple(tensors[name].shape) for name in ("sequences", "attention_mask", "action_mask") if name in tensors}
    ids = shapes.get("sequences", ())
    real, counted = shapes.get("attention_mask", ids), shapes.get("action_mask", (*ids[:1], -1))
    if real[:1] + real[-1:] != ids[:1] + ids[-1:] or counted[:1] != ids[:1] or counted[-1:] >= ids[-1:]:
        raise Unsupported(f"these cannot belong together: {', '.join(f'{n} {[*s]}' for n, s in shapes.items())}", hint=hint)


def _unpacked(record: DumpRecord, tensors: Mapping[str, Any]) -> tuple[DumpRecord, dict[str, Any]]:
    """The record and the tensors (`actordbg.formats.encoding.PlainTensor`) of a packed call with its rows apart."""
    kept = {name: one for name, one in tensors.items() if not name.startswith(PREFIX)}
    try:
        total = tensors["sequences"].values.size
        starts, lengths, packing = _borders(tensors, total)
    except (KeyError, ValueError) as error:
        said = {"rows": f"packed, and not told apart: {error}"}
        return replace(record, extra={**record.extra, **said}, replayable=False), dict(tensors)
    longest = int(lengths.max())
    at = starts[:, None] + np.arange(longest)
    real = np.arange(longest) < lengths[:, None]
    mask, places = kept.get("attention_mask"), tensors.get(POSITIONS)
    shapes = ((total,), (1, total), *(() if places is None else (places.values.shape,)))
    found = {**kept}
    if mask is None:
        found["attention_mask"] = PlainTensor("int64", real.astype("<i8"), contiguous_strides(real.shape))
    for name, one in kept.items():
        if one.values.shape in shapes:
            found[name] = _spread(one, at, real)
        elif one.values.shape == (1, total - 1) and (name == "action_mask" or name.startswith(OUTPUT_PREFIX)):
            found[name] = _spread(one, at[:, :-1], real[:, 1:])
    attended = found["attention_mask"].values != 0
    if places is not None:
        own = _spread(places, at, real)
        if (own.values != attended.cumsum(1) - 1)[attended].any():
            found["position_ids"] = own
    actions = found["action_mask"].values.shape[-1] if "action_mask" in found else None
    rows: dict[str, Any] = {"batch_size": len(starts), "seq_len": longest, "tokens": int(attended.sum()), "action_len": actions}
    outside = total - int(lengths.sum()) if OFFSETS in tensors else 0
    said = {"rows": f"{outside} of {total} packed tokens lie in no row, and are left out"} if outside else {}
    if packing and places is not None and mask is not None:
        said = {"rows": "packed beside a mask: flash attention separates such rows, sdpa and eager attention do not"}
    return replace(record, packing_samples=packing, extra={**record.extra, **said}, **rows), found


def _borders(tensors: Mapping[str, Any], total: int) -> tuple[_Array, _Array, bool]:
    """Where each row begins, how long it is, and whether several lay in one. ValueError where that makes no sense."""
    given = 0
    if OFFSETS in tensors:
        offsets = tensors[OFFSETS].values.astype(np.int64).ravel()
        starts, ends = offsets[:-1], offsets[1:]
    else:
        positions = tensors[POSITIONS].values
        if positions.size != total:
            raise ValueError(f"{positions.size} positions for {total} tokens")
        width = max(1, *positions.shape[-1:])
        begins, mask, given = positions.ravel() == 0, tensors.get("attention_mask"), total // width
        if mask is not None:  # padding is at 0, too
            real = mask.values.ravel() != 0
            begins[1:] &= real[1:] & real[:-1]
        starts = np.union1d(np.flatnonzero(begins), np.arange(0, max(1, total), width))
        ends = np.append(starts[1:], total)
        filled = np.flatnonzero(ends - starts > 1)
        if mask is None:
            starts, ends = (one[: filled[-1] + 1] if filled.size else one[:1] for one in (starts, ends))
    lengths = ends - starts
    if not starts.size or lengths.min() < 0 or starts[0] < 0 or ends.max() > total or not lengths.max():
        raise ValueError(f"borders {[*starts[:4].tolist(), '...', *ends[-1:].tolist()]} of {total} tokens")
    if starts.size * int(lengths.max()) > MOST_PLACES:
        raise ValueError(f"{starts.size} rows of up to {lengths.max()} tokens are too many places")
    return starts[lengths > 0], lengths[lengths > 0], len(starts) > given


def _spread(packed: Any, at: _Array, real: _Array) -> Any:
    """Values of one long row at their places in rows, 0 if there are none."""
    flat = packed.values.ravel()
    values = np.where(real, flat[np.minimum(at, flat.size - 1)], flat.dtype.type(0)) if flat.size else np.zeros(at.shape)
    return replace(packed, values=values.astype(flat.dtype, copy=False), strides=contiguous_strides(values.shape))
