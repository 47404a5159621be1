"""The bytes of one dump file, both ways, without torch.

Layout::

    magic      4 bytes  0x184D2A5A little endian: a zstd *skippable frame*
    length     4 bytes  little endian, N
    record     N bytes  DumpRecord as one line of JSON (UTF-8), a newline, and the CRC-32 of that line as 8 hex digits
    payload             exactly one zstd frame with content size and content checksum; inside it, a safetensors file

`zstd -d` skips the first frame, so it turns the file into a plain safetensors file that any reader opens.

Reading trusts nothing: the content size is checked against a cap before anything is allocated, trailing bytes and second
frames are refused (`stream_reader` would return a truncated frame without an error, so it is never used). zstd's own
checksum (XXH64) covers every byte of the payload and the CRC every byte of the record, so damage is always found. The
payload's SHA-256 in the record is its identity; `dump verify` checks it too (`hash_too`). Loading for a replay does not:
without SHA instructions it costs as much as everything else together, and finds nothing that the checksum does not.

Frame and checksum say that a file is as it was written, not that it was written by us. So `check` holds record and safetensors
header against each other before anything is allocated: the same tensors, each stored in a form that loses nothing, strides under
which no two elements share memory, room for all of it; and the payload's own sentence about itself names this dump, so that two
good halves of different files are not taken for one. `payload.widen` and `dump verify` both ask, so what verifies also loads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import zlib
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import zstandard

from actordbg.base.errors import CorruptDump, StoreProblem, Unsupported
from actordbg.formats.dump_record import (
    MAGIC,
    MAX_DIMS,
    MAX_RECORD,
    SAFETENSORS_DTYPES,
    SIZES,
    UINT24,
    DumpRecord,
    TensorSpec,
    contiguous_strides,
    label,
    reach_of,
)
from actordbg.formats.record_reading import parse_record, strict_header
from actordbg.formats.store_files import open_regular

DEFAULT_CAP = 8 * 2**30
"""Largest payload, in bytes after decompression, that a reader allocates unless told otherwise."""


class Entry(NamedTuple):
    """One tensor of a safetensors payload: dtype by torch's name, shape, and where its bytes begin in the payload."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


Parser = Callable[[bytes], DumpRecord]
_FIRST_READ, _SMALL = 4096, 2**18
"""Bytes that are read at once: for a record, and for a dump file, of which most have fewer."""
_FRAME_ROOM = 65_536
"""More bytes than a zstd frame takes beside its content and 1/128 of it, where nothing can be compressed."""
HINT = "run `actordbg dump verify` to list every damaged file; `actordbg dump prune --damaged` removes them"


def pack(record: DumpRecord, payload: bytes, level: int = 3) -> bytes:
    """One dump file's bytes from a finished record and its safetensors payload, compressed at zstd `level`.

    Raises Unsupported for a record or a payload that no reader would accept. The record is read as a reader reads it.
    """
    from actordbg.formats.encoding import checked_line, pack_line  # with numpy, which reading does without

    line = checked_line(record, payload)
    try:
        parse_record(line)
    except StoreProblem as error:
        hint = "leave out the arguments that the replay does not need"
        raise Unsupported(f"dump {record.dump_id}: no reader would accept it: {error.message}", hint=hint) from None
    return pack_line(line, payload, level)


def read_record(path: str | os.PathLike[str]) -> DumpRecord:
    """The record of a dump file; reads its first few kilobytes and decompresses nothing.

    Raises CorruptDump, NewerFormat, or StoreProblem when the file cannot be read.
    """
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            head = file.read(_FIRST_READ)
            size = _record_size(head, path)
            while len(head) < 8 + size:
                more = file.read(8 + size - len(head))
                if not more:
                    raise CorruptDump(f"{path}: ends inside its record", hint=HINT)
                head += more
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None
    return parse_line(record_line(head[8 : 8 + size], path), path)


def record_line(header: bytes, name: str | os.PathLike[str] = "dump") -> bytes:
    """The record's JSON from the content of the skippable frame, its CRC-32 checked. Raises CorruptDump."""
    line, newline, check = header[:-9], header[-9:-8], header[-8:]
    if newline != b"\n" or check != b"%08x" % zlib.crc32(line):
        raise CorruptDump(f"{name}: damaged record (its CRC-32 does not match)", hint=HINT)
    return line


