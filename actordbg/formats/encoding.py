"""Encode a call's tensors and record as a dump file: in the training process, in its writer, and at the desk.

Tensors are narrowed if nothing is lost: masks of 0 and 1 to bool, ids below 65,536 to uint16, ids below 2**24 to separate low 16
and high 8 bits (`<name>.lo`, `<name>.hi`), other int64 that fit to int32. The record keeps the logical dtype, shape and strides:
`actordbg.store.payload` restores exactly what was captured.
Works on numpy views of memory: torch costs many times as much here, and a writer process does without it. bfloat16 and float8,
which numpy lacks, are handled as bits, in unsigned integers. `pack(*serialize(record, tensors), level=3)` is a dump file.
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
    FORWARD,
    MAGIC,
    MAX_DIMS,
    MAX_RECORD,
    MAX_VALUES,
    OUTPUT_PREFIX,
    SAFETENSORS_DTYPES,
    SIZES,
    SURROGATE,
    UINT24,
    UNKNOWN_TYPE,
    DumpRecord,
    TensorSpec,
    contiguous_strides,
    dtype_name,
    label,
    make_dump_id,
    reach_of,
    timestamp_of,
)  # fmt: skip
from actordbg.formats.ringfile import OWN_NUMBERS

Array = np.ndarray[Any, Any]
_CODES = {name: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Dtypes that numpy lacks, and the dtype that holds their bits."""
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_LOG_PROBS = {OUTPUT_PREFIX + "log_probs", OUTPUT_PREFIX + "action_log_probs"}
ONES = {"float64": 0x3FF0000000000000, "float32": 0x3F800000, "float16": 0x3C00, "bfloat16": 0x3F80}
"""The bits of 1."""
MOST_DIMS = 64
"""Most dimensions of a tensor in torch."""


@dataclass(frozen=True)
class PlainTensor:
    """A tensor without torch.

    dtype: torch's name. values: in that dtype, or its bits if numpy lacks it. strides: in elements, as captured.
    """

    dtype: str
    values: Array
    strides: tuple[int, ...]

    @property
    def nonzero(self) -> int:
        """Count the values that are not zero. Minus zero has bits, but is zero."""
        bits = self.values if self.dtype not in BITS else self.values & (0x7FFF if self.dtype == "bfloat16" else 0x7F)
        return int(np.count_nonzero(bits))


@functools.cache
def array_dtype(name: str) -> np.dtype[Any]:
    """Return the little-endian numpy dtype that holds a dtype."""
    kind: np.dtype[Any] = np.dtype(BITS.get(name, name)).newbyteorder("<")
    return kind


def of_torch(tensor: Any, strides: tuple[int, ...] | None = None) -> PlainTensor:
    """Wrap a CPU tensor without copying. `strides`: the original's, if the tensor is a compact copy."""
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
    """Return the tensors of a call as views of a ring's memory.

    numbers: as in `ringfile`. names: names and dtypes. first: offset of the call's data. Raises ValueError, KeyError or TypeError
    if numbers and names do not describe tensors in this memory.
    """
    tensors = {}
    for (name, dtype), (shape, strides, offset, nbytes) in zip(names, tensors_of(numbers), strict=True):
        count = math.prod(shape)
        if name in tensors or type(name) is not str or SIZES[dtype] * count != nbytes:
            raise ValueError(f"{name!r:.80} lies outside of its extent")
        values = np.frombuffer(memory, array_dtype(dtype), count, first + offset) if count else np.empty(0, array_dtype(dtype))
        plain = contiguous_strides(shape)  # the stride of a dimension of size 1 means nothing
        same = count and all(size == 1 or stride == other for size, stride, other in zip(shape, strides, plain, strict=True))
        tensors[name] = PlainTensor(dtype, values.reshape(shape), plain if same else strides)
    return tensors


def record_of(
    fields: Mapping[str, Any], numbers: Sequence[int], tensors: Mapping[str, PlainTensor], versions: dict[str, str], **more: Any
) -> DumpRecord:
    """Build the record of a call, except for the fields that `serialize` fills in. `fields`: those of its kind of call."""
    number, time_ns, monotonic_ns, step, token, batch, seq_len = numbers[:OWN_NUMBERS]
    attention, action, timestamp = tensors.get("attention_mask"), tensors.get("action_mask"), timestamp_of(time_ns)
    whole = all(why.startswith(UNKNOWN_TYPE) for why in fields["extra"].values())
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
        replayable=whole and bool(seq_len) and fields.get("point", FORWARD) == FORWARD,
        versions=versions,
        **fields,
        **more,
    )


def pack(record: DumpRecord, payload: bytes, level: int = 3) -> bytes:
    """Build a dump file from a finished record and its payload, as `pack_line` does. Unsupported if no reader would accept it."""
    return pack_line(checked_line(record, payload), payload, level)


_own = threading.local()


def compress(content: bytes, level: int) -> bytes:
    """Compress to a single zstd frame with content size and checksum."""
    kept: Any = vars(_own)  # creating a compressor takes longer than compressing a small payload
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return kept[level].compress(content)  # type: ignore[no-any-return]


