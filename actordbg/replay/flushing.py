"""What an input leaves behind is flushed to the disk in a thread, while the next input runs.

A line of a journal and a file of tensors are *written* at once: every reader sees them, and they outlive the process that wrote
them, however it dies. Only where a machine loses its power do they need to be on its disk, and flushing takes milliseconds. So
the worker goes on, and this thread flushes: the tensors first, then the journal, so that no flush takes a result ahead of what it
speaks of. At most one result waits: `settle` comes before the next one is written.

    tensors = Unflushed.write(path, blob)
    flusher.settle()                        # all that was handed over is on disk
    journal.write("end", ...)
    flusher.hand_over(tensors)              # returns at once

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
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
    """The thread, made when it is first needed. `settle` raises what went wrong on the disk."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._changed = threading.Condition()
        self._waiting: list[Unflushed] = []
        self._dirty = self._busy = self._closed = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def note(self) -> None:
        """The journal has a new line."""
        self._wake()

    def hand_over(self, file: Unflushed) -> None:
        """Flush this file, then the journal."""
        self._wake(file)

    def settle(self) -> None:
        """Wait until everything is on disk. OSError if something did not get there."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._dirty or self._busy))
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Flush what is left, and end the thread; `settle` has told what went wrong."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wake(self, *files: Unflushed) -> None:
        with self._changed:
            self._waiting += files
            self._dirty = True
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._dirty or self._closed)
                if not self._dirty:
                    return
                files, self._waiting = self._waiting, []
                self._busy, self._dirty = True, False
            try:
                for file in files:
                    file.flush()
                with self._changed:  # lines that came meanwhile are flushed with these
                    self._dirty = bool(self._waiting)
                self._journal.sync()
            except OSError as error:
                self._error = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()
