"""What the record of a loss holds, and when it is handed over: a `LossSlot` stands around each loss that `losses.attach` wraps.

A loss is recorded like a forward, by the same `Recorder`, ring and writer. Its arguments:

| what | from |
|---|---|
| `log_probs`, `old_log_probs`, ...; `values`, `old_values`, `returns` | the loss's own arguments |
| `sequences`, `attention_mask` | the last forward, whose result `log_probs` is; for a critic, the experience |
| `context.forward` (a dump id) | the last forward |
| `context.rewards`, `.returns`, `.truncated`, `.response_length`, ... | the experience that the training step got |
| `context.loss.*` | plain attributes of the loss: clips, correction, token-mean or sequence-mean |
| `context.micro_batch`, `.engine_accumulation`, `.rollout.*`, ... | the training step, the DeepSpeed engine, the settings |

Its results are stored by name, and beside them `backward_loss`, which the trainer passes to backward after it added other terms,
and `grad_norm`, if an optimizer step follows: the record waits for the end of that step. The losses of those forwards are
recorded that are recorded themselves, whatever limits chose them; with triggers, those that a trigger keeps. Forwards of a critic
are not recorded, so that the limits choose its losses. No large tensor is held longer than the trainer holds it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actordbg.capture.control import Control
from actordbg.capture.facts import Args, Binder, Named, sort_into
from actordbg.capture.loss_points import CapturePoint, CapturePoints
from actordbg.capture.recorded_call import Item
from actordbg.formats.dump_record import LOSS
from actordbg.formats.nested_values import CONTEXT

INPUTS = ("sequences", "attention_mask")
_AFTER = ("backward_loss", "grad_norm")
"""Results that are known after the loss, at the end of the training step or of the optimizer step."""
_DTYPES: dict[type, Any] = {bool: np.int64, int: np.int64, float: np.float64, tuple: np.int64}
Referent = Callable[[], Any]
"""A weak reference: returns its object, or None."""


class _Here(threading.local):
    """What a thread is in: its last forward, its training step (trainer, experience, kl_ctl, number), and its loss whose record
    waits for the end of the step.

    scores: the last two forwards whose log-probs were summed by rows, with these, the real tokens, the first actions, the inputs.
    engine: that of its last loss. strategy: that whose backward ran last. numbers: see
    `number`.
    """

    forward: LastForward | None = None
    step: tuple[Any, Any, Any, Any] | None = None
    waiting: Waiting | None = None
    engine: Referent | None = None
    strategy: Any = None

    def __init__(self) -> None:
        self.numbers: dict[Any, tuple[Any, Tensor]] = {}
        self.scores: list[tuple[Any, ...]] = []


here = _Here()


class RecordedLoss:
    """A loss as the recorder sees it: an actor, with the model of the last forward while a call is recorded."""

    def __init__(self, point: CapturePoint, role: str) -> None:
        function = f"{point.where}.{point.method}".rstrip(".")
        self.recorded_as = {"trainer": function.partition(".")[0], "adapter": None, "function": function}
        self.recorded_fields = {"point": LOSS}
        self.recorded_role = f"{role} loss"
        self.model: Any = None


class LossBinder(Binder):
    """Binds calls of a loss, by the names of PolicyLoss's arguments, and these constants in each of them."""

    def __init__(self, original: Callable[..., Any], point: CapturePoint, constants: Mapping[str, Any]) -> None:
        super().__init__(original)
        self.names = tuple(point.names.get(name, name) for name in self.names)
        self.returns = (*point.returns, *_AFTER)
        for name, value in constants.items():
            if value is not None or name.startswith("loss."):
                sort_into(self._defaults, CONTEXT + name, value)


@dataclass(slots=True)
class LastForward:
    """The last forward of a thread, by weak references. item: its recorded call; None if it was not recorded.

    inputs: its `sequences` and `attention_mask`, by name.
    """

    output: Referent
    actor: Referent
    inputs: Mapping[str, Referent]
    item: Item | None


@dataclass(slots=True)
class LossModel:
    """The model whose results a loss gets. actor: has its plain facts. item: its recorded forward, if any. control: the switch
    that the loss is recorded under.
    """

    actor: Any
    engine: Any
    role: str
    inputs: dict[str, Tensor]
    item: Item | None
    control: Control


