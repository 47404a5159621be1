"""The flight recorder: the inputs of the last calls, and of the call in flight, in a file that outlives the process.

A call's inputs are copied once, into an extent of the ring. The writer thread encodes from there; then the extent is freed,
unless the call is one of the last `keep`. So queued calls survive a kill without a second copy.

The ring lies in shared memory (tmpfs) by default: storing into it never waits for a disk or a server, and it survives everything
but the machine (or the container). `--recorder-dir store` uses `store/rings` instead.

All methods are thread-safe, and never wait for more than a few instructions of another thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actordbg.base.fault import from_outside
from actordbg.formats import ringfile
from actordbg.formats.ringfile import DONE, END, FREE, IN_FLIGHT, RAISED, SLOT, WRITING, head_bytes, sealed, slot_check

CHUNK = 2**20
"""Memory is backed in multiples of this many bytes."""
KEEP = 32 * 2**20
"""Backed bytes that are kept even if they are not needed."""


def _chunks(nbytes: int) -> int:
    """Return `nbytes`, rounded up to a multiple of CHUNK."""
    return -(-nbytes // CHUNK) * CHUNK


class Arena:
    """Allocates extents of `memory` from byte `first` on, in any order.

    Only the first `limit` bytes are backed by memory. `grow(end)` backs more, or raises OSError. `address`: start of the mapping
    in memory; `tensor`: the whole mapping as uint8.
    """

    def __init__(self, memory: mmap.mmap, first: int, limit: int, grow: Callable[[int], None] | None) -> None:
        self.memory = memory
        self.first, self.limit, self.end = first, limit, len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._grow = grow
        self._keep = max(KEEP, limit - first)
        self._extents: list[tuple[int, int]] = []  # begin and end of each, in order
        self._at = 0  # the search for the next extent begins in the gap before this index

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a new extent of `nbytes`, a multiple of ALIGNMENT; None if there is no room."""
        extents, place = self._extents, self._at
        offset = extents[place - 1][1] if place else self.first
        if (extents[place][0] if place < len(extents) else self.limit) - offset < nbytes:
            gap = self._gap(nbytes) or (self._gap(nbytes) if self._back(nbytes) else None)
            if gap is None:
                return None
            place, offset = gap
        extents[place:place] = [(offset, offset + nbytes)]  # not a call, after which a signal handler could raise
        self._at = place + 1
        return offset

    def give_back(self, offset: int) -> None:
        """Free the extent that begins at `offset`."""
        place = bisect_left(self._extents, (offset, 0))
        del self._extents[place]
        if self._at > place:
            self._at -= 1

    def trim(self) -> None:
        """Release backed memory behind the last extent, beyond KEEP and the initially backed bytes."""
        limit = _chunks(max(self._last, self.first + self._keep))
        if limit < self.limit:
            old, self.limit = self.limit, limit
            self.memory.madvise(mmap.MADV_DONTNEED if self._grow is None else mmap.MADV_REMOVE, limit, old - limit)

    @property
    def _last(self) -> int:
        return self._extents[-1][1] if self._extents else self.first

    def _gap(self, nbytes: int) -> tuple[int, int] | None:
        """Return (index, offset) of the first gap of `nbytes`."""
        offset = self.first
        for place, (begin, end) in enumerate((*self._extents, (self.limit, 0))):
            if begin - offset >= nbytes:
                return place, offset
            offset = end
        return None

    def _back(self, nbytes: int) -> bool:
        """Back enough memory behind the last extent. Returns False if there is none."""
        last = self._last
        limit = min(self.end, _chunks(last + nbytes))
        if limit < last + nbytes or limit <= self.limit:
            return False
        if self._grow is not None:
            try:
                self._grow(limit)
            except OSError as error:
                if from_outside(error):  # a TimeoutError is one
                    raise
                return False
        self.limit = limit
        return True


_MAP_NORESERVE = 0x4000
_MOST_LEFT, _MOST_LEFT_BYTES = 16, 2**21
"""Most calls, and bytes, that returned and are not settled yet; until then the ring holds more than the last `keep` calls."""
MOST_RUNNING = 64
"""Slots reserved for calls in flight when many calls wait to be written."""


@dataclass(slots=True, eq=False)
class RingEntry:
    """A call in a ring. Offsets in the mapping: `at` of its slot, `offset` of its extent, `data` of its first tensor.

    `sequence` counts the calls of the process. `holds`: reference count. `whole`: its tensors are complete. `spare`: it may wait
    to be written; however many wait, slots remain for the last calls and those in flight.
    """

    size: int
    count: int
    sequence: int
    at: int = 0
    slot: int = 0
    offset: int = 0
    data: int = 0
    holds: int = 1
    state: int = IN_FLIGHT
    whole: bool = False
    spare: bool = False


