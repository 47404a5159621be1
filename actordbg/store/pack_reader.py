"""Reads a pack: its index when it is opened, and of its rows only the blocks that a dump needs.

Nothing is trusted: sizes are checked against caps before anything is allocated, every number of the index against the others
(`layout`), every block by zstd's checksum, the index by a CRC-32 and a checksum, and a dump that was put together by its own
CRC-32. Damage is a CorruptDump that names the dump; never wrong tensors. `dump verify` checks the SHA-256 as well.

Blocks stay in a cache that all packs of the process share (CACHE_BYTES, the longest unused go first), so a replay in order of
time decompresses each block once. Packs stay open, a few at a time (`open_pack`). Both may be used by many threads.

Example::

    pack = open_pack("store/packs/ppo-1/20250619T052608-257-3fa9c02b7d11.pack")
    line, payload = pack.read(pack.dump_ids[0])
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
import zlib
from collections import OrderedDict

from actordbg.base.errors import CorruptDump, StoreProblem
from actordbg.formats.dumpfile import DEFAULT_CAP
from actordbg.formats.store_files import open_regular
from actordbg.store import pack_bytes as layout

CACHE_BYTES = 96 * 2**20
"""Decompressed blocks that a process keeps, in bytes."""
OPEN_PACKS = 8
"""Packs that a process keeps open."""


class BlockCache:
    """Decompressed blocks by (pack, number): the longest unused go when there are more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int]) -> bytes | None:
        """The block, if it is here."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: tuple[int, int], content: bytes) -> None:
        """Keep a block; others go until there is room."""
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = content
                self.bytes += len(content)
            while self.bytes > self.limit:
                self.bytes -= len(self._blocks.popitem(last=False)[1])

    def forget(self, pack: int) -> None:
        """Drop every block of a pack."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] == pack]:
                self.bytes -= len(self._blocks.pop(key))


_cache = BlockCache(CACHE_BYTES)


