"""Wrap `Actor.forward` in the training process. This is all that the patched `actor.py` calls.

    from actordbg.capture.hook import install
    install(Actor, store="/shared/actordbg")

What the training job can rely on:

- **Off** (no `control.json`, or `dump disable`): one attribute is read per call; a thread polls the switch twice a second.
- **On**: the call's tensors are copied and queued; the training thread touches no file and never waits for a disk; calls that do
  not fit are dropped and counted. Outputs, gradients and RNG state are those of a run without the hook.
- **Broken**: any failure of the recorder is caught at a few edges, counted, and reported once (`actordbg.capture.watch`).
- `ACTORDBG_DISABLE=1` leaves the class alone. `ACTORDBG_STORE` and `ACTORDBG_RUN` override the store and the run's name.
- **torch.compile**: the hook is outside of `actor.model.compile()`, which trainers and DeepSpeed use. In `torch.compile(actor)`
  it folds away (no graph break; `fullgraph=True` works). Nothing is recorded then; the job's log and `dump status` say so.
- **fork**: a child starts with an empty queue, a new thread and its own books; the parent writes whatever it had queued.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from actordbg.base.fault import from_outside
from actordbg.capture.facts import DISTRIBUTIONS, Args, Binder, Named, note_trainer
from actordbg.capture.recorded_call import Item
from actordbg.capture.recorder import Recorder
from actordbg.formats.dump_record import LOSS, is_plain_name
from actordbg.formats.store_files import StoreFiles

MARK = "__actordbg_forward__"
"""Attribute of a wrapped `forward`: the original. Its presence makes `install` idempotent."""
SLOT = "__actordbg_slot__"
"""Attribute of a wrapped `forward`: its Slot. While `enter` of that is None, a call need not be prepared for recording."""

_log = logging.getLogger("actordbg")
Enter = Callable[[Binder, Any, Args, Named], "Item | None"]


class Slot:
    """Where a wrapped forward finds its process's recorder; renewed in a forked child.

    A call runs `enter` first. It is None while recording is off, and `_arrive`, which starts the watch thread, before the first
    call. `packages`: those of the Actors, whose losses may be recorded too.
    """

    def __init__(self, store: StoreFiles, run: str | None) -> None:
        self._store = store
        self._run = run
        self.packages: set[str] = set()
        self._left_to_parent: list[Recorder] = []

        def traced() -> None:
            """Note that dynamo traces a forward. Runs during tracing only; the graph contains nothing of it."""
            self.recorder.compiled = True
            self.recorder.attempt(self.recorder.watch.start)

        traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does
        self.traced = traced
        self._use(Recorder(store, run, on_change=self._follow))

    def renew(self) -> None:
        """Replace the parent's recorder, and keep it untouched: its locks may be held, and its pinned memory is not ours."""
        self._left_to_parent.append(self.recorder)
        self.recorder.rings.forked()
        self._use(Recorder(self._store, self._run, on_change=self._follow))

    def _use(self, recorder: Recorder) -> None:
        self.recorder, self.leave = recorder, recorder.leave
        self._arrived = False
        self.enter: Enter | None = self._arrive

    def _arrive(self, binder: Binder, actor: Any, args: Args, kwargs: Named) -> Item | None:
        """Handle the first call, and later ones until this succeeds."""
        again, self.recorder.losses_alone = self.recorder.losses_alone, False
        self.recorder.watch.start(again)
        self._arrived = True
        self._follow()
        return self.enter(binder, actor, args, kwargs) if self.enter is not None else None

    def _follow(self) -> None:
        """Turn recording on or off, as the recorder's switch says."""
        if self._arrived or self.recorder.losses_alone:
            control = self.recorder.control
            self.enter = self.recorder.enter if control is not None else None
            if control is not None and (control.steps or LOSS in control.calls):
                from actordbg.capture import losses  # which most processes never need

                losses.attach(self, wrap)
        if not self._arrived:
            self.enter = self._arrive

    def await_losses(self) -> None:
        """Follow the switch before any call, as far as losses are recorded: a critic's process calls no Actor."""
        self.recorder.losses_alone = not self._arrived
        self.recorder.watch.start()


_slots: dict[str, Slot] = {}


def install(actor_cls: type, *, store: str | None = None) -> bool:
    """Wrap `actor_cls.forward` so that its calls can be recorded into `store`. Returns whether it is wrapped now.

    Idempotent; a reloaded class shares the process's recorder. The store is not touched until the first call.
    """
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        return False
    root = os.environ.get("ACTORDBG_STORE") or store
    original = actor_cls.__dict__.get("forward")
    if not root or original is None or not callable(original):
        return False
    if not hasattr(original, MARK):
        note_trainer(actor_cls)
        slot, (package, _, inside) = _slot(root), actor_cls.__module__.partition(".")
        slot.packages.add(package)
        actor_cls.forward = wrap(original, slot)  # type: ignore[attr-defined]
        if inside and package in DISTRIBUTIONS:  # its modules are known
            with contextlib.suppress(ImportError, AttributeError):
                losses = importlib.import_module(f"{actor_cls.__module__.rpartition('.')[0]}.loss")
                for name in ("ValueLoss", "SFTLoss", "DPOLoss", "PairWiseLoss", "LogExpLoss"):
                    loss = getattr(losses, name)
                    loss.__init__ = _awaiting(loss.__init__, slot)
    return True


def _awaiting(original: Callable[..., None], slot: Slot) -> Callable[..., None]:
    """Return the `__init__` of a loss, which also starts its process's recorder: before a critic's step, or a trainer's `fit`."""

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        slot.recorder.attempt(slot.await_losses)
        original(*args, **kwargs)

    return init


def wrap(original: Callable[..., Any], slot: Slot) -> Callable[..., Any]:
    """Return the method `original` with recording around it."""
    binder, traced = Binder(original), slot.traced

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            traced()
            return original(self, *args, **kwargs)
        enter = slot.enter
        if enter is None:
            return original(self, *args, **kwargs)
        item = None
        try:
            item = enter(binder, self, args, kwargs)
        except BaseException as fault:  # assignments only, so nothing in here can fail
            if from_outside(fault):
                raise
            fault.__traceback__ = None
            slot.recorder.stray += 1
            with slot.recorder.notices.lock:
                slot.recorder.notices.later += (("fault", fault),)
        if item is None:
            return original(self, *args, **kwargs)
        output = error = None
        try:
            output = original(self, *args, **kwargs)
            return output
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                slot.leave(item, output, error)
            except BaseException as fault:  # assignments only
                with slot.recorder.writer.lock:
                    slot.recorder.writer.failed += ((item, fault),)
                if from_outside(fault):
                    raise
                fault.__traceback__ = fault.__context__ = None
            del error  # else the traceback and this frame would keep each other alive, with all their tensors

    setattr(forward, MARK, original)
    setattr(forward, SLOT, slot)
    return forward


def hash_weights(root: str) -> None:
    """Hash the weights of calls that this process, and not its forks, records into a store: `run --hash-weights`.

    At the first recorded call of each step the training thread then waits for a hash of each parameter, before the model runs: a
    copy to the host and one to two seconds for each gigabyte that this rank holds. Buffers are not hashed.
    """
    _slot(root).recorder.hashes = True


def _slot(root: str) -> Slot:
    """Return this process's only slot for a store."""
    store = StoreFiles(root)
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
    for key in _slots:
        for _ in (1, 2):  # `close` raises nothing: retries the call itself
            try:
                _slots[key].recorder.close()
                break
            except Exception:  # noqa: BLE001  # the process ends as it would without us
                continue


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