class Ring:
    """The extents, slots, kinds and books of one process. Made by `create` or `private`."""

    def __init__(self, memory: mmap.mmap, arena: Arena, path: Path | None, descriptor: int | None, kept: int) -> None:
        self.path, self.arena = path, arena
        self.keep, self.kept_bytes, self.missed = 0, kept, 0
        self._memory, self._descriptor = memory, descriptor
        self._lock = threading.Lock()
        self._free = list(range(ringfile.SLOTS - 1, -1, -1))
        self._running: dict[int, RingEntry] = {}
        self._recent, self._left = deque[RingEntry](), deque[RingEntry]()
        self._recent_bytes = self._sequence = 0
        self._kinds_end = ringfile.KINDS_AT
        self._books = list(range(ringfile.MAX_LEDGERS - 1, -1, -1))
        self._words = memoryview(memory)[: ringfile.SLOTS_AT].cast("Q")

    @classmethod
    def create(cls, folder: Path, name: str, facts: Mapping[str, Any], kept: int, queued: int) -> Ring:
        """Create a ring file in `folder`, with room for `kept` bytes of last calls and `queued` bytes that wait to be written.

        It is renamed to its final name once it is locked and has its header, so nobody ever sees an unfinished ring. Raises
        OSError without a file, a lock or memory; then nothing is left behind.
        """
        path, unfinished = folder / f"{name}{ringfile.SUFFIX}", folder / f"{name}{ringfile.UNFINISHED}"
        descriptor = ringfile.new_file(unfinished)
        try:
            ringfile.hold(descriptor)
            size = ringfile.DATA + _chunks(kept + queued)
            os.ftruncate(descriptor, size)
            shared = ringfile.in_shared_memory(folder)
            backed = ringfile.DATA + (CHUNK if shared else min(kept, size - ringfile.DATA))
            backed = min(size, _chunks(backed))
            ringfile.back(descriptor, shared, 0, backed)
            memory = ringfile.mapped(unfinished, size)
            ringfile.touch(memory, 0, backed)

            def grow(end: int) -> None:
                if not shared:
                    raise OSError("a ring on a disk does not grow, because that could block on the disk")
                if made._descriptor is None:  # the number may belong to another file by now
                    raise OSError("the ring is closed")
                ringfile.back(made._descriptor, shared, arena.limit, end - arena.limit)
                ringfile.touch(memory, arena.limit, end - arena.limit)

            arena = Arena(memory, ringfile.DATA, backed, grow)
            made = cls(memory, arena, path, descriptor, kept)
            made.describe(facts)
            unfinished.rename(path)
            return made
        except BaseException:
            try:
                os.unlink(unfinished)
            except OSError:  # raise the reason why there is no ring instead
                pass
            finally:
                os.close(descriptor)
            raise

    @classmethod
    def private(cls, kept: int, queued: int) -> Ring:
        """Create a ring without a file: it dies with the process."""
        size = ringfile.DATA + _chunks(kept + queued)
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        return cls(memory, Arena(memory, ringfile.DATA, ringfile.DATA + CHUNK, None), None, None, kept)

    @property
    def running(self) -> list[RingEntry]:
        """Return the calls in flight, oldest first."""
        with self._lock:
            self._settle()
            return sorted(self._running.values(), key=lambda entry: entry.sequence)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Replace the header."""
        self._memory[: ringfile.HEADER] = ringfile.header_bytes(facts).ljust(ringfile.HEADER, b"\0")

    def add_ledger(self, identity: Mapping[str, Any]) -> tuple[int, memoryview | None]:
        """Add a ledger to the books and return its number and counts (u64); (-1, None) if there is no more room."""
        text = sealed(identity)
        with self._lock:
            if not self._books or len(text) > ringfile.IDENTITY:
                return -1, None
            number = self._books.pop()
            first = ringfile.BOOKS + number * ringfile.BOOK
            self._memory[first : first + ringfile.BOOK] = bytes(ringfile.BOOK)
            self._memory[first + 1 : first + len(text)] = text[1:]
            self._memory[first] = text[0]  # this publishes the book
        at = (first + ringfile.IDENTITY) // 8
        return number, self._words[at : at + len(ringfile.COUNTS)]

    def close_book(self, number: int) -> None:
        """Free the book of a ledger that has no open calls and whose counters are published."""
        with self._lock:
            self._memory[ringfile.BOOKS + number * ringfile.BOOK] = 0
            self._books.append(number)

    def add_kind(self, text: bytes) -> tuple[int, int]:
        """Write the text of a kind, once for many calls. Returns (offset, length), or (0, 0) if the ring has no more room."""
        with self._lock:
            offset = self._kinds_end
            if offset + len(text) > ringfile.DATA:
                return 0, 0
            self._kinds_end = offset + len(text)
            self._memory[offset : offset + len(text)] = text
        return offset, len(text)

    def open(self, item: Any, count: int, tensor_bytes: int) -> RingEntry | None:
        """Allocate a call's entry, held by `item`; evict old calls for it. None without room for its numbers and tensors."""
        size = head_bytes(count) + tensor_bytes
        with self._lock:
            if len(self._left) * size > _MOST_LEFT_BYTES or len(self._left) > _MOST_LEFT:
                self._settle()
            entry = RingEntry(size, count, self._sequence + 1)
            while not self._free and self._recent:
                self._forget_oldest()
            offset = self.arena.take(size) if self._free else None
            if offset is None:
                self._settle()
            while offset is None and self._free and self._recent:
                self._forget_oldest()
                offset = self.arena.take(size)
            if offset is None:
                self.missed += 1
                return None
            entry.offset, entry.data = offset, offset + size - tensor_bytes  # from here on, nothing fails or is interrupted
            entry.slot = self._free[-1]
            entry.at = ringfile.SLOTS_AT + entry.slot * ringfile.SLOT_SIZE
            del self._free[-1]
            self._sequence += 1
            self._running[entry.sequence] = item.entry = entry
            entry.spare = len(self._free) > self.keep + MOST_RUNNING
            return entry

    def commit(self, entry: RingEntry, ledger: int, book: int, kind: tuple[int, int], own: tuple[int, ...], whole: bool) -> None:
        """Write a call's slot, but not its tensors and numbers (`own`). If the tensors are complete, mark it in flight last."""
        fixed = (entry.sequence, entry.offset, entry.size, *kind, entry.count)
        slot = (WRITING, book, ledger, 0, *fixed, slot_check(ledger, *fixed, own))
        SLOT.pack_into(self._memory, entry.at, *slot)
        if whole:
            entry.whole = True
            self._memory[entry.at] = IN_FLIGHT

    def arrived(self, entry: RingEntry) -> None:
        """Mark a call whose tensors have arrived from a device as complete."""
        with self._lock:
            entry.whole = True
            self._memory[entry.at] = entry.state

    def leave(self, entry: RingEntry, raised: bool) -> None:
        """Note that the call returned or raised. It joins the last calls later (`_settle`), usually in another thread."""
        entry.state = RAISED if raised else DONE
        if entry.whole:
            self._memory[entry.at] = entry.state
        self._left.append(entry)

    def _settle(self) -> None:
        """Move returned calls to the last calls, and evict the oldest beyond the limits. Safe to repeat after a fault."""
        while self._left:
            entry = self._left[0]
            if entry.sequence in self._running:
                self._recent += (entry,)  # no call: a signal handler may raise after one
                self._recent_bytes += entry.size
                del self._running[entry.sequence]
            del self._left[0]
        while self._recent and (len(self._recent) > self.keep or self._recent_bytes > self.kept_bytes):
            self._forget_oldest()

    def abandon(self, entry: RingEntry) -> None:
        """Free the place of a call that could not be copied."""
        with self._lock:
            self._settle()
            if entry.sequence in self._running:
                self._release(entry)
                del self._running[entry.sequence]

    def set_book(self, entry: RingEntry, book: int, captured: int = 0) -> None:
        """Store the call's state in the books (OPEN, CAPTURED, ...), and the count `captured` that includes this call."""
        ringfile.CAPTURE.pack_into(self._memory, entry.at + ringfile.CAPTURE_AT, captured)
        self._memory[entry.at + 1] = book

    def set_end(self, entry: RingEntry, what: Mapping[str, Any]) -> None:
        """Store the call's outcome as JSON; nothing if it is too long."""
        text = sealed(what)
        if len(text) > END:
            return
        first = entry.offset + 8 * entry.count
        self._memory[first : first + len(text)] = text
        struct.pack_into("<I", self._memory, entry.at + 4, len(text))

    def hold(self, entry: RingEntry) -> bool:
        """Add a hold on the entry. Returns False if it is gone."""
        with self._lock:
            entry.holds += entry.holds > 0
            return entry.holds > 0

    def release(self, entry: RingEntry) -> None:
        """Drop a hold on the entry."""
        with self._lock:
            self._settle()
            self._release(entry)

    def trim(self) -> None:
        """Release memory that is no longer needed."""
        with self._lock:
            self._settle()
            self.arena.trim()

    def is_worth_keeping(self) -> bool:
        """Check whether the file has a call that is stored nowhere else: running, raised, or waiting to be written.

        If no call runs or raised, the last calls that do not wait are evicted: they were written, or not selected.
        """
        with self._lock:
            self._settle()
            if not self._running and all(entry.state != RAISED for entry in self._recent):
                while self._recent:
                    self._forget_oldest()
            return any(self._memory[ringfile.SLOTS_AT : ringfile.KINDS_AT : ringfile.SLOT_SIZE])

    def remove(self) -> None:
        """Remove the file; the memory stays mapped until nobody uses it."""
        try:
            if self.path is not None:
                os.unlink(self.path)
                self.path.parent.rmdir()  # if it was the last ring
        except OSError:
            pass
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the descriptor, and with it this process's claim to the file. A forked child also does this."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.close(descriptor)
            except OSError:
                pass

    def _forget_oldest(self) -> None:
        entry = self._recent[0]
        self._release(entry)
        del self._recent[0]
        self._recent_bytes -= entry.size

    def _release(self, entry: RingEntry) -> None:
        if entry.holds == 1:
            self._memory[entry.at] = FREE
            self.arena.give_back(entry.offset)  # before anything changes: it can be retried if this fails
            self._free += (entry.slot,)
        entry.holds -= 1
