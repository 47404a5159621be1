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

Its results are stored by name. The losses of those forwards are recorded that are recorded themselves, whatever limits chose
them; with triggers, those that a trigger keeps. Nothing is held longer than the trainer holds it: the last forward's tensors are
known by weak reference.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling

from actordbg.capture.control import Control
from actordbg.capture.facts import Binder
from actordbg.capture.recorded_call import Item
from actordbg.formats.dump_record import LOSS
from actordbg.formats.nested_values import CONTEXT


@dataclass(frozen=True)
class CapturePoint:
    """A loss. where: "module:Class", an nn.Module. returns: names of its results. names: its arguments' names in PolicyLoss."""

    where: str
    returns: tuple[str, ...]
    names: Mapping[str, str]


@dataclass(frozen=True)
class CapturePoints:
    """The losses of a trainer, as its `losses.json` declares them.

    forward, step: "module:Class" of the classes whose `forward` returns the log-probs, and whose `training_step(experience,
    kl_ctl, step, ...)` calls the loss. settings: paths in `strategy.args` by the name that a record has; flags: those that are
    recorded as true or false.
    """

    forward: str
    step: str
    losses: tuple[CapturePoint, ...]
    settings: Mapping[str, str]
    flags: Mapping[str, str]

    @classmethod
    def of(cls, package: str) -> CapturePoints | None:
        """Read what the folder of a trainer's package declares; None if actordbg has no such folder."""
        file = Path(__file__).parents[1] / "trainers" / package / "losses.json"
        if not package.isidentifier() or not file.is_file():
            return None
        read = json.loads(file.read_text(encoding="utf-8"))
        losses = (CapturePoint(each["where"], tuple(each["returns"]), each["names"]) for each in read.pop("losses"))
        return cls(losses=tuple(losses), **read)


_ARGUMENTS = ("sequences", "attention_mask", "action_mask", "action_log_probs", "rollout_log_probs", "advantages")
"""Parts of an experience that the loss or the forward gets as arguments."""

Wrap = Callable[[Callable[..., Any], Any], Callable[..., Any]]
_attached: set[type] = set()
_here = threading.local()


class RecordedLoss:
    """A loss as the recorder sees it: an actor, with the model of the last forward while a call is recorded."""

    def __init__(self, where: str) -> None:
        self.recorded_as = {"trainer": where.partition(".")[0], "adapter": None, "function": f"{where}.forward"}
        self.recorded_fields = {"point": LOSS}
        self.recorded_role: str | None = None
        self.model: Any = None


