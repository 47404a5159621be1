"""Places of dumps: a dump is a separate file or lies in a pack with others. All readers of dumps read both through here.

A place is a path, relative to the store's root or including it:

    dumps/ppo-1/rank0003/<dump_id>.safetensors.zst          a dump file
    packs/ppo-1/20250619T052608-3fa9c02b7d115e60.pack#<dump_id>   a dump in a pack

Dumps move: `dump pack` puts files into a pack, `dump unpack` extracts them, `dump prune` rewrites a pack without some. A
place that was noted earlier (in the plan of a replay) may be out of date, so a reader that finds nothing there looks for the
dump in the packs and folders of its run. A dump is removed from its old place only after it was verified in the new one.

Nothing in a pack is trusted: sizes are checked against caps before anything is allocated, every number of the index against the
others (`pack_bytes`), every block by zstd's checksum, the index by a CRC-32 and a checksum, and each assembled dump by
its CRC-32. Damage is a CorruptDump that names the dump; never wrong tensors. `dump verify` also checks the SHA-256. A few packs
stay open, and their decompressed blocks stay cached, so a replay in order of time decompresses each block once. Many
threads may read. Standard library and zstandard only.

Example::

    record, payload = read_payload(store.root / row.path)
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from actordbg.base.errors import CorruptDump, StoreProblem
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SUFFIX, DumpRecord, is_plain_name
from actordbg.formats.record_reading import damaged
from actordbg.formats.store_files import AnyPath, open_regular
from actordbg.store import pack_bytes
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX

T = TypeVar("T")
_MARK = "#"
_ROUNDS = 3
"""How often to look for a missing dump: it may move while the places are searched one by one."""


def packed_place(pack: str, dump_id: str) -> str:
    """Return the place of a dump in a pack."""
    return f"{pack}{_MARK}{dump_id}"


def split_place(place: AnyPath) -> tuple[str, str] | None:
    """Return (pack, dump id) of a place in a pack; None for a dump file."""
    pack, mark, dump_id = os.fspath(place).rpartition(_MARK)
    return (pack, dump_id) if mark and pack.endswith(PACK_SUFFIX) and is_plain_name(dump_id) else None


def dump_id_of(place: AnyPath) -> str:
    """Return the dump id that a place names."""
    packed = split_place(place)
    return packed[1] if packed else os.path.basename(place).removesuffix(SUFFIX)


def is_there(place: AnyPath) -> bool:
    """Check whether a place exists: a file, or a readable pack that holds the dump."""
    packed = split_place(place)
    if packed is None:
        return os.path.lexists(place)
    try:
        return packed[1] in open_pack(packed[0])
    except (StoreProblem, FileNotFoundError):
        return False


def read_record(place: AnyPath) -> DumpRecord:
    """Read the record of a dump, even if it has moved; no tensor is read.

    Raises CorruptDump, NewerFormat, or StoreProblem if it cannot be read.
    """
    return _follow(place, _record_at)


def read_payload(
    place: AnyPath,
    *,
    hash_too: bool = True,
) -> tuple[DumpRecord, bytes]:
    """Read the record and checked safetensors bytes of a dump, even if it has moved; see `dumpfile.read_payload`."""
    return _follow(place, lambda current: _payload_at(current, hash_too))


def read_exactly(place: AnyPath) -> tuple[DumpRecord, bytes, bytes]:
    """Read record, its exact JSON line, and payload of the dump at exactly this place, and verify all checksums.

    Raises FileNotFoundError if a dump file is gone, else as `read_payload`.
    """
    packed = split_place(place)
    if packed is None:
        try:
            data = dumpfile.read_file(place)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise dumpfile.unreadable(place, error) from None
        record, payload = dumpfile.unpack(data, place)
        return record, dumpfile.line_of(data, place), payload
    record, payload = _payload_at(os.fspath(place), hash_too=True)
    return record, open_pack(packed[0]).line(packed[1]), payload


def places_of(store: Store) -> Iterator[Path]:
    """Yield the place of every dump, once each: those in packs first, then dump files. Unreadable packs are left out."""
    seen = set()
    for path in store.iter_packs():
        try:
            dump_ids = open_pack(path).dump_ids
        except (StoreProblem, FileNotFoundError):
            continue
        for dump_id in dump_ids:
            if dump_id not in seen:
                seen.add(dump_id)
                yield Path(packed_place(os.fspath(path), dump_id))
    yield from (path for path in store.iter_dumps() if dump_id_of(path) not in seen)


def _record_at(place: str) -> DumpRecord:
    packed = split_place(place)
    return _parsed(_holding(*packed).line(packed[1]), place, packed[1]) if packed else dumpfile.read_record(place)


def _payload_at(place: str, hash_too: bool) -> tuple[DumpRecord, bytes]:
    packed = split_place(place)
    if packed is None:
        return dumpfile.read_payload(place, hash_too=hash_too)
    line, payload = _holding(*packed).read(packed[1])
    record = _parsed(line, place, packed[1])
    if hash_too:
        dumpfile.check_hash(record, payload, place)
    return record, payload


def _holding(path: str, dump_id: str) -> Pack:
    """Return the pack if it has the dump; StoreProblem otherwise. If the whole pack is damaged, the error names the dump."""
    try:
        pack = open_pack(path)
        if dump_id in pack:
            return pack
    except FileNotFoundError:
        pass
    except StoreProblem as error:
        raise type(error)(f"{dump_id} cannot be read: {error.message}", hint=error.hint) from None
    message = f"cannot read {packed_place(path, dump_id)}: no such dump"
    raise StoreProblem(message, hint="`actordbg dump ls` lists the dumps")


def _parsed(line: bytes, place: str, dump_id: str) -> DumpRecord:
    record = dumpfile.parse_line(line, place)
    if record.dump_id != dump_id:
        raise damaged(f"{place}: its record is of {record.dump_id}")
    return record


def _follow(place: AnyPath, read: Callable[[str], T]) -> T:
    """Read at a place, or where the dump lies now if it has moved."""
    name = os.fspath(place)
    try:
        return read(name)
    except StoreProblem as error:
        if error.code != StoreProblem.code:
            raise
        for other in (candidate for _ in range(_ROUNDS) for candidate in _elsewhere(name) if is_there(candidate)):
            try:
                return read(other)
            except StoreProblem as later:
                if later.code != StoreProblem.code:
                    raise
        raise


def _elsewhere(place: str) -> Iterator[str]:
    """Yield places where a dump may lie now: its noted place, the packs of its run, the folders of its ranks."""
    yield place
    dump_id, above = dump_id_of(place), Path(place).parents
    top, depth = ("packs", 1) if split_place(place) is not None else ("dumps", 2)  # a run may have the same name
    if len(above) > depth + 1 and above[depth].name == top:
        store, run = Store(above[depth + 1]), above[depth - 1].name
        yield from (packed_place(os.fspath(pack), dump_id) for pack in store.iter_packs(run))
        yield from (f"{folder}/{dump_id}{SUFFIX}" for folder in store.dump_folders(run))


OPEN_PACKS = 8
"""Number of packs that a process keeps open."""
CACHE_BYTES = 96 * 2**20
"""Bytes of decompressed blocks that a process keeps: enough for all blocks of a pack."""


class BlockCache:
    """Decompressed blocks by (pack, number); evicts the least recently used beyond `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int], make: Callable[[], bytes]) -> bytes:
        """Return the block, calling `make` if it is not cached; evict others beyond the limit."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        content = make()
        with self._lock:
            self.bytes += len(content) - len(self._blocks.get(key, b""))
            self._blocks[key] = content
            while self.bytes > self.limit:
                self.bytes -= len(self._blocks.popitem(last=False)[1])
        return content


_blocks = BlockCache(CACHE_BYTES)
_numbers = itertools.count()


class Pack:
    """An open pack. The constructor reads and checks the index: CorruptDump, NewerFormat, or OSError if it cannot be read."""

    def __init__(self, path: AnyPath) -> None:
        self.path = os.fspath(path)
        self._number, self._lock = next(_numbers), threading.Lock()
        self._descriptor = open_regular(self.path)
        weakref.finalize(self, os.close, self._descriptor)
        self.bytes = os.fstat(self._descriptor).st_size
        pack_bytes.check_head(self._at(0, pack_bytes.HEAD_BYTES), self.path)
        end = self._at(max(self.bytes - pack_bytes.FOOT_BYTES, 0), pack_bytes.FOOT_BYTES)
        foot = pack_bytes.parse_foot(end, self.bytes, self.path)
        frame = self._at(foot.offset, foot.stored)
        if zlib.crc32(frame) != foot.crc:
            raise damaged(f"{self.path}: damaged index (its CRC-32 does not match)")
        content = pack_bytes.decompress(frame, foot.content, f"{self.path}: index")
        self._index = pack_bytes.decode_index(content, foot, self.path)

    def __contains__(self, dump_id: str) -> bool:
        return dump_id in self._index.dumps

    @property
    def dump_ids(self) -> list[str]:
        """Ids of its dumps, in their order."""
        return [*self._index.dumps]

    def line(self, dump_id: str) -> bytes:
        """Return the record of a dump as the exact JSON line that its file had. KeyError if it is not in this pack."""
        return self._index.dumps[dump_id].line

    def read(self, dump_id: str) -> tuple[bytes, bytes]:
        """Read record line and safetensors payload of a dump. KeyError if it is not in here, CorruptDump if it is damaged."""
        index, name = self._index, f"{self.path}#{dump_id}"
        line, header, refs, crc = index.dumps[dump_id]
        size = len(header) + sum(index.piece_bytes[ref] * index.piece_times[ref] for ref in refs)
        if size > dumpfile.DEFAULT_CAP:
            raise damaged(f"{name}: its payload claims {size} bytes, over the limit of {dumpfile.DEFAULT_CAP}")
        try:
            with self._lock:  # of two threads that want a block, one decompresses it
                blocks = {
                    number: _blocks.get((self._number, number), partial(self._decompressed, number))
                    for number in {index.piece_block[ref] for ref in refs}
                }
        except CorruptDump as error:
            raise damaged(f"{name}: {error.message}") from None
        parts = [header]
        for ref in refs:
            start = index.piece_start[ref]
            parts.append(blocks[index.piece_block[ref]][start : start + index.piece_bytes[ref]] * index.piece_times[ref])
        payload = b"".join(parts)
        if zlib.crc32(payload, zlib.crc32(line)) != crc:
            raise damaged(f"{name}: damaged (its CRC-32 does not match)")
        return line, payload

    def shares(self) -> list[int]:
        """Return each dump's share of the file in bytes, by the size of its record and payload. They sum to the file's size."""
        index = self._index
        weights = [
            len(dump.line) + len(dump.header) + sum(index.piece_bytes[ref] * index.piece_times[ref] for ref in dump.refs)
            for dump in index.dumps.values()
        ]
        so_far = list(itertools.accumulate(weights, initial=0))
        ends = [self.bytes * reached // (so_far[-1] or 1) for reached in so_far]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _decompressed(self, number: int) -> bytes:
        """Return the content of a block."""
        block = self._index.blocks[number]
        return pack_bytes.decompress(self._at(block.offset, block.stored), block.content, f"block {number} of the pack")

    def _at(self, offset: int, size: int) -> bytes:
        """Read bytes of the file; a file that is too short is refused before anything is allocated."""
        if offset + size > self.bytes:
            raise damaged(f"{self.path}: is too short to be an actordbg pack")
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise damaged(f"{self.path}: ends before byte {offset + size}")
        return data


@lru_cache(maxsize=OPEN_PACKS)
def _opened(path: str, state: tuple[int, int, int]) -> Pack:
    """Open the pack at a path. A changed inode, size or time means another pack."""
    return Pack(path)


def open_pack(path: AnyPath) -> Pack:
    """Return an open pack from a small cache, read again if the file was replaced.

    Raises CorruptDump or NewerFormat, FileNotFoundError if there is no pack, StoreProblem if it cannot be read.
    """
    name = os.fspath(path)
    try:
        state = os.lstat(name)
        return _opened(name, (state.st_ino, state.st_size, state.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(2, "no such pack", name) from None
    except OSError as error:
        raise dumpfile.unreadable(name, error) from None
