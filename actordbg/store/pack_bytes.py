"""The bytes of a pack file: offsets of its frames, and contents of its index. No I/O: bytes in, checked numbers out.

Layout::

    head      skippable frame (magic 0x184D2A5B): "ACTORDBGPACK", format version
    blocks    zstd frames with content size and checksum, each at most MAX_BLOCK bytes of content
    index     one zstd frame, also with content size and checksum
    foot      skippable frame: "ACTORDBGPEND", version, where the index lies and how large it is, CRC-32s

so `zstd -l` lists a pack, and `zstd -d` outputs its blocks and the index, concatenated.

A dump's payload is its safetensors header followed by *pieces*: bytes of a block, repeated a number of times (a run of
padding is one element, repeated). Equal pieces are stored once. The index's content::

    6 x u32                     blocks, pieces, dumps, references, bytes of texts, bytes of all dump ids
    texts                       for each dump: its record's line, then its safetensors header (with the 8 bytes of its length)
    ids                         the dump ids, each with a newline
    u32 columns                 blocks: stored bytes, content bytes
                                pieces: block, bytes, times
                                dumps:  bytes of line, bytes of header, references, CRC-32 of line and payload
                                references: piece numbers, dump by dump, in the order of the payload

All numbers are little endian. A column is written as four planes (all low bytes first, all high bytes last), because they
compress to two thirds. The pieces of a block are contiguous, in the order of their numbers, and fill it exactly; blocks
are contiguous and fill the file exactly. So offsets need not be stored, and cannot be wrong.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from actordbg.base.errors import NewerFormat
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import MAX_RECORD, is_plain_name
from actordbg.formats.record_reading import damaged

PACK_SUFFIX = ".pack"
FORMAT = 1
MAGIC = struct.pack("<I", 0x184D2A5B)
MAX_BLOCK = 4 * 2**20
"""Largest content of a block, in bytes, that a reader accepts: the memory that loading a dump takes besides the dump."""
MAX_INDEX = 64 * 2**20
"""Largest content of an index, in bytes, that a reader accepts."""
MAX_DUMPS = 2**16
"""Most dumps of a pack that a reader accepts."""

_LEAST_FRAME = 13
"""Bytes of the smallest zstd frame with a checksum."""
_HEAD = struct.Struct("<12sI")
_HEAD_TAG, _FOOT_TAG = b"ACTORDBGPACK", b"ACTORDBGPEND"
_FOOT = struct.Struct("<12sIQQQII")
_COUNTS = struct.Struct("<6I")
Numbers: TypeAlias = "array[int]"
"""A number for each piece, block or reference."""
HEAD_BYTES = 8 + _HEAD.size
FOOT_BYTES = 8 + _FOOT.size + 4


class Block(NamedTuple):
    """A zstd frame of pieces: its offset in the file, its bytes there, and the bytes of its content."""

    offset: int
    stored: int
    content: int


class Foot(NamedTuple):
    """Location of the index: offset and bytes in the file, bytes of its content, dumps it describes, CRC-32 of its bytes."""

    offset: int
    stored: int
    content: int
    dumps: int
    crc: int


class PackedDump(NamedTuple):
    """The index entry of a dump: its record line, safetensors header, pieces, and the CRC-32 of line and payload."""

    line: bytes
    header: bytes
    refs: Numbers
    crc: int


@dataclass(frozen=True)
class Index:
    """Contents of a pack. By piece: `piece_block`, `piece_start` (in the block's content), `piece_bytes`, `piece_times`."""

    blocks: list[Block]
    piece_block: Numbers
    piece_start: Numbers
    piece_bytes: Numbers
    piece_times: Numbers
    dumps: dict[str, PackedDump]


def head() -> bytes:
    """Return the frame that begins a pack."""
    return MAGIC + struct.pack("<I", _HEAD.size) + _HEAD.pack(_HEAD_TAG, FORMAT)


def foot(offset: int, index: bytes, content: int, dumps: int) -> bytes:
    """Return the frame that ends a pack whose index (`index`: its bytes in the file) begins at `offset`."""
    facts = (offset, len(index), content, dumps, zlib.crc32(index))
    body = _FOOT.pack(_FOOT_TAG, FORMAT, *facts)
    return MAGIC + struct.pack("<I", len(body) + 4) + body + struct.pack("<I", zlib.crc32(body))


def check_head(data: bytes, name: str) -> None:
    """Raise CorruptDump unless the file is a pack, NewerFormat for another format."""
    if len(data) != HEAD_BYTES or data[:8] != head()[:8] or data[8:20] != _HEAD_TAG:
        raise damaged(f"{name}: not an actordbg pack (wrong magic)")
    _check_version(_HEAD.unpack(data[8:])[1], name)


def parse_foot(data: bytes, size: int, name: str) -> Foot:
    """Parse and check the foot of a pack of `size` bytes, from its last FOOT_BYTES bytes."""
    body = data[8:-4]
    if len(data) != FOOT_BYTES or data[:4] != MAGIC or body[:12] != _FOOT_TAG:
        raise damaged(f"{name}: ends without its foot (cut off, or damaged)")
    if data[4:8] != struct.pack("<I", FOOT_BYTES - 8) or data[-4:] != struct.pack("<I", zlib.crc32(body)):
        raise damaged(f"{name}: damaged foot (its CRC-32 does not match)")
    _, version, *rest = _FOOT.unpack(body)
    _check_version(version, name)
    foot = Foot(*rest)
    if foot.offset < HEAD_BYTES or foot.offset + foot.stored + FOOT_BYTES != size:
        raise damaged(f"{name}: its foot has an impossible place for the index")
    if max(foot.content, foot.stored) > MAX_INDEX or foot.dumps > MAX_DUMPS:
        raise damaged(
            f"{name}: its index claims {foot.content} bytes for {foot.dumps} dumps, over the limits of {MAX_INDEX} and "
            f"{MAX_DUMPS}"
        )
    return foot


def _check_version(version: int, name: str) -> None:
    if version != FORMAT:
        raise NewerFormat(
            f"{name}: is a pack of format {version}, this actordbg reads format {FORMAT}",
            hint="upgrade actordbg in this environment: pip install --upgrade actordbg",
        )


def decompress(frame: bytes, content: int, name: str) -> bytes:
    """Decompress exactly one frame that claims `content` bytes; nothing larger is ever allocated."""
    data = dumpfile.decompress(frame, name, content)
    if len(data) != content:
        raise damaged(f"{name} has {len(data)} bytes instead of {content}")
    return data


def encode_index(
    blocks: Sequence[tuple[int, int]],
    pieces: Sequence[tuple[int, int, int]],
    dumps: Mapping[str, PackedDump],
) -> bytes:
    """Return the index's content. blocks: (stored, content). pieces: (block, bytes, times)."""
    texts = b"".join(part for dump in dumps.values() for part in (dump.line, dump.header))
    ids = "".join(f"{dump_id}\n" for dump_id in dumps).encode()
    refs = [number for dump in dumps.values() for number in dump.refs]
    counts = _COUNTS.pack(len(blocks), len(pieces), len(dumps), len(refs), len(texts), len(ids))
    columns: list[Iterable[int]] = [
        *zip(*blocks, strict=True),
        *zip(*pieces, strict=True),
        *zip(*((len(dump.line), len(dump.header), len(dump.refs), dump.crc) for dump in dumps.values()), strict=True),
        refs,
    ]
    return b"".join((counts, texts, ids, *map(_to_planes, columns)))


def index_bytes(pieces: int, dumps: int, references: int, texts: int) -> int:
    """Estimate the bytes of an index of so many pieces, dumps, references and bytes of text (blocks and ids rounded up)."""
    return _COUNTS.size + texts + 4 * (5 * pieces + 4 * dumps + references) + 160 * dumps


def decode_index(content: bytes, foot: Foot, name: str) -> Index:
    """Parse and check the index of a pack with this foot. Raises CorruptDump for any number that does not fit the others."""
    if len(content) < _COUNTS.size:
        raise damaged(f"{name}: its index is too short")
    blocks, pieces, dumps, references, texts, ids = _COUNTS.unpack_from(content)
    columns = 2 * blocks + 3 * pieces + 4 * dumps + references
    if len(content) != _COUNTS.size + texts + ids + 4 * columns or dumps != foot.dumps:
        raise damaged(f"{name}: its index does not have the size of what it claims to list")
    at = _COUNTS.size + texts
    names = _dump_ids(content[at : at + ids], dumps, name)
    sizes = (blocks, blocks, pieces, pieces, pieces, dumps, dumps, dumps, dumps, references)
    starts_at = itertools.accumulate(sizes[:-1], lambda at, size: at + 4 * size, initial=at + ids)
    stored, contents, piece_block, piece_bytes, piece_times, lines, headers, numbers, crc, refs = map(
        _of_planes, itertools.repeat(content), starts_at, sizes
    )
    if references and max(refs) >= pieces:
        raise damaged(f"{name}: its index refers to a piece that is not there")
    packed: dict[str, PackedDump] = {}
    at, first = _COUNTS.size, 0
    for dump_id, line, header, number, check in zip(names, lines, headers, numbers, crc, strict=True):
        text, end = content[at : at + line + header], at + line + header
        packed[dump_id] = PackedDump(text[:line], text[line:], refs[first : first + number], check)
        at, first = end, first + number
    too_long = dumps and (max(lines) > MAX_RECORD or max(headers) > MAX_RECORD + 8 or min(headers) < 8)
    if at != _COUNTS.size + texts or first != references or too_long:
        raise damaged(f"{name}: its index has impossible lengths")
    placed = _place_blocks(stored, contents, foot.offset, name)
    starts = _place_pieces(placed, piece_block, piece_bytes, piece_times, name)
    return Index(placed, piece_block, starts, piece_bytes, piece_times, packed)


def _dump_ids(data: bytes, count: int, name: str) -> list[str]:
    names = data.decode("ascii", "replace").split("\n")
    if names.pop() != "" or len(names) != count or len(set(names)) != count or not all(map(is_plain_name, names)):
        raise damaged(f"{name}: its index has impossible dump ids")
    return names


def _place_blocks(stored: Numbers, contents: Numbers, end: int, name: str) -> list[Block]:
    if sum(stored) != end - HEAD_BYTES or (
        stored
        and (min(stored) < _LEAST_FRAME or max(stored) > 2 * MAX_BLOCK or not 0 < min(contents) <= max(contents) <= MAX_BLOCK)
    ):
        raise damaged(f"{name}: its blocks do not fill the file, or are over the limit")
    offsets = itertools.accumulate(stored[:-1], initial=HEAD_BYTES)
    return [Block(*item) for item in zip(offsets, stored, contents, strict=True)] if stored else []


def _place_pieces(
    blocks: Sequence[Block], piece_block: Numbers, piece_bytes: Numbers, piece_times: Numbers, name: str
) -> Numbers:
    """Return the offset of each piece in its block's content; the pieces of a block must fill it exactly."""
    filled = [0] * len(blocks)
    starts = array("I", bytes(4 * len(piece_block)))
    try:
        for number, block in enumerate(piece_block):
            starts[number] = at = filled[block]
            filled[block] = at + piece_bytes[number]
        whole = all(block.content == bytes_ for block, bytes_ in zip(blocks, filled, strict=True))
    except (IndexError, OverflowError):
        whole = False
    if not whole or (len(piece_block) and (min(piece_bytes) == 0 or min(piece_times) == 0)):
        raise damaged(f"{name}: its pieces do not fill its blocks")
    return starts


def _to_planes(column: Iterable[int]) -> bytes:
    data = array("I", column).tobytes()
    return b"".join(data[place::4] for place in range(4))


def _of_planes(content: bytes, at: int, count: int) -> Numbers:
    data = bytearray(4 * count)
    for place in range(4):
        data[place::4] = content[at + place * count : at + (place + 1) * count]
    column = array("I")
    column.frombytes(data)
    return column
