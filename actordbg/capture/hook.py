"""Wraps `Actor.forward` in the training process. This is all that the patched `actor.py` calls.

    from actordbg.capture.hook import install
    install(Actor, store="/shared/actordbg")

What the training job can rely on:

- **Off** (no `control.json`, or `dump disable`): one clock read per call and a `stat` at most twice a second.
- **On**: the call's tensors are copied and queued; the thread that trains never waits for a disk, and what does not fit is
  dropped and counted. Outputs, gradients and random states are those of a run without the hook.
- **Broken**: whatever fails in the recorder is swallowed, counted, and reported once (`actordbg.capture.guard`).
- `ACTORDBG_DISABLE=1` leaves the class alone. `ACTORDBG_STORE` and `ACTORDBG_RUN` override the store and the run's name.
- **torch.compile**: `actor.model.compile()` (what OpenRLHF and DeepSpeed do) is not affected, the hook is outside of it. Where
  the actor itself is traced (`torch.compile(actor)`), the hook folds away to the original call: no graph break, no guard on
  our state, `fullgraph=True` still works, and, on purpose, nothing is recorded. To record such a run, compile `actor.model`.
- **fork**: a child starts with an empty queue, a new thread and its own books; what the parent had queued, the parent writes.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable
from time import monotonic
from typing import Any

from torch.compiler import is_compiling

from actordbg.capture.binding import Binder
from actordbg.capture.guard import attempt
from actordbg.capture.recorder import Recorder
from actordbg.record import is_plain_name
from actordbg.store import Store

MARK = "__actordbg_forward__"
"""Attribute of a wrapped `forward`: the original. Its presence makes `install` idempotent."""

_log = logging.getLogger("actordbg")


class Slot:
    """Where a wrapped forward finds its process's recorder; renewed in a forked child."""

    def __init__(self, store: Store, run: str | None) -> None:
        self.recorder = Recorder(store, run)
        self._store = store
        self._run = run
        self._left_to_parent: list[Recorder] = []

    def renew(self) -> None:
        """Forget the parent's recorder. It is kept, untouched: its locks may be held, and pinned memory is not ours to free."""
        self._left_to_parent.append(self.recorder)
        self.recorder = Recorder(self._store, self._run)


_slots: dict[str, Slot] = {}


def install(actor_cls: type, *, store: str | None = None) -> bool:
    """Wrap `actor_cls.forward` so that its calls can be recorded into `store`. True if it is wrapped now.

    Idempotent; a class that was made anew (a reload) is wrapped anew and shares the process's recorder. Nothing is read from
    or written to the store until the first call.
    """
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        return False
    root = os.environ.get("ACTORDBG_STORE") or store
    original = actor_cls.__dict__.get("forward")
    if not root or original is None or not callable(original):
        return False
    if not hasattr(original, MARK):
        actor_cls.forward = wrap(original, _slot(root))  # type: ignore[attr-defined]
    return True


def uninstall(actor_cls: type) -> bool:
    """Put the original `forward` back. True if it was wrapped."""
    original = getattr(actor_cls.__dict__.get("forward"), MARK, None)
    if original is None:
        return False
    actor_cls.forward = original  # type: ignore[attr-defined]
    return True


def wrap(original: Callable[..., Any], slot: Slot) -> Callable[..., Any]:
    """`original`, a method, with recording around it."""
    binder = Binder(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        recorder = slot.recorder
        if monotonic() < recorder.off_until:
            return original(self, *args, **kwargs)
        item = attempt(lambda: recorder.begin(binder, self, args, kwargs), recorder.fault, None)
        if item is None:
            return original(self, *args, **kwargs)
        output = None
        try:
            output = original(self, *args, **kwargs)
        finally:
            attempt(lambda: slot.recorder.end(item, output), recorder.fault, None)
        return output

    setattr(forward, MARK, original)
    return forward


def _slot(root: str) -> Slot:
    """The process's one slot for a store."""
    store = Store(root)
    key = os.fspath(store.root)
    if key not in _slots:
        run = os.environ.get("ACTORDBG_RUN") or None
        if run is not None and not is_plain_name(run):
            _log.warning("actordbg: ACTORDBG_RUN=%r is not a plain name and is not used", run)
            run = None
        _slots[key] = Slot(store, run)
    return _slots[key]


def _after_fork_in_child() -> None:
    for slot in _slots.values():
        slot.renew()


def _at_exit() -> None:
    for slot in _slots.values():
        slot.recorder.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
