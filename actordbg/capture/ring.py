"""The flight recorder: the inputs of the last calls, and of the call in flight, in a file that outlives the process.

A call's inputs are copied once, into an extent of the ring. The writer thread encodes from there; then, unless the call is one
of the last `keep`, the extent is free again. So what waits in the queue survives a kill without a second copy.

The ring lies in shared memory (tmpfs) unless told otherwise: storing into it never waits for a disk or a server, and it
survives everything but the machine (or the container). `--recorder-dir store` trades that for `store/rings`.

    Ring.create(...)           a file that others can read (`actordbg.formats.ringfile`), held by this process
    Ring.private(...)          the same without a file: for `--recorder-calls 0`, and where no file can be made
    open, commit, leave        one call: room for it; its copies are whole; it returned or raised
    hold, release              the writer needs it; the writer is done with it

All methods are safe from any thread, and never wait for more than a few instructions of another thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actordbg.formats import ringfile
from actordbg.formats.ringfile import DONE, END, FREE, IN_FLIGHT, RAISED, SLOT, WRITING, head_bytes, sealed, slot_check

CHUNK = 2**20
"""Memory is backed in multiples of this many bytes."""
KEEP = 32 * 2**20
"""Backed memory up to so much is kept when it is not needed."""


class Arena:
    """Extents of `memory` from byte `first` on, taken and given back in any order.

    Only the first `limit` bytes are backed by memory. `grow(end)` backs more, or raises OSError. `address` is where the mapping
    begins in memory; `tensor` is all of it as uint8.
    """

    def __init__(self, memory: mmap.mmap, first: int, limit: int, grow: Callable[[int], None] | None) -> None:
        self.memory = memory
        self.first, self.limit, self.end = first, limit, len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._grow = grow
        self._keep = max(KEEP, limit - first)
        self._extents: list[tuple[int, int]] = []  # begin and end of each, in order
        self._at = 0  # the next extent is sought in the gap before the extent of this index

    def take(self, nbytes: int) -> int | None:
        """Offset of a new extent of `nbytes`, which is a multiple of ALIGNMENT; None if there is no room."""
        extents, place = self._extents, self._at
        offset = extents[place - 1][1] if place else self.first
        if (extents[place][0] if place < len(extents) else self.limit) - offset < nbytes:
            found = self._gap(nbytes) or (self._gap(nbytes) if self._back(nbytes) else None)
            if found is None:
                return None
            place, offset = found
        extents.insert(place, (offset, offset + nbytes))
        self._at = place + 1
        return offset

    def give_back(self, offset: int) -> None:
        """Free the extent that begins at `offset`."""
        place = bisect_left(self._extents, (offset, 0))
        del self._extents[place]
        if self._at > place:
            self._at -= 1

    def trim(self) -> None:
        """Give up backed memory behind the last extent, beyond KEEP and what was backed at first, if it is not needed."""
        wanted = max(self._last, self.first + self._keep)
        wanted = -(-wanted // CHUNK) * CHUNK
        if wanted < self.limit:
            old, self.limit = self.limit, wanted
            self.memory.madvise(mmap.MADV_DONTNEED if self._grow is None else mmap.MADV_REMOVE, wanted, old - wanted)

    @property
    def _last(self) -> int:
        return self._extents[-1][1] if self._extents else self.first

    def _gap(self, nbytes: int) -> tuple[int, int] | None:
        """(index, offset) of the first gap of `nbytes`."""
        place, offset = 0, self.first
        for begin, end in (*self._extents, (self.limit, 0)):
            if begin - offset >= nbytes:
                return place, offset
            place, offset = place + 1, end
        return None

    def _back(self, nbytes: int) -> bool:
        """Back enough memory behind the last extent. False if there is none to be had."""
        last = self._last
        wanted = min(self.end, -(-(last + nbytes) // CHUNK) * CHUNK)
        if wanted < last + nbytes or wanted <= self.limit:
            return False
        if self._grow is not None:
            try:
                self._grow(wanted)
            except OSError:
                return False
        self.limit = wanted
        return True


_MAP_NORESERVE = 0x4000
_MOST_LEFT, _MOST_LEFT_BYTES = 16, 2**21
"""Calls that returned and were not sorted yet; more than the last ones stay in the ring for so long."""
MOST_RUNNING = 64
"""Slots that are left to calls in flight when many calls wait to be written."""


@dataclass(slots=True, eq=False)
class RingEntry:
    """One call in a ring. In the mapping, `at`: where its slot is; `offset`: its extent; `data`: its first tensor.

    `sequence` counts the calls of the process. `holds`: how many reasons there are to keep it. `whole`: its tensors are there.
    `spare`: it may wait to be written; however many wait, the last calls and those in flight get their slots.
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
        """A ring file in `folder`, with room for `kept` bytes of last calls and `queued` bytes that wait to be written.

        It gets its name when it is locked and its header is there, so nobody ever meets an unfinished one. OSError if there is
        no file, no lock or no memory to be had; then nothing is left behind.
        """
        path, unfinished = folder / f"{name}{ringfile.SUFFIX}", folder / f"{name}{ringfile.UNFINISHED}"
        descriptor = ringfile.new_file(unfinished)
        try:
            ringfile.hold(descriptor)
            size = ringfile.DATA + -(-(kept + queued) // CHUNK) * CHUNK
            os.ftruncate(descriptor, size)
            shared = ringfile.in_shared_memory(folder)
            backed = ringfile.DATA + (CHUNK if shared else min(kept, size - ringfile.DATA))
            backed = min(size, -(-backed // CHUNK) * CHUNK)
            ringfile.back(descriptor, shared, 0, backed)
            memory = ringfile.mapped(unfinished, size)
            ringfile.touch(memory, 0, backed)

            def grow(end: int) -> None:
                if not shared:
                    raise OSError("a ring on a disk does not grow: that could wait for the disk")
                if made._descriptor is None:  # the number may be another file's by now
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
            except OSError:  # what is raised is why there is no ring
                pass
            finally:
                os.close(descriptor)
            raise

    @classmethod
    def private(cls, kept: int, queued: int) -> Ring:
        """A ring without a file: it dies with the process."""
        size = ringfile.DATA + -(-(kept + queued) // CHUNK) * CHUNK
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        return cls(memory, Arena(memory, ringfile.DATA, ringfile.DATA + CHUNK, None), None, None, kept)

    @property
    def running(self) -> list[RingEntry]:
        """The calls in flight, the oldest first."""
        with self._lock:
            self._settle()
            return sorted(self._running.values(), key=lambda entry: entry.sequence)

    def seconds_in_oldest(self) -> float | None:
        """How long the oldest call has been running: its third number is the monotonic time of its begin, in ns."""
        began = [struct.unpack_from("<q", self._memory, entry.offset + 16)[0] for entry in self.running[:1]]
        return round((time.monotonic_ns() - began[0]) / 1e9, 3) if began else None

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Replace the header."""
        self._memory[: ringfile.HEADER] = ringfile.header_bytes(facts).ljust(ringfile.HEADER, b"\0")

    def add_ledger(self, identity: Mapping[str, Any]) -> tuple[int, memoryview | None]:
        """The number of a new ledger and its counts (u64) in the books; (-1, None) if there is no more room for one."""
        text = sealed(identity)
        with self._lock:
            if not self._books or len(text) > ringfile.IDENTITY:
                return -1, None
            number = self._books.pop()
            first = ringfile.BOOKS + number * ringfile.BOOK
            self._memory[first : first + ringfile.BOOK] = bytes(ringfile.BOOK)
            self._memory[first + 1 : first + len(text)] = text[1:]
            self._memory[first] = text[0]  # with it, the book is there
        at = (first + ringfile.IDENTITY) // 8
        return number, self._words[at : at + len(ringfile.COUNTS)]

    def close_book(self, number: int) -> None:
        """Nothing of a ledger is open, and its counters are published: its book is free."""
        with self._lock:
            self._memory[ringfile.BOOKS + number * ringfile.BOOK] = 0
            self._books.append(number)

    def add_kind(self, text: bytes) -> tuple[int, int]:
        """Write down what many calls have in common; (offset, length), or (0, 0) if the ring has no more room for it."""
        with self._lock:
            offset = self._kinds_end
            if offset + len(text) > ringfile.DATA:
                return 0, 0
            self._kinds_end = offset + len(text)
            self._memory[offset : offset + len(text)] = text
        return offset, len(text)

    def open(self, count: int, tensor_bytes: int) -> RingEntry | None:
        """Room for a call with `count` numbers and `tensor_bytes` of tensors (aligned each); None if there is none.

        The entry is held once, for the call itself. The oldest of the last calls make room if they have to.
        """
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
            entry.offset, entry.data = offset, offset + size - tensor_bytes  # from here on, nothing can fail
            entry.slot = self._free[-1]
            entry.at = ringfile.SLOTS_AT + entry.slot * ringfile.SLOT_SIZE
            del self._free[-1]
            self._sequence += 1
            entry.spare = len(self._free) > self.keep + MOST_RUNNING
            self._running[entry.sequence] = entry
            return entry

    def commit(self, entry: RingEntry, ledger: int, book: int, kind: tuple[int, int], own: tuple[int, ...], whole: bool) -> None:
        """Write down all but the tensors and numbers (`own`); if the tensors are in place, at last that the call is in flight."""
        fixed = (entry.sequence, entry.offset, entry.size, *kind, entry.count)
        SLOT.pack_into(self._memory, entry.at, WRITING, book, ledger, 0, *fixed, slot_check(ledger, *fixed, own))
        if whole:
            entry.whole = True
            self._memory[entry.at] = IN_FLIGHT

    def arrived(self, entry: RingEntry) -> None:
        """The tensors that came from a device are in place now."""
        with self._lock:
            entry.whole = True
            self._memory[entry.at] = entry.state

    def leave(self, entry: RingEntry, raised: bool) -> None:
        """The call returned or raised. It becomes one of the last ones later (`_settle`), at best in another thread."""
        entry.state = RAISED if raised else DONE
        if entry.whole:
            self._memory[entry.at] = entry.state
        self._left.append(entry)

    def _settle(self) -> None:
        """Calls that returned are the last ones; those before them are forgotten. Done again after a fault, it does no harm."""
        while self._left:
            entry = self._left[0]
            if entry.sequence in self._running:
                self._recent.append(entry)
                self._recent_bytes += entry.size
                del self._running[entry.sequence]
            del self._left[0]
        while self._recent and (len(self._recent) > self.keep or self._recent_bytes > self.kept_bytes):
            self._forget_oldest()

    def write(self, offset: int, data: bytes) -> tuple[int, int]:
        """Write into an extent; where, and how much."""
        self._memory[offset : offset + len(data)] = data
        return offset, len(data)

    def abandon(self, entry: RingEntry) -> None:
        """The call could not be copied: its place is free again."""
        with self._lock:
            self._settle()
            if entry.sequence in self._running:
                self._release(entry)
                del self._running[entry.sequence]

    def set_book(self, entry: RingEntry, book: int) -> None:
        """How the call stands in the books now."""
        self._memory[entry.at + 1] = book

    def set_end(self, entry: RingEntry, what: Mapping[str, Any]) -> None:
        """What came of the call, as JSON; nothing if that is too much."""
        text = sealed(what)
        if len(text) > END:
            return
        first = entry.offset + 8 * entry.count
        self._memory[first : first + len(text)] = text
        struct.pack_into("<I", self._memory, entry.at + 4, len(text))

    def hold(self, entry: RingEntry) -> bool:
        """Somebody else needs the entry, too. False if it is gone."""
        with self._lock:
            entry.holds += entry.holds > 0
            return entry.holds > 0

    def release(self, entry: RingEntry) -> None:
        """Somebody does not need the entry any more."""
        with self._lock:
            self._settle()
            self._release(entry)

    def trim(self) -> None:
        """Give up memory that is not needed any more."""
        with self._lock:
            self._settle()
            self.arena.trim()

    def is_worth_keeping(self) -> bool:
        """Whether the file has something that is nowhere else: a call that runs, that raised, or that waits to be written.

        Where there are only such as wait, the last calls beside them are forgotten: they are written, or were not wanted.
        """
        with self._lock:
            self._settle()
            if not self._running and all(entry.state != RAISED for entry in self._recent):
                while self._recent:
                    self._forget_oldest()
            return any(self._memory[ringfile.SLOTS_AT : ringfile.KINDS_AT : ringfile.SLOT_SIZE])

    def remove(self) -> None:
        """Remove the file; the memory lives on until nobody uses it."""
        try:
            if self.path is not None:
                os.unlink(self.path)
                self.path.parent.rmdir()  # if it was the last one
        except OSError:
            pass
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the descriptor, and with it this process's claim to the file. Also what a forked child does."""
        descriptor, self._descriptor = self._descriptor, None
        try:
            if descriptor is not None:
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
            self.arena.give_back(entry.offset)  # before anything changes: it can be tried again if this fails
            self._free += (entry.slot,)
        entry.holds -= 1