class LossSlot:
    """Stands in for a `hook.Slot` where a loss is wrapped. ends: an optimizer step of the trainer is followed."""

    def __init__(
        self, slot: Any, points: CapturePoints, point: CapturePoint, original: Callable[..., Any], *, ends: bool = False
    ) -> None:
        self._slot, self._points, self._point = slot, points, point
        self._original, self._ends = original, ends
        self._binders: list[tuple[dict[str, Any], Binder]] = []
        self._known: weakref.WeakKeyDictionary[Any, RecordedLoss] = weakref.WeakKeyDictionary()
        self._control: Control | None = None
        self._controls: tuple[Control, ...] = ()

    @property
    def recorder(self) -> Any:
        """The process's recorder, which a fork renews."""
        return self._slot.recorder

    @staticmethod
    def traced() -> None:
        """Do nothing: a compiled loss is not recorded, and says nothing of the forward."""

    traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def enter(self) -> Any:
        """Return what a call runs first; None while no loss is recorded."""
        control = self._slot.recorder.control
        return self._enter if control is not None and LOSS in control.calls else None

    def leave(self, item: Item, output: Any, error: BaseException | None) -> None:
        """Hand over a loss at once if it raised, has no step to wait for, or is judged by a trigger; else let it wait."""
        engine, waits = here.engine, (self._ends or here.step is not None) and torch.is_grad_enabled()
        if error is not None or item.control.triggers or engine is None or not waits:
            return self.recorder.leave(item, output, error)  # type: ignore[no-any-return]
        results = output if isinstance(output, (tuple, list)) else (output,)
        results = [value.detach() if isinstance(value, Tensor) else None for value in results]
        named = dict(zip(self._point.returns, results, strict=False))
        here.waiting = Waiting(self.recorder, item, named, engine, _step_of(engine))
        return None

    def _enter(self, _: Binder, loss: Any, args: Args, kwargs: Named) -> Item | None:
        finish(here.waiting)
        recorder, control, names = self._slot.recorder, self._slot.recorder.control, self._point.names
        given = {names.get(name, name): value for name, value in kwargs.items()} if names else kwargs
        if control is None or not torch.is_grad_enabled():
            return None
        if self._point.scores:
            if len(here.scores) < 2:
                return None  # its rows were summed before that was followed
            args, given = (), _of_sums(args)
        if self._control is not control:
            self._control, self._controls = control, _switches(control, follows=not self._point.model)
        log_probs = args[0] if args else given.get("log_probs")
        of = self._values(control) if self._point.model else self._forward(control, log_probs)
        if of is None:
            return None
        known = self._known.get(loss)
        if known is None:
            known = self._known.setdefault(loss, RecordedLoss(self._point, of.role))
        for name in ("training", "packing_samples", "temperature"):
            setattr(known, name, getattr(of.actor, name, None))
        known.model, here.engine = of.engine, weakref.ref(of.engine)
        try:
            inputs = of.inputs
            binder, own = self._context(loss, of, {*map(id, (*args, *inputs.values(), *given.values()))})
            entered: Item | None = recorder.enter(binder, known, args, {**inputs, **given, **own}, of.control)
            return entered
        finally:
            known.model = None
            if self._point.rows:
                here.step = None

    def _forward(self, control: Control, log_probs: Any) -> LossModel | None:
        """Return the Actor of the last forward; None if these are not its log-probs, or if its loss is not recorded."""
        last, recorder = here.forward, self._slot.recorder
        if last is None or last.output() is not log_probs:
            return None
        actor, item = last.actor(), last.item
        chosen = item is not None and item.reason is None
        if actor is None or not (chosen or control.triggers):
            return None
        instance = recorder.known(actor)
        inputs = {name: tensor for name, at in last.inputs.items() if (tensor := at()) is not None}
        role = (instance.role if instance is not None else None) or "policy"
        return LossModel(actor, actor.model, role, inputs, item, self._controls[chosen])

    def _values(self, control: Control) -> LossModel | None:
        """Return the model of a critic's trainer; None outside of its training step."""
        if here.step is None:
            return None
        trainer, experience, *_ = here.step
        engine = getattr(trainer, self._point.model, None) or trainer.model
        inputs = {name: value for name in INPUTS if isinstance(value := getattr(experience, name, None), Tensor)}
        steps, step = control.steps, getattr(engine, "global_steps", None)
        inside = steps is None or (step is not None and min(steps) <= step <= max(steps))
        return LossModel(engine, engine, self._point.model, inputs, None, self._controls[inside])

    def _context(self, loss: Any, of: LossModel, recorded: set[int]) -> tuple[Binder, dict[str, Tensor]]:
        """Return everything that is recorded beside the arguments: the binder of what similar calls share, and this call's own.

        recorded: ids of the arguments, so that nothing is recorded twice.
        """
        engine, item = of.engine, of.item
        shared = {
            "loss." + name: value
            for name, value in vars(loss).items()
            if name[0] != "_" and name != "training" and not isinstance(value, Tensor)
        } | self._point.facts
        tensors: dict[str, Tensor] = {}
        shared["settings"] = vars(loss).get("_settings", {})
        own: dict[str, Any] = {"micro_steps": vars(engine).get("micro_steps"), **vars(loss).get("_own", {})}
        if item is not None and item.whole:  # the parts of its dump id
            own["forward"] = (item.own[1], item.number, item.pid, item.own[4])
        for holder, name, method in (
            (shared, "engine_accumulation", "gradient_accumulation_steps"),
            (shared, "engine_max_norm", "gradient_clipping"),
            (own, "boundary", "is_gradient_accumulation_boundary"),
            (own, "lr", "get_lr"),
        ):
            if (read := getattr(type(engine), method, None)) is not None:  # a module's own attributes are looked up slowly
                holder[name] = read(engine)
        trainer = None
        if here.step is not None:
            trainer, experience, own["kl_ctl"], own["micro_batch"] = here.step
            widest = 1 if self._point.model else 2
            for name, value in vars(experience).items():
                if isinstance(value, Tensor) and value.dim() <= widest and id(value) not in recorded:
                    tensors[CONTEXT + name] = value
        strategy = getattr(trainer, "strategy", here.strategy)
        if strategy is not None and self._points.settings:
            shared["accumulation"] = getattr(strategy, "accumulated_gradient", None)
            shared["settings"] = self._points.settings_in(trainer, getattr(strategy, "args", None))
        for name, value in own.items():
            if value is not None and (tensor := number(value, name)) is not None:
                tensors[CONTEXT + name] = tensor
        return self._binder(shared), tensors

    def _binder(self, shared: dict[str, Any]) -> Binder:
        """Return the binder of calls with these constants: similar calls then share their kind, although constants are texts."""
        for known, binder in self._binders:
            if known == shared:
                return binder
        binder = LossBinder(self._original, self._point, {**shared, **shared.get("settings", {}), "settings": None})
        self._binders = [(shared, binder), *self._binders[:7]]
        return binder