class Pack:
    """One open pack. Making one reads and checks its index: CorruptDump, NewerFormat, or OSError if it cannot be read."""

    _numbers = itertools.count()

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._number = next(Pack._numbers)
        self._descriptor = open_regular(self.path)
        weakref.finalize(self, _release, self._descriptor, self._number)
        self.state = _state(os.fstat(self._descriptor))
        self.bytes = self.state[1]
        layout.check_head(self._at(0, layout.HEAD_BYTES), self.path)
        foot = layout.parse_foot(self._at(max(self.bytes - layout.FOOT_BYTES, 0), layout.FOOT_BYTES), self.bytes, self.path)
        frame = self._at(foot.offset, foot.stored)
        if zlib.crc32(frame) != foot.crc:
            raise CorruptDump(f"{self.path}: damaged index (its CRC-32 does not match)", hint=layout.HINT)
        content = layout.decompress(frame, foot.content, f"{self.path}: index")
        self._index = layout.decode_index(content, foot, self.path)
        self._index_bytes = foot.stored
        self._places = {dump_id: place for place, dump_id in enumerate(self._index.dump_ids)}
        self._locks = [threading.Lock() for _ in self._index.blocks]

    def __contains__(self, dump_id: str) -> bool:
        return dump_id in self._places

    @property
    def dump_ids(self) -> list[str]:
        """The dumps that it holds, in their order."""
        return self._index.dump_ids

    def line(self, dump_id: str) -> bytes:
        """The record of a dump, as the exact line of JSON that its file had. KeyError if it is not in here."""
        place = self._places[dump_id]
        return self._index.texts[self._index.line_start[place] : self._index.head_start[place]]

    def read(self, dump_id: str, max_bytes: int = DEFAULT_CAP) -> tuple[bytes, bytes]:
        """Record's line and safetensors payload of a dump. KeyError if it is not in here, CorruptDump if it is damaged."""
        line, place, index = self.line(dump_id), self._places[dump_id], self._index
        name = f"{self.path}#{dump_id}"
        header = index.texts[index.head_start[place] : index.line_start[place + 1]]
        refs = index.refs[index.first_ref[place] : index.first_ref[place + 1]]
        size = len(header) + sum(index.piece_bytes[ref] * index.piece_times[ref] for ref in refs)
        if size > max_bytes:
            raise CorruptDump(f"{name}: its payload claims {size} bytes, over the limit of {max_bytes}", hint=layout.HINT)
        parts = [header]
        blocks: dict[int, bytes] = {}
        for ref in refs:
            number = index.piece_block[ref]
            block = blocks.get(number)
            if block is None:
                block = blocks[number] = self._block(number, name)
            start, times = index.piece_start[ref], index.piece_times[ref]
            piece = block[start : start + index.piece_bytes[ref]]
            parts.append(piece if times == 1 else piece * times)
        payload = b"".join(parts)
        if zlib.crc32(payload, zlib.crc32(line)) != index.crc[place]:
            raise CorruptDump(f"{name}: damaged (its CRC-32 does not match)", hint=layout.HINT)
        return line, payload

    def shares(self) -> list[int]:
        """For each dump its share of the file, in bytes: its own texts, and of each piece an equal part for each dump that uses
        it, as compressed as the block is. The shares sum to the size of the file.
        """
        index = self._index
        users = [0] * len(index.piece_bytes)
        used = [set(index.refs[a:b]) for a, b in zip(index.first_ref, index.first_ref[1:], strict=False)]
        for refs in used:
            for ref in refs:
                users[ref] += 1
        rate = [block.stored / block.content for block in index.blocks]
        cost = [
            rate[block] * size / max(count, 1)
            for block, size, count in zip(index.piece_block, index.piece_bytes, users, strict=True)
        ]
        texts = self._index_bytes / max(len(index.texts), 1)
        own = [texts * (b - a) for a, b in zip(index.line_start, index.line_start[1:], strict=False)]
        weights = [mine + sum(cost[ref] for ref in refs) for mine, refs in zip(own, used, strict=True)]
        return _apportion(weights, self.bytes)

    def _block(self, number: int, name: str) -> bytes:
        key = (self._number, number)
        found = _cache.get(key)
        if found is not None:
            return found
        with self._locks[number]:  # of two threads that want a block, one decompresses it
            found = _cache.get(key)
            if found is None:
                block = self._index.blocks[number]
                frame = self._at(block.offset, block.stored)
                found = layout.decompress(frame, block.content, f"{name}: block {number} of the pack")
                _cache.put(key, found)
        return found

    def _at(self, offset: int, size: int) -> bytes:
        """Bytes of the file; a file that ends before is refused before anything is allocated."""
        if offset + size > self.bytes:
            raise CorruptDump(f"{self.path}: is too short to be an actordbg pack", hint=layout.HINT)
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise CorruptDump(f"{self.path}: ends before byte {offset + size}", hint=layout.HINT)
        return data


def _apportion(weights: list[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that sum to `total`."""
    whole, shares, reached = sum(weights) or 1.0, [], 0
    so_far = 0.0
    for weight in weights:
        so_far += weight
        upto = min(round(total * (so_far / whole)), total)
        shares.append(upto - reached)
        reached = upto
    if shares:
        shares[-1] += total - reached
    return shares


def _release(descriptor: int, number: int) -> None:
    os.close(descriptor)
    _cache.forget(number)


_packs: OrderedDict[str, Pack] = OrderedDict()
_packs_lock = threading.Lock()


def open_pack(path: str | os.PathLike[str]) -> Pack:
    """An open pack from a small cache, read again if the file is another one now.

    Raises CorruptDump or NewerFormat, FileNotFoundError if there is none, StoreProblem if it cannot be read.
    """
    name = os.fspath(path)
    with _packs_lock:
        try:
            pack = _packs.get(name)
            if pack is None or pack.state != _state(os.lstat(name)):
                _packs.pop(name, None)
                pack = Pack(name)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(2, "no such pack", name) from None
        except OSError as error:
            raise StoreProblem(f"cannot read {name}: {error.strerror}", hint="check the path and its permissions") from None
        _packs[name] = pack
        _packs.move_to_end(name)
        while len(_packs) > OPEN_PACKS:
            _packs.popitem(last=False)
        return pack


def _state(state: os.stat_result) -> tuple[int, int, int]:
    return state.st_ino, state.st_size, state.st_mtime_ns
