"""Tensors on the host that go to temporary files beyond a budget of memory.

    spill = Spill(memory=4 * 2**30)
    copy = spill.copy(values)        # a CPU tensor; beyond the budget its bytes are in a file, and are read when it is used

The files have no names, so nothing is left behind, whatever ends the process. They lie in TMPDIR.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile

import torch
from torch import Tensor

_PART = 2**26
"""Bytes of a file, unless a tensor is larger."""


class Spill:
    """Copies of tensors. memory: most bytes that are held in memory. held, spilled: bytes in memory, and in files."""

    def __init__(self, memory: int) -> None:
        self.memory, self.held, self.spilled = memory, 0, 0
        self._part, self._start = mmap.mmap(-1, 1), 1

    @property
    def nbytes(self) -> int:
        """Size of all copies."""
        return self.held + self.spilled

    def copy(self, values: Tensor) -> Tensor:
        """Copy a tensor to the host. Raises OSError if the disk is full."""
        if not values.nbytes or self.held + values.nbytes <= self.memory:
            self.held += values.nbytes
            return values.detach().to("cpu", copy=True)
        size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._start + size > len(self._part):
            self._map(max(size, _PART))
        copy = torch.frombuffer(self._part, dtype=values.dtype, count=values.numel(), offset=self._start).view(values.shape)
        copy.copy_(values.detach())
        self._part.madvise(mmap.MADV_DONTNEED, self._start, size)  # the pages stay in its file
        self._start += size
        self.spilled += size
        return copy

    @staticmethod
    def room() -> int:
        """Return the bytes that files may take: half of what is free."""
        return shutil.disk_usage(tempfile.gettempdir()).free // 2

    def _map(self, size: int) -> None:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)  # writing to a mapping of a full disk would kill the process
            self._part, self._start = mmap.mmap(file.fileno(), size), 0