def read_payload(
    path: str | os.PathLike[str], max_bytes: int = DEFAULT_CAP, *, hash_too: bool = True, parse: Parser = parse_record
) -> tuple[DumpRecord, bytes]:
    """Record and checked safetensors bytes of a dump file. At most `max_bytes` are allocated for the payload, and under twice
    as many for payload and file together. `parse`: what reads the record, in the place of `parse_record`.
    """
    try:
        data = read_file(path, max_bytes)
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None
    return unpack(data, path, max_bytes, hash_too=hash_too, parse=parse)


def read_file(path: str | os.PathLike[str], max_bytes: int = DEFAULT_CAP) -> bytes:
    """The bytes of a dump file, unless it has more than its payload can take. CorruptDump, or OSError if it cannot be read."""
    with open(open_regular(path), "rb", buffering=0) as file:
        data, size = file.read(_SMALL), os.fstat(file.fileno()).st_size
        if len(data) == size <= _FRAME_ROOM:
            return data
        head = 8 + _record_size(data[:8], path)
        frame = data[head : head + 32] if len(data) >= head + 32 else os.pread(file.fileno(), 32, head)
        try:
            content = zstandard.frame_content_size(frame)
        except zstandard.ZstdError:
            content = -1
        if content < 0:  # no frame, or it does not say: enough for `unpack` to say what is wrong
            return os.pread(file.fileno(), head + 32, 0)
        if size > min(head + content + content // 128 + _FRAME_ROOM, 2 * max_bytes + MAX_RECORD):
            raise CorruptDump(f"{path}: has {size} bytes, over what its payload of {content} can take", hint=HINT)
        return data if len(data) == size else data + file.read()


def unpack(
    data: bytes,
    name: str | os.PathLike[str] = "dump",
    max_bytes: int = DEFAULT_CAP,
    *,
    hash_too: bool = True,
    parse: Parser = parse_record,
) -> tuple[DumpRecord, bytes]:
    """Record and checked safetensors bytes from a dump file's bytes; `name` is used in messages."""
    size = _record_size(data[:8], name)
    if len(data) < 8 + size:
        raise CorruptDump(f"{name}: ends inside its record", hint=HINT)
    record = parse_line(record_line(data[8 : 8 + size], name), name, parse)
    payload = _decompress(memoryview(data)[8 + size :], name, max_bytes)
    if hash_too:
        check_hash(record, payload, name)
    return record, payload


def line_of(data: bytes, name: str | os.PathLike[str] = "dump") -> bytes:
    """The exact line of JSON that a dump file's bytes begin with, its CRC-32 checked."""
    return record_line(data[8 : 8 + _record_size(data[:8], name)], name)


def check_hash(record: DumpRecord, payload: bytes, name: str | os.PathLike[str] = "dump") -> None:
    """CorruptDump unless the payload is the one that the record names by its SHA-256."""
    if hashlib.sha256(payload).hexdigest() != record.payload_sha256:
        raise CorruptDump(f"{name}: the payload's SHA-256 is not the record's", hint=HINT)


def payload_entries(payload: bytes, name: str | os.PathLike[str] = "dump") -> dict[str, Entry]:
    """What a safetensors payload holds, by key, from its JSON header alone.

    Raises CorruptDump unless the entries cover the data exactly, one after another, with the bytes that their shapes need.
    """
    size = int.from_bytes(payload[:8], "little")
    if not 0 < size <= min(len(payload) - 8, MAX_RECORD):
        raise CorruptDump(f"{name}: the payload is not a safetensors file", hint=HINT)
    try:
        header = strict_header(payload[8 : 8 + size])
        found = [(item["data_offsets"], key, item["dtype"], item["shape"]) for key, item in header.items()]
        found.sort(key=itemgetter(0))
        end, entries, numbers = 0, {}, [0]
        for offsets, key, code, shape in found:
            dtype, width = SAFETENSORS_DTYPES[code]
            first, last = offsets
            if type(shape) is not list or len(shape) > MAX_DIMS:
                raise CorruptDump(f"{name}: entry {key!r:.80} of the payload has an impossible shape", hint=HINT)
            numbers += (first, last, *shape)
            if first != end or last - first != width * math.prod(shape):
                raise CorruptDump(f"{name}: entry {key!r:.80} of the payload has impossible offsets", hint=HINT)
            entries[key] = Entry(dtype, tuple(shape), 8 + size + first)
            end = last
        if not {*map(type, numbers)} <= {int} or min(numbers) < 0:  # True and 1.0 are equal to 1, but torch minds
            raise ValueError("not sizes")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptDump(f"{name}: the payload's safetensors header is damaged", hint=HINT) from None
    if end != len(payload) - 8 - size:
        raise CorruptDump(f"{name}: the payload has bytes that belong to no tensor", hint=HINT)
    return entries


def _record_size(head: bytes, name: str | os.PathLike[str]) -> int:
    if len(head) < 8 or head[:4] != MAGIC:
        raise CorruptDump(f"{name}: not an actordbg dump (wrong magic)", hint=HINT)
    size = int.from_bytes(head[4:8], "little")
    if size > MAX_RECORD:
        raise CorruptDump(f"{name}: its record claims {size} bytes, over the limit of {MAX_RECORD}", hint=HINT)
    return size


def parse_line(line: bytes, name: str | os.PathLike[str] = "dump", parse: Parser = parse_record) -> DumpRecord:
    """The record that a line of JSON holds; what is wrong with it is said of `name`."""
    try:
        return parse(line)
    except StoreProblem as error:
        prefix = "" if error.message.startswith(f"{name}: ") else f"{name}: "
        raise type(error)(f"{prefix}{error.message}", hint=error.hint) from None


def _decompress(frame: memoryview, name: str | os.PathLike[str], max_bytes: int) -> bytes:
    try:
        parameters = zstandard.get_frame_parameters(frame[:32])
        if parameters.content_size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise CorruptDump(f"{name}: its payload does not state its size", hint=HINT)
        if parameters.content_size > max_bytes or parameters.content_size + len(frame) > 2 * max_bytes:
            raise CorruptDump(
                f"{name}: its payload claims {parameters.content_size} bytes, over the limit of {max_bytes}", hint=HINT
            )
        if not parameters.has_checksum:
            raise CorruptDump(f"{name}: its payload has no checksum", hint=HINT)
        if parameters.window_size > max(max_bytes, 2**27):
            raise CorruptDump(f"{name}: its payload claims a window of {parameters.window_size} bytes", hint=HINT)
        return _decompressor().decompress(frame, max_output_size=max_bytes, allow_extra_data=False)
    except MemoryError:
        raise StoreProblem(
            f"{name}: there is no memory for its payload of {parameters.content_size} bytes",
            hint="use a machine with more memory; `actordbg dump show` without --values needs none",
        ) from None
    except zstandard.ZstdError as error:
        raise CorruptDump(f"{name}: damaged payload: {error}", hint=HINT) from None


_own = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: making one takes longer than what it does to a small payload."""
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstandard.ZstdDecompressor()
    return _own.decompressor  # type: ignore[no-any-return]


_MASKS = ("int64", "int32", "int16", "int8", "uint8", "float64", "float32", "float16", "bfloat16")
_NARROWER = {(dtype, "bool") for dtype in _MASKS} | {
    ("int32", "uint16"), ("int32", UINT24), ("int64", "uint16"), ("int64", UINT24), ("int64", "int32"),
}  # fmt: skip
"""(dtype, stored) of every form beside itself in which `payload.encode` may store a tensor."""


def check(record: DumpRecord, payload: bytes, name: str = "dump", max_bytes: int = DEFAULT_CAP) -> dict[str, Entry]:
    """The payload's entries by key, once they are known to be what the record says. Raises CorruptDump.

    What a reader then allocates, the payload and a copy of it included, stays under twice `max_bytes`.
    """
    entries = entries_as_written(record, payload) or _compared(record, payload, name)
    room = 2 * len(payload)
    for tensor, spec in record.tensors.items():
        room += _room(tensor, spec, name)
    if room > 2 * max_bytes:
        raise CorruptDump(f"{name}: its tensors take {room} bytes, over the limit of {2 * max_bytes}", hint=HINT)
    _check_truths(entries, payload, name)
    for tensor, spec in record.tensors.items():
        if 0 in spec.strides and 0 not in spec.shape:
            for key, _ in spec.parts(tensor):
                _check_expanded(key, spec, entries[key], payload, name)
    return entries


def _compared(record: DumpRecord, payload: bytes, name: str) -> dict[str, Entry]:
    """The entries out of the payload's header, which must be those of the record's tensors. Its sentence about itself, too."""
    entries = payload_entries(payload, name)
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor, spec in record.tensors.items():
        _room(tensor, spec, name)
        for key, kind in spec.parts(tensor):
            if key in wanted:
                raise CorruptDump(f"{name}: two tensors of the record are both stored as {key!r:.80}", hint=HINT)
            wanted[key] = kind, spec.shape
    if {key: entry[:2] for key, entry in entries.items()} != wanted:
        raise CorruptDump(f"{name}: the payload's tensors are not those of its record", hint=HINT)
    header = payload[8 : 8 + int.from_bytes(payload[:8], "little")]
    if b'"actordbg"' in header and label(record).encode() not in header:
        raise CorruptDump(f"{name}: its payload says that it belongs to another dump", hint=HINT)
    return entries


def _room(tensor: str, spec: TensorSpec, name: str) -> int:
    """Bytes that this tensor takes beside the payload; CorruptDump for a spec that was never written by `encode`."""
    if spec.dtype not in SIZES or (spec.stored != spec.dtype and (spec.dtype, spec.stored) not in _NARROWER):
        what = f"tensor {tensor!r:.80} of dtype {spec.dtype!r:.40} cannot be stored as {spec.stored!r:.40}"
        raise CorruptDump(f"{name}: {what}", hint=HINT)
    width, count = SIZES[spec.dtype], math.prod(spec.shape)
    room = width * count if spec.stored != spec.dtype else 0
    if count == 0 or spec.strides == contiguous_strides(spec.shape):
        return room
    reach = reach_of(spec.shape, spec.strides)
    if reach is None:
        raise CorruptDump(f"{name}: the strides of tensor {tensor!r:.80} overlap", hint=HINT)
    return room + width * (reach + 1)


def _check_truths(entries: dict[str, Entry], payload: bytes, name: str) -> None:
    for key, entry in entries.items():
        if entry.dtype == "bool" and payload[entry.offset : entry.offset + math.prod(entry.shape)].translate(None, b"\0\1"):
            raise CorruptDump(f"{name}: {key!r:.80} holds bytes that are neither true nor false", hint=HINT)


def _check_expanded(key: str, spec: TensorSpec, entry: Entry, payload: bytes, name: str) -> None:
    """Along a dimension of stride 0 there is one value only, and the payload holds it as often as the dimension is long."""
    stored = memoryview(payload)[entry.offset : entry.offset + SIZES[entry.dtype] * math.prod(entry.shape)]
    for dim, (stride, size) in enumerate(zip(spec.strides, spec.shape, strict=True)):
        if stride or size < 2:
            continue
        inner = SIZES[entry.dtype] * math.prod(spec.shape[dim + 1 :])
        for first in range(0, len(stored), inner * size):
            if stored[first : first + inner * (size - 1)] != stored[first + inner : first + inner * size]:
                raise CorruptDump(f"{name}: tensor {key!r:.80} claims one value where it has several", hint=HINT)


_MOST_HEADER = 4096
"""Bytes of a header that is remembered: most have some hundred."""
_REMEMBERED = 512
_CODES = {name: code for code, (name, _) in SAFETENSORS_DTYPES.items()}


def entries_as_written(record: DumpRecord, payload: bytes) -> dict[str, Entry] | None:
    """The payload's entries by key, if its header is the one that our recorder writes for this record, to the byte, and the
    payload as long as it says.
    """
    size = int.from_bytes(payload[:8], "little")
    if size > _MOST_HEADER:
        return None
    written = _written(tuple([(name, spec.stored, spec.shape) for name, spec in record.tensors.items()]), size)
    if written is None or len(payload) != written[2]:
        return None
    header = b'{"__metadata__":{"actordbg":"%b"},%b' % (label(record).encode(), written[0])
    return written[1].copy() if payload[8 : 8 + size] == header.ljust(size) else None


@lru_cache(_REMEMBERED)
def _written(tensors: tuple[tuple[str, str, tuple[int, ...]], ...], size: int) -> tuple[bytes, dict[str, Entry], int] | None:
    """For tensors of these names, `stored` and shapes, and a header of so many bytes: the header behind its label, the entries,
    and the bytes of the whole payload. None if the recorder writes none such.
    """
    parts = [part + (shape,) for name, stored, shape in tensors for part in TensorSpec(stored, (), (), stored).parts(name)]
    if not parts or not all(dtype in SIZES for _, dtype, _ in parts) or len({key for key, *_ in parts}) < len(parts):
        return None
    header: dict[str, object] = {}
    entries: dict[str, Entry] = {}
    end = 0
    for key, dtype, shape in sorted(parts, key=lambda part: (-SIZES[part[1]], part[0])):
        entries[key] = Entry(dtype, shape, 8 + size + end)
        first, end = end, end + SIZES[dtype] * math.prod(shape)
        header[key] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (first, end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)[1:]
    return text.encode(), entries, 8 + size + end
