"""Record losses beside forwards (`dump enable --calls forward,loss`). A process loads this module only then, and changes no file.

`attach` wraps the losses that a trainer's `losses.json` declares, and the methods that a record needs context from, in the
modules that the process has imported by its first forward. A loss is recorded like a forward, by the same `Recorder`, ring and
writer. Its arguments:

| what | from |
|---|---|
| `log_probs`, `old_log_probs`, `advantages`, `action_mask`, ... | the loss's own arguments |
| `sequences`, `attention_mask`, `context.forward` (a dump id) | the last forward, whose result `log_probs` is |
| `context.rewards`, `.returns`, `.truncated`, `.response_length`, ... | the experience that the training step got |
| `context.loss.*` | plain attributes of the loss: clips, correction, token-mean or sequence-mean |
| `context.micro_batch`, `.engine_accumulation`, `.rollout.*`, ... | the training step, the DeepSpeed engine, the settings |

Its results are stored by name, and beside them `backward_loss`, which the trainer passes to backward after it added other terms,
and `grad_norm`, if an optimizer step follows: the record waits for the end of that step. The losses of those forwards are
recorded that are recorded themselves, whatever limits chose them; with triggers, those that a trigger keeps. No large tensor is
held longer than the trainer holds it: the last forward's are known by weak reference.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling

from actordbg.capture.control import Control
from actordbg.capture.facts import Binder, sort_into
from actordbg.capture.recorded_call import Item
from actordbg.formats.dump_record import LOSS
from actordbg.formats.nested_values import CONTEXT


@dataclass(frozen=True)
class CapturePoint:
    """A loss. where: "module:Class", an nn.Module, or a function. returns: names of its results. names: its arguments' names in
    PolicyLoss. method: of the class; "" for a function.
    """

    where: str
    returns: tuple[str, ...]
    names: Mapping[str, str]
    method: str = "forward"


@dataclass(frozen=True)
class CapturePoints:
    """The losses of a trainer, as its `losses.json` declares them.

    forward, step: "module:Class" of the classes whose `forward` returns the log-probs, and whose `training_step(experience,
    kl_ctl, step, ...)` calls the loss; optimizer: that whose `backward(loss, ...)` and `optimizer_step(...)` follow it.
    settings: paths in `strategy.args` by the name that a record has; flags: those that are recorded as true or false.
    """

    forward: str
    step: str
    optimizer: str
    losses: tuple[CapturePoint, ...]
    settings: Mapping[str, str]
    flags: Mapping[str, str]
    read: list[Any] = field(default_factory=lambda: [None, {}])

    @classmethod
    def of(cls, package: str) -> CapturePoints | None:
        """Read what the folder of a trainer's package declares; None if actordbg has no such folder."""
        file = Path(__file__).parents[1] / "trainers" / package / "losses.json"
        if not package.isidentifier() or not file.is_file():
            return None
        read = json.loads(file.read_text(encoding="utf-8"))
        losses = (CapturePoint(each["where"], tuple(each["returns"]), each["names"]) for each in read.pop("losses"))
        return cls(losses=tuple(losses), **read)

    def settings_in(self, arguments: Any) -> dict[str, Any]:
        """Return the settings and flags, which a process reads once from each `strategy.args`."""
        if self.read[0] is not arguments:
            named = {name: _at(arguments, path) for name, path in self.settings.items()}
            self.read[:] = arguments, named | {name: bool(_at(arguments, path)) for name, path in self.flags.items()}
        return self.read[1]  # type: ignore[no-any-return]


_ARGUMENTS = ("sequences", "attention_mask", "action_mask", "action_log_probs", "rollout_log_probs", "advantages")
"""Parts of an experience that the loss or the forward gets as arguments."""

_AFTER = ("backward_loss", "grad_norm")
"""Results that are known after the loss, at the end of the training step or of the optimizer step."""

Wrap = Callable[[Callable[..., Any], Any], Callable[..., Any]]
_attached: set[tuple[type, str]] = set()


class _Here(threading.local):
    """What a thread is in: its last forward, its training step, and its loss whose record waits for the end of the step.

    ends: `end_step` is called after each optimizer step.
    """

    forward: LastForward | None = None
    step: tuple[Any, Any, Any, Any] | None = None
    waiting: Waiting | None = None
    ends = False


here = _Here()


class RecordedLoss:
    """A loss as the recorder sees it: an actor, with the model of the last forward while a call is recorded."""

    def __init__(self, point: CapturePoint) -> None:
        function = f"{point.where}.{point.method}".rstrip(".")
        self.recorded_as = {"trainer": function.partition(".")[0], "adapter": None, "function": function}
        self.recorded_fields = {"point": LOSS}
        self.recorded_role: str | None = None
        self.model: Any = None


