"""Record the losses of other trainers (`dump enable --calls forward,loss`), as an adapter's seam reads them.

A seam with `loss` is a function of the trainer that computes a loss, around a recorded forward (TRL, SkyRL), in it (verl), or
after it (Molt; `around`).
When it has returned, its log-probs, masks and advantages are handed to the recorder under the names of PolicyLoss, as
a call of a loss that returns the same value (`actordbg.capture.loss_record`). So the laws of recorded data, and
`explain --against rollout`, read one kind of record. The function runs once, with its own arguments; a failure in here is
reported once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from actordbg.base.fault import describe, from_outside
from actordbg.capture import hook
from actordbg.formats.dump_record import LOSS
from actordbg.trainers.seam import Arguments, LossCall, Seam, note_update, trainer_of

if TYPE_CHECKING:
    from actordbg.capture.loss_record import LossSlot

Function = Callable[..., Any]


class AdapterLoss:
    """A loss as the recorder sees it: its attributes are the facts of the trainer's, and `forward` returns its value."""

    _value: Any = None
    _settings: Mapping[str, Any] = {}
    _own: Mapping[str, Any] = {}

    def forward(self, log_probs: Any, **_: Any) -> Any:
        """Return the value that the trainer computed."""
        return self._value


@dataclass(frozen=True)
class LossFollower:
    """Follows the functions of a seam with `loss`, `steps` or `around`, for the recorder.

    inside: what a thread is in, with the forward that was recorded last, and how many losses it has computed since the optimizer
    step. arguments: binds a call. tell: reports a failure.
    """

    seam: Seam
    inside: Any
    arguments: Callable[..., dict[str, Any]]
    tell: Callable[[str], None]

    def followed(self, original: Function) -> Function:
        """Return `original`, the seam's function, as the recorder follows it."""
        if self.seam.around:
            original = self.with_both(original)
        if self.seam.loss:
            return self.with_loss(original)
        if self.seam.backward:
            from actordbg.capture.losses import noting_backward

            return noting_backward(original)
        return self.with_step(original, self.seam.steps) if self.seam.steps else original

    def with_loss(self, original: Function) -> Function:
        """Return `original`, a function that computes a loss, with its calls recorded, but for those of an evaluation."""
        recorders, inside = dict[Any, _Recorder](), self.inside

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            around, inside.in_loss = inside.in_loss, True
            try:
                output = original(*args, **kwargs)
                inside.micro_batch += 1
                current = inside.current
                if current is not None and _is_wanted(current.slot.recorder):
                    try:
                        if current.slot not in recorders:
                            recorders[current.slot] = _Recorder(self.seam, current.slot, ends=inside.has_steps)
                        recorders[current.slot].record(current, self.arguments(args, kwargs), output, inside)
                    except BaseException as error:  # an adapter may raise anything, and the training continues
                        if from_outside(error):
                            raise
                        self.tell(f"{self.seam.where}: a loss was not recorded: {describe(error)}")
                return output
            finally:
                inside.in_loss = around
                if not around and not inside.busy:
                    inside.current = None

        return function

    def with_both(self, original: Function) -> Function:
        """Return `original`, which runs a forward and then its loss: the forward is kept for it."""
        inside = self.inside

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            outside = inside.in_loss, inside.around
            inside.in_loss = True
            try:
                inside.around = self.arguments(args, kwargs)
                return original(*args, **kwargs)
            finally:
                inside.in_loss, inside.around = outside
                if not inside.in_loss and not inside.busy:
                    inside.current = None

        return function

    def with_step(self, original: Function, stepping: Callable[[Arguments], Any]) -> Function:
        """Return `original`, an optimizer step, which also ends the step of recorded losses."""

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            try:
                given = self.arguments(args, kwargs)
                if (holder := stepping(given)) is None:
                    return output
                self.inside.micro_batch = 0
                note_update(holder)
                if losses := sys.modules.get("actordbg.capture.loss_record"):
                    norm = given.get("grad_norm", output[-1] if isinstance(output, tuple) else output)
                    norm = norm.get("grad_norm") if isinstance(norm, dict) else norm
                    losses.end_step(norm if isinstance(norm, int | float | torch.Tensor) else None)
            except BaseException as error:  # an adapter may raise anything, and the training continues
                if from_outside(error):
                    raise
                self.tell(f"{self.seam.where}: an optimizer step was not noted: {describe(error)}")
            return output

        return function


def _is_wanted(recorder: Any) -> bool:
    """Check whether the loss of the last forward is recorded; no other loss is read."""
    control, last = recorder.control, recorder.last
    if control is None or LOSS not in control.calls:
        return False
    return bool(control.triggers) or (last is not None and last.reason is None)


class _Recorder:
    """Hands losses of a seam to the recorder of a slot."""

    def __init__(self, seam: Seam, slot: Any, *, ends: bool) -> None:
        from actordbg.capture import loss_record as losses
        from actordbg.capture.loss_points import CapturePoint, CapturePoints

        where, _, method = seam.where.rpartition(".") if "." in seam.function else (seam.where, "", "")
        point = CapturePoint(where, ("loss",), {}, method)
        points = CapturePoints((point,))
        self._seam, self._loss, self._here = seam, AdapterLoss(), losses.here
        self._slot: LossSlot = losses.LossSlot(slot, points, point, AdapterLoss.forward, ends=ends)
        self._forward = hook.wrap(AdapterLoss.forward, self._slot)  # type: ignore[arg-type]
        self._last = losses.LastForward

    def record(self, current: Any, call: Arguments, output: Any, inside: Any) -> None:
        """Record a loss beside the forward whose log-probs it got."""
        assert self._seam.loss is not None
        scores, reference = current.scores, current.reference and current.reference.scores.log_probs
        more = {"rows": current.named, "around": inside.around, "entropy": scores.entropy, "reference": reference}
        read: LossCall | None = self._seam.loss({**call, **more}, scores.log_probs, output)
        if read is None:
            return
        rows = current.named if read.sequences is None else vars(read)
        tensors = {name: rows.get(name) for name in ("sequences", "attention_mask")}
        inputs = {name: (lambda tensor=tensor: tensor) for name, tensor in tensors.items() if tensor is not None}
        vars(self._loss).clear()
        own = {**read.own, "micro_batch": inside.micro_batch - 1, "term_weights": read.weights}
        counted_here = trainer_of(current.actor.model.module) is None  # a Trainer goes on counting where a resumed run was
        settings = {**read.settings, "steps_of_process": counted_here}
        vars(self._loss).update(read.facts, _value=read.loss, _settings=settings, _own=own)
        given = {name: value for name, value in read.arguments().items() if value is not None}
        self._here.forward = self._last(lambda: read.log_probs, lambda: current.actor, inputs, current.slot.recorder.last)
        try:
            self._forward(self._loss, read.log_probs, **given)
        finally:
            self._here.forward = None
            vars(self._loss).clear()
