"""Writes one pack: stores each distinct piece of the added dumps once, in solid blocks, with an index at the end.

`PackWriter` puts a pack into the store: it writes it under a temporary name, reads and verifies all of it, and only then
renames it. The name has the first dump's time and the SHA-256 of the whole file, so the same dumps packed again get the same
name, and a pack never changes under its name. Commands that move dumps (pack, unpack, prune) hold `exclusive` meanwhile.

Pieces of one kind (the low bits of `sequences`, say) get separate blocks, in order of appearance: similar data lies
together, and zstd finds the prompts that samples share. Runs (padding, masks) are one element each; they have separate
blocks too. Memory stays bounded whatever the store's size: blocks are written as soon as they are full, and the
caller begins another pack when `is_full`.

Example::

    writer = PackWriter(store.packs / "ppo-1")
    writer.add(record, line, payload)
    published = writer.publish()         # now the dump's old file may be removed
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import Conflict, Refused, StoreProblem, system_errors
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SIZES, DumpRecord
from actordbg.formats.encoding import compress
from actordbg.formats.record_reading import damaged
from actordbg.formats.store_files import TEMPORARY, make_folder, open_regular, remove, sync_folder, temporary_name
from actordbg.store import pack_bytes as layout
from actordbg.store.layout import Store
from actordbg.store.places import Pack

LEVEL = 19
"""zstd level of a pack: on the real dumps 8 % smaller than level 12 and 12 % smaller than level 3, and read as fast."""
BLOCK = 2 * 2**20
"""A block's content, in bytes. Smaller blocks cost size (256 KiB: 6 % on the real dumps), larger ones time to load one dump."""
MOST_DUMPS = 4096
MOST_CONTENT = 64 * 2**20
"""A pack is full when its distinct pieces have this many bytes: a reader's cache holds all blocks of one pack."""
MOST_INDEX = 16 * 2**20
"""A pack is full when its index has this many bytes."""
_MOST_BUFFERED = 32 * 2**20
_LOCK = ".lock"
_RUNS = "\0runs"


@dataclass
class PackFigures:
    """Sizes of a pack and of what went into it, in bytes. `content`: records and payloads. `distinct`: the same with every
    repeated piece stored once, including references. `stored`: the pack's file, compressed.
    """

    dumps: int = 0
    rows: int = 0
    distinct_rows: int = 0
    content: int = 0
    distinct: int = 0
    stored: int = 0

    def __add__(self, other: PackFigures) -> PackFigures:
        return PackFigures(*(getattr(self, name) + getattr(other, name) for name in vars(self)))


