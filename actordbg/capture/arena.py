"""Bounded memory for copies of inputs: extents of one mapping, taken and given back in any order, never waiting.

The mapping is as large as the bound, but only its first `limit` bytes are backed by memory; more is backed when no gap is left
(`grow`), and given up again when it is not needed any more (`trim`). Gaps are searched from where the last extent was taken,
so taking one costs a step, unless that gap is too small.

Not locked: its owner (`actordbg.capture.ring.Ring`) is.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left
from collections.abc import Callable

import torch

CHUNK = 2**20
"""Memory is backed in multiples of this many bytes."""
KEEP = 32 * 2**20
"""Backed memory up to so much is kept when it is not needed."""


class Arena:
    """Extents of `memory` from byte `first` on. `grow(end)` backs the mapping up to `end`, or raises OSError.

    `address` is where the mapping begins in memory; `tensor` is all of it as uint8.
    """

    def __init__(self, memory: mmap.mmap, first: int, limit: int, grow: Callable[[int], None] | None) -> None:
        self.memory = memory
        self.first, self.limit, self.end = first, limit, len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self._grow = grow
        self._keep = max(KEEP, limit - first)
        self._extents: list[tuple[int, int]] = []
        """Begin and end of each, in order."""
        self._at = 0
        """The next extent is sought in the gap before the extent of this index."""

    def take(self, nbytes: int) -> int | None:
        """Offset of a new extent of `nbytes`, which is a multiple of ALIGNMENT; None if there is no room."""
        extents, place = self._extents, self._at
        offset = extents[place - 1][1] if place else self.first
        if (extents[place][0] if place < len(extents) else self.limit) - offset < nbytes:
            found = self._gap(nbytes)
            if found is None and self._back(nbytes):
                found = self._gap(nbytes)
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
            advice = mmap.MADV_DONTNEED if self._grow is None else mmap.MADV_REMOVE
            self.memory.madvise(advice, wanted, old - wanted)

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
