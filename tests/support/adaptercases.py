"""A store that records the calls of this process, for tests of adapters."""

from __future__ import annotations

from actordbg.capture import hook
from actordbg.store import payload
from actordbg.store.layout import Store

CONTROL = {
    "format": 2,
    "enabled": True,
    "generation": 1,
    "run": "r",
    "since": "2026-11-20T12:00:00.000000Z",
    "with_outputs": True,
}


def dumps_of(store: Store) -> list[payload.Dump]:
    """What was recorded into this store by this process."""
    slot = hook._slots.pop(str(store.root.resolve()), None) or hook._slots.pop(str(store.root))
    assert slot.recorder.close()
    return [payload.load(path) for path in sorted(store.iter_dumps())]