class LossSlot:
    """Stands in for a `hook.Slot` where a loss is wrapped."""

    def __init__(self, slot: Any, points: CapturePoints, point: CapturePoint, original: Callable[..., Any]) -> None:
        self._slot, self._points, self._point = slot, points, point
        self._binder = Binder(original)
        self._binder.names = tuple(point.names.get(name, name) for name in self._binder.names)
        self._binder.returns = point.returns
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

    def _enter(self, _: Binder, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item | None:
        recorder, control = self._slot.recorder, self._slot.recorder.control
        given = {self._point.names.get(name, name): value for name, value in kwargs.items()}
        log_probs = args[0] if args else given.get("log_probs")
        last = getattr(_here, "forward", None)
        if control is None or last is None or last.output() is not log_probs:
            return None
        actor, item = last.actor(), last.item
        chosen = item is not None and item.reason is None
        if actor is None or not (control.triggers or chosen):
            return None
        if self._control is not control:
            self._control, self._controls = control, (_whole(control, 0), _whole(control, 1))
        self._binder.control = self._controls[chosen]
        known = self._known.get(loss)
        if known is None:
            known = self._known.setdefault(loss, RecordedLoss(self._point.where))
        instance = recorder.known(actor)
        known.recorded_role = f"{(instance.role if instance is not None else None) or 'policy'} loss"
        for name in ("training", "packing_samples", "temperature"):
            setattr(known, name, getattr(actor, name, None))
        inputs = {name: tensor for name, at in last.inputs.items() if (tensor := at()) is not None}
        known.model = actor.model
        try:
            context = _context(self._points, loss, actor.model, item.dump_id if item is not None and item.whole else None)
            entered: Item | None = type(recorder).enter(  # not through a wrapper, which would hash the weights again
                recorder, self._binder, known, args, {**inputs, **given, **context}
            )
            return entered
        finally:
            known.model = None


def _whole(control: Control, every: int) -> Control:
    """Return the switch for losses, which follow their forwards: without limits that select calls, and with results.

    every: 1 for the loss of a forward that is recorded; 0 for others, which only a trigger keeps.
    """
    return replace(control, every=every, max_dumps=None, ranks=None, min_seq_len=None, with_outputs=True)


def _context(points: CapturePoints, loss: Any, engine: Any, forward: str | None) -> dict[str, Any]:
    """Return everything that is recorded beside the arguments, by name."""
    named: dict[str, Any] = {"forward": forward}
    named |= {f"loss.{name}": value for name, value in vars(loss).items() if name[0] != "_" and name != "training"}
    for name, method in (
        ("engine_accumulation", "gradient_accumulation_steps"),
        ("boundary", "is_gradient_accumulation_boundary"),
    ):
        if callable(read := getattr(engine, method, None)):
            named[name] = read()
    named["micro_steps"] = getattr(engine, "micro_steps", None)
    step = getattr(_here, "step", None)
    if step is not None:
        trainer, experience, kl_ctl, micro_batch = step
        named |= {"kl_ctl": kl_ctl, "micro_batch": micro_batch}
        parts = {name: value for name, value in vars(experience).items() if name not in _ARGUMENTS}
        named |= {name: value for name, value in parts.items() if isinstance(value, torch.Tensor) and value.dim() < 3}
        strategy = getattr(trainer, "strategy", None)
        named["accumulation"] = getattr(strategy, "accumulated_gradient", None)
        arguments = getattr(strategy, "args", None)
        named |= {name: _at(arguments, path) for name, path in points.settings.items()}
        named |= {name: bool(_at(arguments, path)) for name, path in points.flags.items() if arguments is not None}
        named["eos_token_id"] = getattr(getattr(trainer, "tokenizer", None), "eos_token_id", None)
    return {CONTEXT + name: value for name, value in named.items() if value is not None or name.startswith("loss.")}


def _at(arguments: Any, path: str) -> Any:
    """Return a setting by its dotted path; None if there is none."""
    return functools.reduce(lambda holder, name: getattr(holder, name, None), path.split("."), arguments)


@dataclass(frozen=True)
class LastForward:
    """The last forward of a thread, by weak references. item: its recorded call; None if it was not recorded."""

    output: Callable[[], Any]
    actor: Callable[[], Any]
    inputs: Mapping[str, Callable[[], Any]]
    item: Item | None


def _noting(original: Callable[..., Any], slot: Any) -> Callable[..., Any]:
    """Return the wrapped `Actor.forward`, which also notes what it returned."""
    binder = Binder(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or (control := slot.recorder.control) is None or LOSS not in control.calls:
            return original(self, *args, **kwargs)
        slot.recorder.last = _here.forward = None
        output = original(self, *args, **kwargs)
        given = dict(zip(binder.names, args, strict=False)) | kwargs
        values = output[0] if type(output) in (tuple, list) and output else output
        tensors = {name: given.get(name) for name in ("sequences", "attention_mask")}
        with contextlib.suppress(MemoryError, TypeError):
            inputs = {name: weakref.ref(tensor) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
            item, known = slot.recorder.last, slot.recorder.known(self)
            own = item is not None and known is not None and item.ledger is known.ledger  # else another thread's, or actor's
            _here.forward = LastForward(weakref.ref(values), weakref.ref(self), inputs, item if own else None)
        return output

    return forward


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the training step, which also shows its experience to the losses inside it."""

    @functools.wraps(original)
    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        kl_ctl, step, *_ = (*args, None, None)
        _here.step = self, experience, kwargs.get("kl_ctl", kl_ctl), kwargs.get("step", step)
        try:
            return original(self, experience, *args, **kwargs)
        finally:
            _here.step = None

    return training_step


def attach(slot: Any, wrap: Wrap) -> None:
    """Wrap the losses, the forward and the training step in the modules that this process has imported; each only once.

    slot: the `hook.Slot` of Actors; wrap: `hook.wrap`.
    """
    for points in filter(None, map(CapturePoints.of, slot.packages)):

        def wrapped(point: CapturePoint, original: Callable[..., Any], own: CapturePoints = points) -> Callable[..., Any]:
            return wrap(original, LossSlot(slot, own, point, original))

        for point in points.losses:
            _replace(point.where, "forward", functools.partial(wrapped, point))
        _replace(points.forward, "forward", lambda original: _noting(original, slot))
        _replace(points.step, "training_step", _stepping)


def _replace(where: str, method: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, name = where.partition(":")
    holder = getattr(sys.modules.get(module), name, None)
    original = None if holder is None else vars(holder).get(method)
    if holder is not None and callable(original) and holder not in _attached:
        _attached.add(holder)
        setattr(holder, method, make(original))
