"""Flush an input's journal lines and tensors to the disk in a thread, while the next input runs.

A journal line and a tensor file are *written* at once: every reader sees them, and they survive the process that wrote them,
however it dies. They have to be on the disk only if the machine loses power, and flushing takes milliseconds. So the worker
continues, and this thread flushes: the tensors first, then the journal, so a result never reaches the disk before its files.
At most one result waits: `settle` comes before the next one is written.

    atomic_write(path, blob, flush=False)
    flusher.settle()                        # everything noted is on disk
    journal.write("end", ...)
    flusher.note(path)                      # returns at once

Standard library only.
"""

import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from actordbg.formats.store_files import open_regular, sync_folder
from actordbg.records.journal import Journal

UNFLUSHED = "unflushed"
"""The key of a complete file that is not on the disk yet, among the fields that an engine returns for an input."""


def flush(path: Path) -> None:
    """Flush a complete file and its name to the disk. If that fails, remove the file (its content is unknown); OSError.

    A file that is gone was taken: the host of a node sends complete files to the command, and removes them.
    """
    try:
        with open(open_regular(path), "rb") as file:
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    sync_folder(path.parent)


class Flusher:
    """The flushing thread, started when it is first needed. After a disk error every `settle` raises it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
        self._pending: list[Future[None]] = []
        self._dirty = False

    def note(self, *files: Path) -> None:
        """Flush these files, then the journal, which has a new line. Returns at once."""
        self._dirty = True
        self._pending.append(self._pool.submit(self._flush, files))

    def settle(self) -> None:
        """Wait until everything is on disk; OSError if flushing failed."""
        wait(self._pending)
        self._pending = [future for future in self._pending if future.exception() is not None]
        for future in self._pending:
            future.result()

    def close(self) -> None:
        """Flush what is left and end the thread, without raising: `settle` reports errors."""
        self._pool.shutdown()

    def _flush(self, files: tuple[Path, ...]) -> None:
        for file in files:
            flush(file)
        if self._dirty:  # lines that came meanwhile are flushed with these
            self._dirty = False
            self._journal.sync()