def pack_line(line: bytes, payload: bytes, level: int = 3) -> bytes:
    """Build a dump file from an encoded record, compressing `payload` at zstd `level`.

    Like `pack`, but without validation: `line` must come from `checked_line` or from a file.
    """
    header = b"%b\n%08x" % (line, zlib.crc32(line))
    return MAGIC + len(header).to_bytes(4, "little") + header + compress(payload, level)


def serialize(record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> tuple[DumpRecord, bytes]:
    """Return the record, completed with tensor specs and hash, and its payload's safetensors bytes. Separates packed rows."""
    if "adapter" in record.actor and record.point == FORWARD:
        record, tensors = rows_apart(record, tensors)
    unknown = any(why.startswith(UNKNOWN_TYPE) for why in record.extra.values())
    if unknown and _LOG_PROBS.isdisjoint(tensors):
        record = replace(record, replayable=False)  # nothing shows whether a replay may leave the argument out
    specs: dict[str, TensorSpec] = {}
    entries: dict[str, tuple[str, Array]] = {}
    for name, tensor in tensors.items():
        stored, parts = _narrow(tensor)
        shape, strides = tensor.values.shape, tensor.strides
        if reach_of(shape, strides) is None:  # overlapping windows (`unfold`) are restored as a contiguous tensor
            strides = contiguous_strides(shape)
        specs[name] = spec = TensorSpec(tensor.dtype, shape, strides, stored)
        for (key, dtype), part in zip(spec.parts(name), parts, strict=True):
            if key in entries:
                raise Unsupported(f"two tensors of one call would both be stored as {key!r:.80}", hint="rename one of them")
            entries[key] = (dtype, part)
    data = plain_safetensors(entries, {"actordbg": label(record)})
    return replace(record, tensors=specs, payload_sha256=hashlib.sha256(data).hexdigest()), data


def plain_safetensors(entries: Mapping[str, tuple[str, Array]], metadata: Mapping[str, str]) -> bytes:
    """Build a safetensors file like `safetensors.torch.save`, in a fraction of its time.

    8 bytes of length, a JSON header padded with spaces to 8 bytes, then the tensors, widest elements first.
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
    """Return the narrowest lossless form of a tensor: its `TensorSpec.stored`, and its parts (see `TensorSpec.parts`)."""
    values, dtype = tensor.values, tensor.dtype
    if dtype in _INTEGERS and values.size:
        bits = int(np.bitwise_or.reduce(values, axis=None))  # negative if any value is, else as long as the longest value
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
            return "bool", (ones.reshape(values.shape),)  # numpy turns a single value into [1]
    return dtype, (values,)


def checked_line(record: DumpRecord, payload: bytes) -> bytes:
    """Return the record's line of JSON. Raises Unsupported if a reader would refuse it or the payload.

    Checks sizes, counts, ranges and characters, not the nesting: `actordbg.capture.facts.MAX_DEPTH` bounds a captured call's.
    Other records go through `actordbg.formats.dumpfile.pack`, which parses them as a reader would.
    """
    line = record.to_json().encode()
    header = int.from_bytes(payload[:8], "little")
    for what, size in (("record", len(line) + 9), ("list of tensors", header)):
        if size > MAX_RECORD:
            raise _unreadable(record, f"its {what} has {size} bytes, over the limit of {MAX_RECORD}")
    for part in (line, payload[8 : 8 + header]):
        if sum(map(part.count, (b"[", b"{", b","))) > MAX_VALUES:
            raise _unreadable(record, f"it has more than {MAX_VALUES} values")
    numbers = [max(item, ~item) if name == "temperature" else item for name, item in vars(record).items() if type(item) is int]
    if min(numbers) < 0 or max(numbers) >= 2**63:
        raise _unreadable(record, "a number is out of range")
    if "__metadata__" in record.tensors or any(len(spec.shape) > MAX_DIMS for spec in record.tensors.values()):
        raise _unreadable(record, "a tensor has a reserved name or too many dimensions")
    if b"\\ud" in line.lower() and SURROGATE.search(json.dumps(json.loads(line), ensure_ascii=False)):
        raise _unreadable(record, "a text holds half of a surrogate pair")
    return line


def _unreadable(record: DumpRecord, why: str) -> Unsupported:
    hint = "store large lists as tensors, and leave out the arguments that the replay does not need"
    return Unsupported(f"dump {record.dump_id}: {why}", hint=hint)


PREFIX = "packed."
OFFSETS, POSITIONS = PREFIX + "offsets", PREFIX + "positions"
"""Names of the tensors that say where packed rows begin. A call without them is not packed."""
MOST_PLACES = 2**27
"""Most positions, padding included, that a call's rows may take: one long row beside many short ones would fill the memory."""
_Array = Any


def rows_apart(record: DumpRecord, tensors: Mapping[str, Any]) -> tuple[DumpRecord, Mapping[str, Any]]:
    """Separate the packed rows of an adapter's call. Raises Unsupported if its masks do not fit its tokens."""
    if OFFSETS in tensors or POSITIONS in tensors:
        record, tensors = _unpacked(record, tensors)
    require_fit({name: tensor.values for name, tensor in tensors.items()}, hint="fix what the adapter reads as rows")
    return record, tensors


def require_fit(tensors: Mapping[str, Any], hint: str) -> None:
    """Raise Unsupported if the shapes of masks do not fit the sequences."""
    shapes = {name: tuple(tensors[name].shape) for name in ("sequences", "attention_mask", "action_mask") if name in tensors}
    ids = shapes.get("sequences", ())
    real, counted = shapes.get("attention_mask", ids), shapes.get("action_mask", (*ids[:1], -1))
    if real[:1] + real[-1:] != ids[:1] + ids[-1:] or counted[:1] != ids[:1] or counted[-1:] >= ids[-1:]:
        raise Unsupported(f"these shapes do not fit together: {', '.join(f'{n} {[*s]}' for n, s in shapes.items())}", hint=hint)


def _unpacked(record: DumpRecord, tensors: Mapping[str, Any]) -> tuple[DumpRecord, dict[str, Any]]:
    """Return the record and the tensors (`actordbg.formats.encoding.PlainTensor`) of a packed call with its rows separated."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    try:
        total = tensors["sequences"].values.size
        starts, lengths, packing = _borders(tensors, total)
    except (KeyError, ValueError) as error:
        note = {"rows": f"packed rows cannot be separated: {error}"}
        return replace(record, extra={**record.extra, **note}, replayable=False), dict(tensors)
    longest = int(lengths.max())
    at = starts[:, None] + np.arange(longest)
    real = np.arange(longest) < lengths[:, None]
    mask, places = kept.get("attention_mask"), tensors.get(POSITIONS)
    shapes = ((total,), (1, total), *(() if places is None else (places.values.shape,)))
    unpacked = {**kept}
    if mask is None:
        unpacked["attention_mask"] = PlainTensor("int64", real.astype("<i8"), contiguous_strides(real.shape))
    for name, tensor in kept.items():
        if tensor.values.shape in shapes:
            unpacked[name] = _spread(tensor, at, real)
        elif tensor.values.shape == (1, total - 1) and (name == "action_mask" or name.startswith(OUTPUT_PREFIX)):
            unpacked[name] = _spread(tensor, at[:, :-1], real[:, 1:])
    attended = unpacked["attention_mask"].values != 0
    if places is not None:
        own = _spread(places, at, real)
        if (own.values != attended.cumsum(1) - 1)[attended].any():
            unpacked["position_ids"] = own
    actions = unpacked["action_mask"].values.shape[-1] if "action_mask" in unpacked else None
    rows: dict[str, Any] = {"batch_size": len(starts), "seq_len": longest, "tokens": int(attended.sum()), "action_len": actions}
    outside = total - int(lengths.sum()) if OFFSETS in tensors else 0
    note = {"rows": f"{outside} of {total} packed tokens are in no row and are left out"} if outside else {}
    if places is not None:
        from actordbg.formats.nested_values import note_of_packing, with_flash_leak  # for packed rows alone

        note |= note_of_packing(packing, masked=mask is not None)
        record = replace(record, arguments=with_flash_leak(record.arguments, kept, places.values))
    return replace(record, packing_samples=packing, extra={**record.extra, **note}, **rows), unpacked


def _borders(tensors: Mapping[str, Any], total: int) -> tuple[_Array, _Array, bool]:
    """Return the start and length of each row, and whether several were packed into one. ValueError if they are impossible."""
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
        if mask is not None:  # padding also has position 0
            real = mask.values.ravel() != 0
            begins[1:] &= real[1:] & real[:-1]
        starts = np.union1d(np.flatnonzero(begins), np.arange(0, max(1, total), width))
        ends = np.append(starts[1:], total)
        filled = np.flatnonzero(ends - starts > 1)
        if mask is None:
            starts, ends = (bounds[: filled[-1] + 1] if filled.size else bounds[:1] for bounds in (starts, ends))
    lengths = ends - starts
    if not starts.size or lengths.min() < 0 or starts[0] < 0 or ends.max() > total or not lengths.max():
        raise ValueError(f"borders {[*starts[:4].tolist(), '...', *ends[-1:].tolist()]} of {total} tokens")
    if starts.size * int(lengths.max()) > MOST_PLACES:
        raise ValueError(f"{starts.size} rows of up to {lengths.max()} tokens have too many positions")
    return starts[lengths > 0], lengths[lengths > 0], len(starts) > given


def _spread(packed: Any, at: _Array, real: _Array) -> Any:
    """Spread the values of one long row over separate rows, with 0 as padding."""
    flat = packed.values.ravel()
    values = np.where(real, flat[np.minimum(at, flat.size - 1)], flat.dtype.type(0)) if flat.size else np.zeros(at.shape)
    return replace(packed, values=values.astype(flat.dtype, copy=False), strides=contiguous_strides(values.shape))