class PackWriter:
    """A pack that is being written into a folder. `discard` leaves nothing behind.

    arrived: when the newest of its dumps came into the store, in seconds since 1970; the pack gets this time. 0: now. level: that
    of zstd.
    """

    arrived, level = 0.0, LEVEL

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.figures = PackFigures()
        self._folder = folder
        self._temporary = folder / temporary_name(layout.PACK_SUFFIX)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._temporary, flags, 0o600), "wb")
        self._hash = hashlib.sha256()
        self._edges: defaultdict[str, tuple[Counter[bytes], Counter[bytes]]] = defaultdict(lambda: (Counter(), Counter()))
        self._known: dict[tuple[bytes, int], int] = {}
        self._rows: set[tuple[int, ...]] = set()
        self._pieces: list[tuple[int, int, int]] = []
        self._dumps: dict[str, layout.PackedDump] = {}
        self._expected: dict[str, tuple[bytes, str]] = {}
        self._open: dict[str, tuple[int, bytearray]] = {}
        self._opened = 0
        self._written: list[tuple[int, int, int]] = []
        self._references = self._texts = 0
        self._write(layout.head())

    @property
    def count(self) -> int:
        """Number of dumps so far."""
        return len(self._dumps)

    @property
    def is_full(self) -> bool:
        """Check whether the next dump must go into another pack."""
        index = layout.index_bytes(len(self._pieces), self.count, self._references, self._texts)
        return self.count >= MOST_DUMPS or self.figures.distinct >= MOST_CONTENT or index >= MOST_INDEX

    def add(self, record: DumpRecord, line: bytes, payload: bytes) -> None:
        """Add a dump: the exact line of its record, and its exact payload, already checked against the record.

        Raises CorruptDump for a payload that is not safetensors, Refused for a dump with so many small tensors that no reader
        would accept the index; in both cases nothing is added.
        """
        entries = dumpfile.payload_entries(payload, record.dump_id)
        header = payload[: 8 + int.from_bytes(payload[:8], "little")]
        most = sum(4 * min(entry.shape[0] if len(entry.shape) > 1 else 1, MAX_ROWS) for entry in entries.values())
        size = layout.index_bytes(most, 1, most, 0) + (len(line) + len(payload)) // MAX_PIECE * 20
        if size > layout.MAX_INDEX - 2 * MOST_INDEX:
            raise Refused(f"dump {record.dump_id} has too many small tensors for a pack", hint="leave it as a dump file")
        refs = array("I")
        ends = [*(entry.offset for entry in entries.values()), len(payload)][1:]
        for (kind, entry), end in zip(entries.items(), ends, strict=True):
            rows = rows_of(payload[entry.offset : end], entry.shape)
            self.figures.rows += len(rows)
            width = SIZES[entry.dtype]
            edges = self._edges[kind]
            for row in rows:
                for edge, run, element in (
                    (edges[0], leading_run(row, width), row[:width]),
                    (edges[1], trailing_run(row, width), row[-width:]),
                ):
                    if width < run < len(row):
                        edge[element] += run
            padding = [{element for element, total in edge.items() if total >= edge.total() / 16} for edge in edges]
            for row in rows:
                numbers = tuple(self._number(kind, piece) for piece in pieces_of(row, width, *padding))
                self._rows.add(numbers)
                refs.extend(numbers)
        self._dumps[record.dump_id] = layout.PackedDump(line, header, refs, zlib.crc32(payload, zlib.crc32(line)))
        self._expected[record.dump_id] = hashlib.sha256(line).digest(), record.payload_sha256
        self._references += len(refs)
        self._texts += len(line) + len(header)
        self.figures.dumps += 1
        self.figures.content += len(line) + len(payload)

    def publish(self) -> tuple[Path, PackFigures]:
        """Finish, flush to disk, read and verify everything, and rename the pack. Return its path and its sizes.

        Raises CorruptDump if the pack does not read back as written: then nothing was published, and no dump may be removed.
        """
        try:
            self._finish()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            pack = Pack(self._temporary)
            for dump_id, (line_digest, payload_sha256) in self._expected.items():
                line, payload = pack.read(dump_id)
                if (hashlib.sha256(line).digest(), hashlib.sha256(payload).hexdigest()) != (line_digest, payload_sha256):
                    raise damaged(f"{dump_id}: unpacking does not restore what was packed")
            first = next(iter(self._expected))
            first = first[:15].rstrip("._+-")
            path = self._folder / f"{first}-{self._hash.hexdigest()[:16]}{layout.PACK_SUFFIX}"
            if self.arrived:
                os.utime(self._temporary, (self.arrived, self.arrived))
            os.replace(self._temporary, path)
            sync_folder(self._folder)
        except BaseException:
            self.discard()
            raise
        return path, self.figures

    def discard(self) -> None:
        """Give up: remove the temporary file."""
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _finish(self) -> None:
        """Write the open blocks, the index and the foot."""
        for kind in list(self._open):
            self._close_block(kind)
        place = {block: number for number, (block, _, _) in enumerate(self._written)}
        content = layout.encode_index(
            [(stored, content) for _, stored, content in self._written],
            [(place[block], size, times) for block, size, times in self._pieces],
            self._dumps,
        )
        index = compress(content, self.level)
        offset = self.figures.stored
        self._write(index)
        self._write(layout.foot(offset, index, len(content), len(self._dumps)))
        self.figures.distinct += len(content)
        self.figures.distinct_rows = len(self._rows)

    def _number(self, kind: str, piece: Piece) -> int:
        """Return the number of a piece; store it if it is new."""
        data, times = piece
        key = (data if len(data) <= 32 else hashlib.sha256(data).digest() + b"#", times)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._pieces)
            self._pieces.append((self._store(_RUNS if times > 1 else kind, data), len(data), times))
        return number

    def _store(self, kind: str, data: bytes) -> int:
        """Append to the open block of a kind; return the number of that block."""
        if kind in self._open and len(self._open[kind][1]) + len(data) > BLOCK:
            self._close_block(kind)
        if kind not in self._open:
            while sum(len(content) for _, content in self._open.values()) > _MOST_BUFFERED:
                self._close_block(max(self._open, key=lambda name: len(self._open[name][1])))
            self._open[kind] = self._opened, bytearray()
            self._opened += 1
        block, content = self._open[kind]
        content += data
        self.figures.distinct += len(data)
        return block

    def _close_block(self, kind: str) -> None:
        block, content = self._open.pop(kind)
        frame = compress(bytes(content), self.level)
        self._written.append((block, len(frame), len(content)))
        self._write(frame)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.figures.stored += len(data)


