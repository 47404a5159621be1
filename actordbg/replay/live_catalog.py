"""The catalog kept up to date while a replay runs, by the only process that may write it.

Results are in the workers' journals first; the catalog follows, at most twice a second, and spends at most a twentieth
of the time on it. A catalog that cannot be brought up to date (locked, full disk, a store that cannot be read) never stops a
replay: it can be made again from the journals at any time.
"""

from __future__ import annotations

import time

from actordbg.base.errors import ActordbgError
from actordbg.store.layout import Store

INTERVAL_S = 0.5
SHARE = 0.05
"""The largest part of the time that indexing may take while the replay runs."""


class LiveCatalog:
    """`touch` when there is something new, `tick` often, `flush` at the end. `problem`: what went wrong last, in words."""

    def __init__(self, store: Store) -> None:
        self.problem: str | None = None
        self._store = store
        self._stale = True
        self._next = 0.0

    def touch(self) -> None:
        """There is something new in the journals."""
        self._stale = True

    def tick(self) -> None:
        """Index what is new, if it is time."""
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
