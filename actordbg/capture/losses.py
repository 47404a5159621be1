"""Record losses beside forwards (`dump enable --calls forward,loss`). A process loads this module only then, and changes no file.

`attach` wraps the losses that a trainer's `losses.json` declares, and the methods that a record needs context from, in the
modules that the process has imported by its first forward, or, for a critic, by the first `__init__` of its loss. What a record
holds: `actordbg.capture.loss_record`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from actordbg.capture.control import Control
from actordbg.capture.facts import Args, Binder, Named
from actordbg.capture.loss_points import CapturePoint, CapturePoints
from actordbg.capture.loss_record import INPUTS, LastForward, LossSlot, finish, here
from actordbg.capture.recorded_call import Item
from actordbg.formats.dump_record import LOSS

Function = Callable[..., Any]
Wrap = Callable[[Function, Any], Function]
_attached: dict[tuple[type, str], object] = {}


def _noting(original: Function, slot: Any) -> Function:
    """Return the wrapped `Actor.forward`, which also notes what it returned."""
    binder = Binder(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (control := slot.recorder.control) is None or LOSS not in control.calls:
            return original(self, *args, **kwargs)
        slot.recorder.last = here.forward = None
        output = original(self, *args, **kwargs)
        values = output[0] if type(output) in (tuple, list) and output else output
        with contextlib.suppress(MemoryError, TypeError):
            item, known = slot.recorder.last, slot.recorder.known(self)
            own = item is not None and known is not None and item.ledger is known.ledger  # else another thread's, or actor's
            if values is not None:
                given = (*zip(binder.names, args, strict=False), *kwargs.items())
                rows = {name: weakref.ref(each) for name, each in given if name in INPUTS and isinstance(each, Tensor)}
                here.forward = LastForward(weakref.ref(values), weakref.ref(self), rows, item if own else None)
        return output

    return forward


def _scoring(original: Function) -> Function:
    """Return the method that sums log-probs by rows, which also notes them, the mask of real tokens, and where actions begin."""

    @functools.wraps(original)
    def scoring(*args: Any, **kwargs: Any) -> Any:
        last = here.forward
        if last is not None and len(args) == 4 and last.output() is args[1]:
            here.scores = [*here.scores[-1:], (last, *args[1:], *(at() for at in last.inputs.values()))]
        return original(*args, **kwargs)

    return scoring


def _pairing(original: Function) -> Function:
    """Return the method that puts the rows of pairs together, which also shows them, and its trainer, to the next loss."""

    @functools.wraps(original)
    def pairing(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = original(self, *args, **kwargs)
        here.step = self, SimpleNamespace(**dict(zip(INPUTS, rows, strict=False))), None, None
        return rows

    return pairing


def _stepping(original: Function) -> Function:
    """Return the training step, which also shows its experience to the losses inside it."""
    _, _, *names = inspect.signature(original).parameters

    @functools.wraps(original)
    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        here.step = self, experience, given.get("kl_ctl"), given.get("step")
        try:
            return original(self, experience, *args, **kwargs)
        finally:
            here.step = None
            finish(here.waiting)

    return training_step


def noting_backward(original: Function) -> Function:
    """Return the trainer's backward, which also notes the loss that it gets, and its strategy: that of the losses to come."""

    @functools.wraps(original)
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        here.strategy = self
        if here.waiting is not None and isinstance(loss, Tensor):
            here.waiting.results["backward_loss"] = loss.detach()
        return original(self, loss, *args, **kwargs)

    return backward


def _optimizer_step(original: Function) -> Function:
    """Return the trainer's optimizer step, after which a loss need not wait."""

    @functools.wraps(original)
    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        finish(here.waiting, stepped=True)
        return result

    return optimizer_step


def attach(slot: Any, wrap: Wrap) -> None:
    """Wrap the losses, the forward and the training steps in the modules that this process has imported; each only once.

    slot: the `hook.Slot` of Actors, which is made to choose calls if only some optimizer steps are recorded; wrap: `hook.wrap`.
    """
    control = slot.recorder.control
    if control.steps:
        slot.enter = _within(slot.recorder, control)
    if LOSS not in control.calls:
        return
    for points in map(CapturePoints.of, slot.packages):
        _replace(f"{points.optimizer}.backward", noting_backward)
        ends = _replace(f"{points.optimizer}.optimizer_step", _optimizer_step)

        def wrapped(point: CapturePoint, original: Function, own: CapturePoints = points, ends: bool = ends) -> Any:
            return wrap(original, LossSlot(slot, own, point, original, ends=ends))

        _replace(points.forward, lambda original: _noting(original, slot))
        for point in points.losses:
            _replace(f"{point.where}.forward", functools.partial(wrapped, point))
            _replace(point.scores, _scoring)
            _replace(point.rows, _pairing)
        for step in points.steps:
            _replace(step, _stepping)


def _within(recorder: Any, control: Control) -> Function:
    """Return what a call runs first: calls outside of the steps are counted as sampled out.

    The steps are those of the model that is trained in this process: a reference beside it has an engine that never steps.
    """
    first, last = min(control.steps or ()), max(control.steps or ())
    outside = replace(control, every=0)
    trained: int | None = None

    def enter(binder: Binder, actor: Any, args: Args, kwargs: Named) -> Item | None:
        nonlocal trained
        step = getattr(getattr(actor, "model", None), "global_steps", None)
        if step is not None and getattr(actor, "training", False) and torch.is_grad_enabled():
            trained = step
        if trained is not None:
            step = trained
        elif step is None or (
            getattr(actor, "recorded_role", None) is None  # else an adapter's reference, which has its trainer's step
            and (recorder.known(actor) or recorder.meet(actor, control)).role == "reference"
        ):
            why = f"--step selects no call of this {type(actor).__name__}: its optimizer step is unknown"
            recorder.notices.later_on("steps", why)
            step = None
        entered: Item | None = recorder.enter(
            binder, actor, args, kwargs, None if step is not None and first <= step <= last else outside
        )
        return entered

    return enter


def _replace(where: str, make: Callable[[Function], Function]) -> bool:
    """Replace a method, "module:Class.method", of a class that is imported, once. Returns whether it is replaced now."""
    module, _, within = where.partition(":")
    name, _, method = within.partition(".")
    holder = getattr(sys.modules.get(module), name, None)
    original = None if holder is None else vars(holder).get(method)
    if holder is None or not callable(original):
        return False
    if _attached.setdefault((holder, method), own := object()) is own:  # two threads may attach at once
        setattr(holder, method, make(original))
    return True