@contextlib.contextmanager
def exclusive(store: Store) -> Iterator[None]:
    """Keep every other process from moving dumps of this store until the block ends; Conflict if another process does.

    The lock ends with its process. Unfinished packs that a killed process left behind are removed.
    """
    make_folder(store.packs)
    lock = store.packs / _LOCK
    with system_errors(StoreProblem, f"cannot open {lock}", "remove it; the next command recreates it"):
        descriptor = open_regular(lock, os.O_RDWR | os.O_CREAT)
    try:
        with system_errors(StoreProblem, f"cannot lock {lock}", "pack on a host that can lock files there"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                said = f"another actordbg is packing, unpacking or pruning in {store.root}"
                raise Conflict(said, hint="wait until it is done") from None
        for leftover in store.packs.glob(f"*/{TEMPORARY}*"):
            remove(leftover)
        yield
    finally:
        os.close(descriptor)


MIN_ROW = 64
"""Rows of fewer bytes are not worth separate references."""
MAX_ROWS = 4096
"""A tensor of more rows is cut as one row."""
MAX_PIECE = 2**20
"""Longer cores are cut into pieces of this many bytes."""
MAX_TIMES = 2**31
"""Longer runs are cut, so that their length fits into 32 bits."""

Piece = tuple[bytes, int]
"""Bytes, and how often they are repeated."""


def rows_of(data: bytes, shape: Sequence[int]) -> list[bytes]:
    """Split a tensor's bytes into rows (dim 0); into one if it has fewer than two dimensions, or tiny or too many rows."""
    count = shape[0] if len(shape) > 1 else 1
    if not 1 < count <= MAX_ROWS or len(data) < MIN_ROW * count:
        return [data] if data else []
    size = len(data) // count
    return [data[at : at + size] for at in range(0, len(data), size)]


def pieces_of(row: bytes, width: int, lead: Collection[bytes], trail: Collection[bytes]) -> list[Piece]:
    """Cut a row of elements of `width` bytes into padding, core and padding. The core of a mask is also a run.

    lead, trail: the elements that make up a good part of all runs on a side, which are padding; chance runs of others are not.
    """
    before = leading_run(row, width)
    after = trailing_run(row, width) if before < len(row) else 0
    core = row[before : len(row) - after]
    if core and leading_run(core, width) == len(core):
        middle = list(_run(core[:width], len(core) // width))
    else:
        if core:
            before, after = before if row[:width] in lead else 0, after if row[-width:] in trail else 0
            core = row[before : len(row) - after]
        middle = [(core[at : at + MAX_PIECE], 1) for at in range(0, len(core), MAX_PIECE)]
    return [*_run(row[:width], before // width), *middle, *_run(row[-width:], after // width)]


def _run(element: bytes, times: int) -> Iterator[Piece]:
    for done in range(0, times, MAX_TIMES):
        yield element, min(times - done, MAX_TIMES)


def leading_run(data: bytes, width: int) -> int:
    """Return how many bytes at the beginning of `data` repeat its first element of `width` bytes."""
    end, known, step, growing = len(data), min(width, len(data)), width, True
    while known < end:
        upto = min(known + step, end)
        if data[known:upto] == data[known - width : upto - width]:
            known = upto
            step = step * 2 if growing else step
        elif step == width:
            break
        else:
            growing, step = False, step // 2
    return known


def trailing_run(data: bytes, width: int) -> int:
    """Return how many bytes at the end of `data` (whole elements) repeat its last element."""
    return leading_run(data[::-1], width)
