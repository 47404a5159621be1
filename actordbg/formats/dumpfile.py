"""Read and write the bytes of a dump file, without torch.

Layout::

    magic      4 bytes  0x184D2A5A little endian: a zstd *skippable frame*
    length     4 bytes  little endian, N
    record     N bytes  DumpRecord as one line of JSON (UTF-8), a newline, and the CRC-32 of that line as 8 hex digits
    payload             exactly one zstd frame with content size and content checksum; inside it, a safetensors file

`zstd -d` skips the first frame, so it turns the file into a plain safetensors file that any reader opens.

Reading trusts nothing: the content size is checked against a cap before anything is allocated; trailing bytes and second
frames are refused (`stream_reader` would return a truncated frame without an error, so it is never used). zstd's own
checksum (XXH64) covers every byte of the payload and the CRC every byte of the record, so damage is always detected. The
payload's SHA-256 in the record is its identity; `dump verify` also checks it (`hash_too`). Loading for a replay does not:
without SHA instructions it costs as much as everything else together, and finds nothing that the checksum does not.

Frame and checksum prove that a file is unchanged, not that actordbg wrote it. So `check` compares record and safetensors
header before anything is allocated: the same tensors, each stored losslessly, with strides under which no two elements share
memory, and within the memory limit; and the payload's label names this dump, so that valid halves of different files are not
combined. Loading and `dump verify` both run it, so a dump that verifies also loads.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import zlib
from operator import itemgetter
from typing import NamedTuple

import zstandard

from actordbg.base.errors import StoreProblem, UnreadableFile, Unsupported
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
from actordbg.formats.record_reading import damaged, parse_record, strict_header
from actordbg.formats.store_files import AnyPath, open_regular

IMPORTED = "import"
"""`source` of a dump that an old pickle, or a file that a run left behind, became."""
DEFAULT_CAP = 8 * 2**30
"""Largest payload, in bytes after decompression, that a reader ever allocates."""


class Entry(NamedTuple):
    """A tensor of a safetensors payload: dtype by torch's name, shape, and offset of its bytes in the payload."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


_FRAME_ROOM = 65_536
"""More bytes than an incompressible zstd frame takes beyond 129/128 of its content."""


def pack(record: DumpRecord, payload: bytes, level: int = 3) -> bytes:
    """Build a dump file from a finished record and its safetensors payload, compressed at zstd `level`.

    Raises Unsupported for a record or a payload that no reader would accept: the record is parsed as a reader would.
    """
    from actordbg.formats.encoding import checked_line, pack_line  # with numpy, which reading does without

    line = checked_line(record, payload)
    try:
        parse_record(line)
    except StoreProblem as error:
        hint = "leave out the arguments that the replay does not need"
        raise Unsupported(f"dump {record.dump_id}: no reader would accept it: {error.message}", hint=hint) from None
    return pack_line(line, payload, level)


def read_record(path: AnyPath) -> DumpRecord:
    """Read the record of a dump file: its first few kilobytes, without decompressing.

    Raises CorruptDump, NewerFormat, or StoreProblem if the file cannot be read.
    """
    try:
        return parse_line(read_line(path)[0], path)
    except OSError as error:
        raise unreadable(path, error) from None


def read_line(path: AnyPath) -> tuple[bytes, int]:
    """Read the record's JSON of a dump file, check its CRC-32, and count the bytes that follow. Raises CorruptDump or OSError."""
    with open(open_regular(path), "rb") as file:
        size = _record_size(file.read(8), path)
        header = file.read(size)
        rest = file.seek(0, os.SEEK_END) - 8 - size
    if rest < 0:
        raise damaged(f"{path}: ends inside its record")
    return record_line(header, path), rest


