"""The bytes of one dump file, both ways, without torch.

Layout::

    magic      4 bytes  0x184D2A5A little endian: a zstd *skippable frame*
    length     4 bytes  little endian, N
    record     N bytes  DumpRecord as JSON (UTF-8)
    payload             exactly one zstd frame with content size and content checksum; inside it, a safetensors file

`zstd -d` skips the first frame, so it turns the file into a plain safetensors file that any reader opens.

Reading trusts nothing: the content size is checked against a cap before anything is allocated, trailing bytes and second
frames are refused (`stream_reader` would return a truncated frame without an error, so it is never used), and the
payload's SHA-256 must be the record's.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import zstandard

from actordbg.errors import CorruptDump, StoreProblem
from actordbg.record import DumpRecord

SUFFIX = ".safetensors.zst"
MAGIC = struct.pack("<I", 0x184D2A5A)
DEFAULT_CAP = 8 * 2**30
"""Largest payload, in bytes after decompression, that a reader allocates unless told otherwise."""
MAX_RECORD = 4 * 2**20
"""Largest record, in bytes of JSON, that a reader accepts."""

_FIRST_READ = 4096
_HINT = "run `actordbg dump verify` to list every damaged file; `actordbg dump prune --damaged` removes them"


def pack(record: DumpRecord, payload: bytes, level: int = 3) -> bytes:
    """One dump file's bytes from a finished record and its safetensors payload, compressed at zstd `level`."""
    header = record.to_json().encode()
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return b"".join((MAGIC, struct.pack("<I", len(header)), header, compressor.compress(payload)))


def read_record(path: str | os.PathLike[str]) -> DumpRecord:
    """The record of a dump file; reads its first few kilobytes and decompresses nothing.

    Raises CorruptDump, NewerFormat, or StoreProblem when the file cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_FIRST_READ)
            size = _record_size(head, path)
            while len(head) < 8 + size:
                more = file.read(8 + size - len(head))
                if not more:
                    raise CorruptDump(f"{path}: ends inside its record", hint=_HINT)
                head += more
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None
    return _parse(head[8 : 8 + size], path)


def read_payload(path: str | os.PathLike[str], max_bytes: int = DEFAULT_CAP) -> tuple[DumpRecord, bytes]:
    """Record and checked safetensors bytes of a dump file. At most `max_bytes` are allocated for the payload."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None
    return unpack(data, path, max_bytes)


def unpack(
    data: bytes, name: str | os.PathLike[str] = "dump", max_bytes: int = DEFAULT_CAP
) -> tuple[DumpRecord, bytes]:
    """Record and checked safetensors bytes from a dump file's bytes; `name` is used in messages."""
    size = _record_size(data[:8], name)
    if len(data) < 8 + size:
        raise CorruptDump(f"{name}: ends inside its record", hint=_HINT)
    record = _parse(data[8 : 8 + size], name)
    payload = _decompress(memoryview(data)[8 + size :], name, max_bytes)
    if hashlib.sha256(payload).hexdigest() != record.payload_sha256:
        raise CorruptDump(f"{name}: the payload's SHA-256 is not the record's", hint=_HINT)
    return record, payload


def _record_size(head: bytes, name: str | os.PathLike[str]) -> int:
    if len(head) < 8 or head[:4] != MAGIC:
        raise CorruptDump(f"{name}: not an actordbg dump (wrong magic)", hint=_HINT)
    size: int = struct.unpack("<I", head[4:8])[0]
    if size > MAX_RECORD:
        raise CorruptDump(f"{name}: its record claims {size} bytes, over the limit of {MAX_RECORD}", hint=_HINT)
    return size


def _parse(text: bytes, name: str | os.PathLike[str]) -> DumpRecord:
    try:
        return DumpRecord.from_json(text)
    except StoreProblem as error:
        raise type(error)(f"{name}: {error.message}", hint=error.hint) from None


def _decompress(frame: memoryview, name: str | os.PathLike[str], max_bytes: int) -> bytes:
    try:
        parameters = zstandard.get_frame_parameters(bytes(frame[:32]))
        if parameters.content_size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            raise CorruptDump(f"{name}: its payload does not state its size", hint=_HINT)
        if parameters.content_size > max_bytes:
            raise CorruptDump(
                f"{name}: its payload claims {parameters.content_size} bytes, over the limit of {max_bytes}", hint=_HINT
            )
        if not parameters.has_checksum:
            raise CorruptDump(f"{name}: its payload has no checksum", hint=_HINT)
        if parameters.window_size > max(max_bytes, 2**27):
            raise CorruptDump(f"{name}: its payload claims a window of {parameters.window_size} bytes", hint=_HINT)
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDump(f"{name}: damaged payload: {error}", hint=_HINT) from None