class LossBinder(Binder):
    """Binds calls of a loss, by the names of PolicyLoss's arguments, and these constants in each of them."""

    def __init__(self, original: Callable[..., Any], point: CapturePoint, constants: Mapping[str, Any]) -> None:
        super().__init__(original)
        self.names = tuple(point.names.get(name, name) for name in self.names)
        self.returns = (*point.returns, *_AFTER)
        for name, value in constants.items():
            sort_into(self._defaults, name, value)


class LossSlot:
    """Stands in for a `hook.Slot` where a loss is wrapped."""

    def __init__(self, slot: Any, points: CapturePoints, point: CapturePoint, original: Callable[..., Any]) -> None:
        self._slot, self._points, self._point = slot, points, point
        self._original = original
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
        actor = None if here.forward is None else here.forward.actor()
        ends = here.ends or here.step is not None or "optimizer_step" in (name for _, name in _attached)
        if error is not None or item.control.triggers or actor is None or not (ends and torch.is_grad_enabled()):
            return self.recorder.leave(item, output, error)  # type: ignore[no-any-return]
        results = output if isinstance(output, (tuple, list)) else (output,)
        results = [value.detach() if isinstance(value, torch.Tensor) else None for value in results]
        engine = weakref.ref(actor.model)
        here.waiting = Waiting(
            self.recorder, item, dict(zip(self._point.returns, results, strict=False)), engine, _step_of(engine)
        )
        return None

    def _binder(self, constants: dict[str, Any]) -> Binder:
        """Return the binder of calls with these constants: similar calls then share their kind, although constants are texts."""
        for known, binder in self._binders:
            if known == constants:
                return binder
        binder = LossBinder(self._original, self._point, constants)
        self._binders = [(constants, binder), *self._binders[:7]]
        return binder

    def _enter(self, _: Binder, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        _finish(here.waiting)
        recorder, control = self._slot.recorder, self._slot.recorder.control
        given = {self._point.names.get(name, name): value for name, value in kwargs.items()}
        log_probs = args[0] if args else given.get("log_probs")
        last = here.forward
        if control is None or last is None or not last.returned(log_probs):
            return None
        actor, item = last.actor(), last.item
        chosen = item is not None and item.reason is None
        if actor is None or not (control.triggers or chosen):
            return None
        if self._control is not control:
            self._control, self._controls = control, (_whole(control, 0), _whole(control, 1))
        known = self._known.get(loss)
        if known is None:
            known = self._known.setdefault(loss, RecordedLoss(self._point))
        instance = recorder.known(actor)
        known.recorded_role = f"{(instance.role if instance is not None else None) or 'policy'} loss"
        for name in ("training", "packing_samples", "temperature"):
            setattr(known, name, getattr(actor, name, None))
        inputs = {name: tensor for name, at in last.inputs.items() if (tensor := at()) is not None}
        known.model = actor.model
        try:
            constants, own = _context(self._points, loss, actor.model, item)
            binder = self._binder(constants)
            binder.control = self._controls[chosen]
            entered: Item | None = type(recorder).enter(  # not through a wrapper, which would hash the weights again
                recorder, binder, known, args, {**inputs, **given, **own}
            )
            return entered
        finally:
            known.model = None


def _whole(control: Control, every: int) -> Control:
    """Return the switch for losses, which follow their forwards: without limits that select calls, and with results.

    every: 1 for the loss of a forward that is recorded; 0 for others, which only a trigger keeps.
    """
    return replace(control, every=every, max_dumps=None, ranks=None, min_seq_len=None, with_outputs=True)


def _context(points: CapturePoints, loss: Any, engine: Any, item: Item | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return everything that is recorded beside the arguments, by name: what similar calls share, and this call's own.

    item: the recorded forward.
    """
    attributes = {name: value for name, value in vars(loss).items() if name[0] != "_" and name != "training"}
    shared = {f"loss.{name}": value for name, value in attributes.items() if not isinstance(value, torch.Tensor)}
    shared |= getattr(loss, "_settings", {})
    own: dict[str, Any] = {"micro_steps": getattr(engine, "micro_steps", None), **getattr(loss, "_own", {})}
    if item is not None and item.whole:  # the parts of its dump id
        own["forward"] = (item.own[1], item.number, item.pid, item.own[4])
    for holder, name, method in (
        (shared, "engine_accumulation", "gradient_accumulation_steps"),
        (shared, "engine_max_norm", "gradient_clipping"),
        (own, "boundary", "is_gradient_accumulation_boundary"),
        (own, "lr", "get_lr"),
    ):
        if callable(read := getattr(engine, method, None)):
            holder[name] = read()
    step = here.step
    if step is not None:
        trainer, experience, own["kl_ctl"], own["micro_batch"] = step
        parts = {name: value for name, value in vars(experience).items() if name not in _ARGUMENTS}
        own |= {name: value for name, value in parts.items() if isinstance(value, torch.Tensor) and value.dim() < 3}
        strategy = getattr(trainer, "strategy", None)
        shared["accumulation"] = getattr(strategy, "accumulated_gradient", None)
        shared |= points.settings_in(getattr(strategy, "args", None))
        shared["eos_token_id"] = getattr(getattr(trainer, "tokenizer", None), "eos_token_id", None)
    numbers = {name: _number(value) for name, value in own.items()}
    return (
        {CONTEXT + name: value for name, value in shared.items() if value is not None or name.startswith("loss.")},
        {CONTEXT + name: value for name, value in numbers.items() if value is not None},
    )


def _number(value: Any) -> torch.Tensor | None:
    """Return numbers as a tensor, whose values do not make another kind of call; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    numbers = value if isinstance(value, (list, tuple)) else (value,)
    whole = all(isinstance(each, int) for each in numbers)
    if not whole and not all(isinstance(each, (int, float)) for each in numbers):
        return None
    return torch.tensor(value, dtype=torch.int64 if whole else torch.float64)


def _at(arguments: Any, path: str) -> Any:
    """Return a setting by its dotted path; None if there is none."""
    return functools.reduce(lambda holder, name: getattr(holder, name, None), path.split("."), arguments)


@dataclass
class Waiting:
    """A recorded loss whose record waits for the end of its step. results: its own, by name; the other results are added."""

    recorder: Any
    item: Item
    results: dict[str, Any]
    engine: Callable[[], Any]
    step: Any


def _step_of(engine: Callable[[], Any]) -> Any:
    return getattr(engine(), "global_steps", None)


def end_step(norm: Any) -> None:
    """Hand over the loss that waits for the end of its step. norm: of the step's gradient, if it is a number or a tensor."""
    if here.waiting is not None:
        here.waiting.results["grad_norm"] = _number(norm)
    _finish(here.waiting)


def _finish(waiting: Waiting | None, *, stepped: bool = False) -> None:
    """Hand over a loss that waits, with the norm of the gradient if its optimizer step has run. Raises nothing."""
    here.waiting = None
    if waiting is None or waiting.item.pid != os.getpid():
        return
    recorder, item, results = waiting.recorder, waiting.item, waiting.results
    if stepped and _step_of(waiting.engine) != waiting.step:
        results["grad_norm"] = recorder.attempt(lambda: _number(waiting.engine().get_global_grad_norm()))
    output = tuple(map(results.get, item.kind.returns))
    if not recorder.attempt(lambda: (recorder.leave(item, output, None), True)):
        with recorder.writer.lock:
            recorder.writer.failed += ((item, RuntimeError("a loss could not be handed over")),)


atexit.register(lambda: _finish(here.waiting))  # before the recorder is closed: registered after that


@dataclass(frozen=True)
class LastForward:
    """The last forward of a thread, by weak references. item: its recorded call; None if it was not recorded.

    output: None for the first forward of a process, which had begun before it was noted.
    """

    output: Callable[[], Any] | None
    actor: Callable[[], Any]
    inputs: Mapping[str, Callable[[], Any]]
    item: Item | None

    @classmethod
    def of(cls, output: Any, actor: Any, given: Mapping[str, Any], item: Item | None) -> LastForward:
        tensors = {name: given.get(name) for name in ("sequences", "attention_mask")}
        inputs = {name: weakref.ref(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        return cls(None if output is None else weakref.ref(output), weakref.ref(actor), inputs, item)

    def returned(self, log_probs: Any) -> bool:
        """Check whether these log-probs are what the forward returned."""
        if self.output is not None:
            return self.output() is log_probs
        return isinstance(log_probs, torch.Tensor) and log_probs.requires_grad


def _noting(original: Callable[..., Any], slot: Any) -> Callable[..., Any]:
    """Return the wrapped `Actor.forward`, which also notes what it returned."""
    binder = Binder(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (control := slot.recorder.control) is None or LOSS not in control.calls:
            return original(self, *args, **kwargs)
        slot.recorder.last = here.forward = None
        output = original(self, *args, **kwargs)
        given = dict(zip(binder.names, args, strict=False)) | kwargs
        values = output[0] if type(output) in (tuple, list) and output else output
        with contextlib.suppress(MemoryError, TypeError):
            item, known = slot.recorder.last, slot.recorder.known(self)
            own = item is not None and known is not None and item.ledger is known.ledger  # else another thread's, or actor's
            here.forward = None if values is None else LastForward.of(values, self, given, item if own else None)
        return output

    return forward


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the training step, which also shows its experience to the losses inside it."""

    @functools.wraps(original)
    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        kl_ctl, step, *_ = (*args, None, None)
        here.step = self, experience, kwargs.get("kl_ctl", kl_ctl), kwargs.get("step", step)
        try:
            return original(self, experience, *args, **kwargs)
        finally:
            here.step = None
            _finish(here.waiting)

    return training_step


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the trainer's backward, which also notes the loss that it gets."""

    @functools.wraps(original)
    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if here.waiting is not None and isinstance(loss, torch.Tensor):
            here.waiting.results["backward_loss"] = loss.detach()
        return original(self, loss, *args, **kwargs)

    return backward


def _optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the trainer's optimizer step, after which a loss need not wait."""

    @functools.wraps(original)
    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _finish(here.waiting, stepped=True)
        return result

    return optimizer_step


def attach(slot: Any, wrap: Wrap) -> None:
    """Wrap the losses, the forward and the training step in the modules that this process has imported; each only once.

    slot: the `hook.Slot` of Actors, which is made to choose calls if only some optimizer steps are recorded; wrap: `hook.wrap`.
    """
    control = slot.recorder.control
    if control.steps:
        slot.enter = _within(slot.recorder, control)
    if LOSS not in control.calls:
        return
    slot.enter = _first(slot, slot.enter or slot.recorder.enter)
    for points in filter(None, map(CapturePoints.of, slot.packages)):

        def wrapped(point: CapturePoint, original: Callable[..., Any], own: CapturePoints = points) -> Callable[..., Any]:
            return wrap(original, LossSlot(slot, own, point, original))

        for point in points.losses:
            _replace(point.where, "forward", functools.partial(wrapped, point))
        _replace(points.forward, "forward", lambda original: _noting(original, slot))
        _replace(points.step, "training_step", _stepping)
        _replace(points.optimizer, "backward", _backward)
        _replace(points.optimizer, "optimizer_step", _optimizer_step)


def _within(recorder: Any, control: Control) -> Callable[..., Any]:
    """Return what a call runs first: calls outside of the steps are counted as sampled out.

    The steps are those of the model that is trained in this process: a reference beside it has an engine that never steps.
    """
    first, last = min(control.steps or ()), max(control.steps or ())
    outside = replace(control, every=0)
    trained: int | None = None

    def enter(binder: Binder, actor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        nonlocal trained
        step = getattr(getattr(actor, "model", None), "global_steps", None)
        if step is not None and getattr(actor, "training", False) and torch.is_grad_enabled():
            trained = step
        if trained is not None:
            step = trained
        elif step is None or _has_no_steps(recorder.known(actor) or recorder.meet(actor, control), actor):
            recorder.notices.warn(
                "steps", f"--step selects no call of this {type(actor).__name__}: its optimizer step is unknown"
            )
            step = None
        binder.control = None if step is not None and first <= step <= last else outside
        try:
            entered: Item | None = recorder.enter(binder, actor, args, kwargs)
            return entered
        finally:
            binder.control = None

    return enter


def _has_no_steps(instance: Any, actor: Any) -> bool:
    """Check for a reference model in a process of its own. An adapter's reference has its trainer's step."""
    return instance.role == "reference" and getattr(actor, "recorded_role", None) is None


def _first(slot: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the next call runs first: it is noted, since it may have begun before its forward was wrapped."""

    def enter(binder: Binder, actor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        slot.enter, slot.recorder.last = inner, None
        entered: Item | None = inner(binder, actor, args, kwargs)
        with contextlib.suppress(MemoryError, TypeError):
            given = dict(zip(binder.names, args, strict=False)) | kwargs
            here.forward = LastForward.of(None, actor, given, slot.recorder.last)
        return entered

    return enter


def _replace(where: str, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, name = where.partition(":")
    holder = getattr(sys.modules.get(module), name, None)
    original = None if holder is None else vars(holder).get(method)
    if holder is not None and callable(original) and (holder, method) not in _attached:
        _attached.add((holder, method))
        setattr(holder, method, make(original))
