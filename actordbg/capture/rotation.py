"""Rotation: `dump enable --keep 10GB` lets the run's dumps take at most so much; the oldest unpinned ones go first.

Ranks do not talk to each other, so each recording actor holds itself to its share: the whole, divided by the number of
actors of the run that publish counters. Every process removes only files that it wrote itself. What a trigger pinned stays,
and does not count.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.capture.ledger import Ledger
from actordbg.formats.store_files import StoreFiles

COUNT_SECONDS = 10.0
"""How old the count of the run's actors may be."""


REMEMBERED = 256
"""Removed files that a trigger may still want back (`--before`)."""


@dataclass
class Rotation:
    """The unpinned dumps that one ledger wrote, oldest first: path and bytes. `removed`: the last ones that made room."""

    store: StoreFiles
    ledger: Ledger
    files: deque[tuple[Path, int]] = field(default_factory=deque)
    bytes: int = 0
    removed: deque[tuple[Path, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _actors: int = 1
    _counted: float = float("-inf")

    def add(self, path: Path, nbytes: int) -> None:
        """One more file."""
        self.files.append((path, nbytes))
        self.bytes += nbytes

    def spare(self, path: Path) -> None:
        """This file is pinned after all; if it was removed already, it has just been written again."""
        for item in self.files:
            if item[0] == path:
                self.files.remove(item)
                self.bytes -= item[1]
                return
        for item in self.removed:
            if item[0] == path:
                self.ledger.rotate(-item[1], -1)
                self.removed.remove(item)
                return

    def apply(self, keep_bytes: int) -> None:
        """Remove the oldest until this actor's share holds; the newest always stays."""
        share = keep_bytes // self._count_actors()
        while self.bytes > share and len(self.files) > 1:
            path, nbytes = self.files[0]
            self.removed.append((path, nbytes))
            with contextlib.suppress(FileNotFoundError):  # packed or pruned meanwhile
                os.unlink(path)
            self.ledger.rotate(nbytes)
            del self.files[0]  # last: what failed half way is tried again
            self.bytes -= nbytes

    def _count_actors(self) -> int:
        now = time.monotonic()
        if now - self._counted > COUNT_SECONDS:
            self._counted = now
            with contextlib.suppress(OSError):
                names = os.listdir(self.ledger.path(self.store).parent)
                self._actors = max(1, sum(name.endswith(".json") and name[0] != "." for name in names))
        return self._actors