def unreadable(path: AnyPath, error: OSError) -> StoreProblem:
    """Return the error for a file that cannot be read."""
    return UnreadableFile(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions")


def record_line(header: bytes, name: AnyPath = "dump") -> bytes:
    """Return the record's JSON from the content of the skippable frame, after checking its CRC-32. Raises CorruptDump."""
    line, newline, check = header[:-9], header[-9:-8], header[-8:]
    if newline != b"\n" or check != b"%08x" % zlib.crc32(line):
        raise damaged(f"{name}: damaged record (its CRC-32 does not match)")
    return line


def read_payload(path: AnyPath, *, hash_too: bool = True) -> tuple[DumpRecord, bytes]:
    """Read the record and the safetensors bytes of a dump file, and check them.

    Allocates at most DEFAULT_CAP bytes for the payload, and less than twice as many for payload and file together.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise unreadable(path, error) from None
    return unpack(data, path, hash_too=hash_too)


def read_file(path: AnyPath) -> bytes:
    """Read the bytes of a dump file. CorruptDump if it is larger than its payload can be, OSError if it is unreadable."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _FRAME_ROOM:
            head = 8 + _record_size(file.read(8), path)
            file.seek(head)
            try:
                content = zstandard.frame_content_size(file.read(32))
            except zstandard.ZstdError:
                content = -1
            file.seek(0)
            if content < 0:  # no frame, or one of unknown size: enough for `unpack` to say what is wrong
                return file.read(head + 32)
            if size > min(head + content + content // 128 + _FRAME_ROOM, 2 * DEFAULT_CAP + MAX_RECORD):
                raise damaged(f"{path}: has {size} bytes, over what its payload of {content} can take")
        return file.read(size)


def unpack(
    data: bytes,
    name: AnyPath = "dump",
    *,
    hash_too: bool = True,
) -> tuple[DumpRecord, bytes]:
    """Return the record and the checked safetensors bytes from a dump file's bytes; `name` is used in messages."""
    size = _record_size(data[:8], name)
    if len(data) < 8 + size:
        raise damaged(f"{name}: ends inside its record")
    record = parse_line(record_line(data[8 : 8 + size], name), name)
    payload = decompress(memoryview(data)[8 + size :], f"{name}: its payload", DEFAULT_CAP)
    if hash_too:
        check_hash(record, payload, name)
    return record, payload


def line_of(data: bytes, name: AnyPath = "dump") -> bytes:
    """Return the exact record line of a dump file's bytes, after checking its CRC-32."""
    return record_line(data[8 : 8 + _record_size(data[:8], name)], name)


def check_hash(record: DumpRecord, payload: bytes, name: AnyPath = "dump") -> None:
    """Raise CorruptDump unless the payload has the SHA-256 that the record names."""
    if hashlib.sha256(payload).hexdigest() != record.payload_sha256:
        raise damaged(f"{name}: the payload's SHA-256 is not the record's")


def payload_entries(payload: bytes, name: AnyPath = "dump") -> dict[str, Entry]:
    """Read the entries of a safetensors payload, by key, from its JSON header.

    Raises CorruptDump unless the entries cover the data exactly, in sequence, with the bytes that their shapes need.
    """
    size = int.from_bytes(payload[:8], "little")
    if not 0 < size <= min(len(payload) - 8, MAX_RECORD):
        raise damaged(f"{name}: the payload is not a safetensors file")
    try:
        header = strict_header(payload[8 : 8 + size])
        items = [(item["data_offsets"], key, item["dtype"], item["shape"]) for key, item in header.items()]
        items.sort(key=itemgetter(0))
        end, entries, numbers = 0, {}, [0]
        for offsets, key, code, shape in items:
            dtype, width = SAFETENSORS_DTYPES[code]
            first, last = offsets
            if type(shape) is not list or len(shape) > MAX_DIMS:
                raise damaged(f"{name}: entry {key!r:.80} of the payload has an impossible shape")
            numbers += (first, last, *shape)
            if first != end or last - first != width * math.prod(shape):
                raise damaged(f"{name}: entry {key!r:.80} of the payload has impossible offsets")
            entries[key] = Entry(dtype, tuple(shape), 8 + size + first)
            end = last
        if not {*map(type, numbers)} <= {int} or min(numbers) < 0:  # True and 1.0 are equal to 1, but torch minds
            raise ValueError("not sizes")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(f"{name}: the payload's safetensors header is damaged") from None
    if end != len(payload) - 8 - size:
        raise damaged(f"{name}: the payload has bytes that belong to no tensor")
    return entries


def _record_size(head: bytes, name: AnyPath) -> int:
    if len(head) < 8 or head[:4] != MAGIC:
        raise damaged(f"{name}: not an actordbg dump (wrong magic)")
    size = int.from_bytes(head[4:8], "little")
    if size > MAX_RECORD:
        raise damaged(f"{name}: its record claims {size} bytes, over the limit of {MAX_RECORD}")
    return size


def parse_line(line: bytes, name: AnyPath = "dump") -> DumpRecord:
    """Parse a record from a line of JSON; `name` begins error messages."""
    try:
        return parse_record(line)
    except StoreProblem as error:
        prefix = "" if error.message.startswith(f"{name}: ") else f"{name}: "
        raise type(error)(f"{prefix}{error.message}", hint=error.hint) from None


def decompress(frame: bytes | memoryview, what: str, most: int) -> bytes:
    """Decompress exactly one zstd frame with content size and checksum; `what` begins messages.

    Never allocates more than `most` bytes.
    """
    try:
        parameters = zstandard.get_frame_parameters(frame[:32])
        size = parameters.content_size
        if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise damaged(f"{what} does not state its size")
        if size > most or size + len(frame) > 2 * most + _FRAME_ROOM:
            raise damaged(f"{what} claims {size} bytes, over the limit of {most}")
        if not parameters.has_checksum:
            raise damaged(f"{what} has no checksum")
        if parameters.window_size > 2 * max(most, 2**17):
            raise damaged(f"{what} claims a window of {parameters.window_size} bytes")
        if not hasattr(_own, "decompressor"):
            _own.decompressor = zstandard.ZstdDecompressor()
        content: bytes = _own.decompressor.decompress(frame, max_output_size=most, allow_extra_data=False)
        return content
    except MemoryError:
        hint = "use a machine with more memory, or run `actordbg dump show` without --values"
        raise StoreProblem(f"{what} of {size} bytes does not fit into memory", hint=hint) from None
    except zstandard.ZstdError as error:
        raise damaged(f"{what} is damaged: {error}") from None


_own = threading.local()
"""Holds a decompressor per thread: creating one takes longer than decompressing a small payload."""
_MASKS = ("int64", "int32", "int16", "int8", "uint8", "float64", "float32", "float16", "bfloat16")
_NARROWER = {(dtype, "bool") for dtype in _MASKS} | {
    ("int32", "uint16"), ("int32", UINT24), ("int64", "uint16"), ("int64", UINT24), ("int64", "int32"),
}  # fmt: skip
"""(dtype, stored) of all narrower forms in which `payload.encode` may store a tensor."""


def check(record: DumpRecord, payload: bytes, name: str = "dump") -> dict[str, Entry]:
    """Check a payload against its record and return its entries by key. Raises CorruptDump.

    A reader then allocates less than twice DEFAULT_CAP, including the payload and a copy of it.
    """
    entries = payload_entries(payload, name)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    room = 2 * len(payload)
    for tensor, spec in record.tensors.items():
        room += _room(tensor, spec, name)
        for key, kind in spec.parts(tensor):
            if key in expected:
                raise damaged(f"{name}: two tensors of the record are both stored as {key!r:.80}")
            expected[key] = kind, spec.shape
    if {key: entry[:2] for key, entry in entries.items()} != expected:
        raise damaged(f"{name}: the payload's tensors are not those of its record")
    header = payload[8 : 8 + int.from_bytes(payload[:8], "little")]
    if b'"actordbg"' in header and label(record).encode() not in header:
        raise damaged(f"{name}: its payload says that it belongs to another dump")
    if room > 2 * DEFAULT_CAP:
        raise damaged(f"{name}: its tensors take {room} bytes, over the limit of {2 * DEFAULT_CAP}")
    for key, entry in entries.items():
        if entry.dtype == "bool" and payload[entry.offset : entry.offset + math.prod(entry.shape)].translate(None, b"\0\1"):
            raise damaged(f"{name}: {key!r:.80} holds bytes that are neither true nor false")
    for tensor, spec in record.tensors.items():
        if 0 in spec.strides and 0 not in spec.shape:
            for key, _ in spec.parts(tensor):
                _check_expanded(key, spec, entries[key], payload, name)
    return entries


def _room(tensor: str, spec: TensorSpec, name: str) -> int:
    """Return the bytes that this tensor takes beside the payload. CorruptDump for a spec that `encode` never writes."""
    if spec.dtype not in SIZES or (spec.stored != spec.dtype and (spec.dtype, spec.stored) not in _NARROWER):
        what = f"tensor {tensor!r:.80} of dtype {spec.dtype!r:.40} cannot be stored as {spec.stored!r:.40}"
        raise damaged(f"{name}: {what}")
    width, count = SIZES[spec.dtype], math.prod(spec.shape)
    room = width * count if spec.stored != spec.dtype else 0
    if count == 0 or spec.strides == contiguous_strides(spec.shape):
        return room
    reach = reach_of(spec.shape, spec.strides)
    if reach is None:
        raise damaged(f"{name}: the strides of tensor {tensor!r:.80} overlap")
    return room + width * (reach + 1)


def _check_expanded(key: str, spec: TensorSpec, entry: Entry, payload: bytes, name: str) -> None:
    """Raise CorruptDump unless the payload repeats the same value along each dimension of stride 0."""
    stored = memoryview(payload)[entry.offset : entry.offset + SIZES[entry.dtype] * math.prod(entry.shape)]
    for dim, (stride, size) in enumerate(zip(spec.strides, spec.shape, strict=True)):
        if stride or size < 2:
            continue
        inner = SIZES[entry.dtype] * math.prod(spec.shape[dim + 1 :])
        for first in range(0, len(stored), inner * size):
            if stored[first : first + inner * (size - 1)] != stored[first + inner : first + inner * size]:
                raise damaged(f"{name}: tensor {key!r:.80} claims one value where it has several")
