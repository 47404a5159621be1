"""What an input leaves behind is flushed to the disk in a thread, while the next input runs.

A line of a journal and a file of tensors are *written* at once: every reader sees them, and they outlive the process that wrote
them, however it dies. Only where a machine loses its power do they need to be on its disk, and flushing takes milliseconds. So
the worker continues, and this thread flushes: the tensors first, then the journal, so that no flush takes a result ahead of
what it
speaks of. At most one result waits: `settle` comes before the next one is written.

    tensors = Unflushed.write(path, blob)
    flusher.settle()                        # all that was noted is on disk
    journal.write("end", ...)
    flusher.note(tensors)                   # returns at once

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from actordbg.formats.store_files import make_folder, open_regular, sync_folder, temporary_name
from actordbg.records.journal import Journal

UNFLUSHED = "unflushed"
"""The key of an `Unflushed` among the fields that an engine returns for an input."""


@dataclass
class Unflushed:
    """A whole file in its place, which may not be on the disk yet. `flush` once: it closes the file. `size`: its bytes."""

    path: Path
    size: int
    descriptor: int

    @classmethod
    def write(cls, path: Path, data: bytes) -> Unflushed:
        """Write `data` to `path`, whole or not at all. OSError, and nothing is left, where there is no room."""
        make_folder(path.parent)
        temporary = path.with_name(temporary_name(path.name[:80]))
        descriptor = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.replace(temporary, path)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return cls(path, len(data), descriptor)

    def flush(self) -> None:
        """Bring file and name to the disk. OSError, and the file is gone, where that fails: nobody can tell what it holds."""
        try:
            try:
                os.fsync(self.descriptor)
            finally:
                os.close(self.descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            raise
        sync_folder(self.path.parent)


class Flusher:
    """The thread, made when it is first needed. `settle` raises what went wrong on the disk, from then on each time."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._pending: list[Future[None]] = []
        self._dirty = False

    def note(self, *files: Unflushed) -> None:
        """The journal has a new line: flush these files, then the journal."""
        self._dirty = True
        self._pending.append(self._pool.submit(self._flush, files))

    def settle(self) -> None:
        """Wait until everything is on disk. OSError if something did not get there."""
        wait(self._pending)
        self._pending = [future for future in self._pending if future.exception() is not None]
        for future in self._pending:
            future.result()

    def close(self) -> None:
        """Flush what is left, and end the thread; `settle` has told what went wrong."""
        self._pool.shutdown()

    def _flush(self, files: tuple[Unflushed, ...]) -> None:
        for file in files:
            file.flush()
        if self._dirty:  # lines that came meanwhile are flushed with these
            self._dirty = False
            self._journal.sync()