def _of_sums(sums: Args) -> dict[str, Any]:
    """Return what a loss's sums of rows were made of: those of chosen and rejected rows, and the base's of both."""
    (here.forward, own, real, starts, ids, *_), (_, base, *_) = here.scores
    here.scores = []
    mask = (torch.arange(real.shape[1]) >= torch.tensor(starts)[:, None]).to(real) * real
    return {
        "sequences": ids, "attention_mask": real, "action_mask": mask[:, 1:] != 0, "log_probs": own,
        "context.base_action_log_probs": base, "context.base_row_log_probs": torch.cat(sums[2:]),
    }  # fmt: skip


def _switches(control: Control, *, follows: bool) -> tuple[Control, Control]:
    """Return the switch for losses that are not chosen, which only a trigger keeps, and for those that are, with their results.

    follows: a loss is chosen with its forward, without limits of its own. The length of rows limits no loss.
    """
    chosen = replace(control, min_seq_len=None, with_outputs=True)
    if follows:
        chosen = replace(chosen, every=1, max_dumps=None, ranks=None)
    return replace(chosen, every=0), chosen


def number(value: Any, name: str = "") -> Tensor | None:
    """Return numbers as a tensor, whose values do not make another kind of call; None for anything else.

    The memory of a number, or of a tuple of whole numbers, is that of the last one of this name in this thread, which the
    recorder has copied by then.
    """
    if isinstance(value, Tensor):
        return value
    kind = type(value)
    if kind in _DTYPES:
        held = here.numbers.get((name, kind))
        if held is None:
            array = np.array(value, _DTYPES[kind])
            held = here.numbers[name, kind] = array, torch.from_numpy(array)
        held[0][...] = value
        return held[1]
    array = np.array(value)
    if array.dtype.kind not in "bif":
        return None
    return torch.from_numpy(array.astype(np.float64 if array.dtype.kind == "f" else np.int64))


@dataclass(slots=True)
class Waiting:
    """A recorded loss whose record waits for the end of its step. results: its own, by name; the other results are added."""

    recorder: Any
    item: Item
    results: dict[str, Any]
    engine: Referent
    step: Any


def _step_of(engine: Referent) -> Any:
    return getattr(engine(), "global_steps", None)


def end_step(norm: Any) -> None:
    """Hand over the loss that waits for the end of its step. norm: of the step's gradient, if it is a number or a tensor."""
    if here.waiting is not None:
        here.waiting.results["grad_norm"] = number(norm)
    finish(here.waiting)


def finish(waiting: Waiting | None, *, stepped: bool = False) -> None:
    """Hand over a loss that waits, with the norm of the gradient if its optimizer step has run. Raises nothing of its own."""
    if waiting is None:
        return
    forked = waiting.item.pid != os.getpid()
    here.waiting = None
    if forked:
        return
    recorder, item, results = waiting.recorder, waiting.item, waiting.results
    handed = None
    try:
        if stepped and _step_of(waiting.engine) != waiting.step:
            results["grad_norm"] = recorder.attempt(lambda: number(waiting.engine().get_global_grad_norm()))
        output = tuple(map(results.get, item.kind.returns))
        handed = recorder.attempt(lambda: (recorder.leave(item, output, None), True))
    finally:
        if handed is None:
            with recorder.writer.lock:
                recorder.writer.failed += ((item, RuntimeError("a loss could not be handed over")),)


atexit.register(lambda: finish(here.waiting))  # before the recorder is closed: registered after that
