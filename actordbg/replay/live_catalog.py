"""Keeps the catalog up to date while a replay runs. Only this process may write it.

Results are in the workers' journals first. The catalog follows at most twice a second, and takes at most a twentieth of the
time. A catalog that cannot be updated (locked, disk full, unreadable store) never stops a replay, because it can be built
again from the journals at any time.
"""

from __future__ import annotations

import time

from actordbg.base.errors import ActordbgError
from actordbg.store.layout import Store

INTERVAL_S = 0.5
SHARE = 0.05
"""The largest part of the time that indexing may take while the replay runs."""


class LiveCatalog:
    """Call `touch` after news, `tick` often, `flush` at the end. `problem`: the last error, in words."""

    def __init__(self, store: Store) -> None:
        self.problem: str | None = None
        self._store = store
        self._stale = True
        self._next = 0.0

    def touch(self) -> None:
        """Say that the journals have something new."""
        self._stale = True

    def tick(self) -> None:
        """Index what is new, if it is due."""
        if self._stale and time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Index what is new, now."""
        from actordbg.catalog.indexer import refresh

        began = time.monotonic()
        try:
            refresh(self._store)
            self.problem = None
        except (ActordbgError, OSError) as problem:
            self.problem = str(problem)
        self._stale = False
        now = time.monotonic()
        self._next = now + max(INTERVAL_S, (now - began) / SHARE)
