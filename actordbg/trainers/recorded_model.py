"""Present a trainer's model to the recorder as an Actor, so that the recorder need not know any trainer.

The recorder wraps `forward` of a class, and reads facts from its instances (`actordbg.capture.hook.install`). A `RecordedModel`
is such an instance, one for each model of the process; its `forward` takes rows under an Actor's argument names, and runs the
trainer's own function with the trainer's own arguments. So everything that holds for recording an Actor holds here: its cost,
the flight recorder, triggers, counters, the live switch.

Invariant: the function runs exactly once, with its original arguments, and the caller gets its result or exception; any failure
in here is reported once and ignored.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
from torch.compiler import is_compiling

from actordbg.base.fault import complain, describe, from_outside
from actordbg.capture import facts, hook
from actordbg.capture.facts import unwrap
from actordbg.trainers.find_adapter import distribution_of, of_user
from actordbg.trainers.recorded_rows import named_rows, read_scores
from actordbg.trainers.seam import Adapter, NoPolicy, Rows, Scores, Seam

MARK = "__actordbg_seam__"
"""Attribute of a wrapped function: the original."""


@dataclass
class CurrentForward:
    """A recorded forward: its slot, the model as an Actor, its arguments under an Actor's names, and, after it, its result.

    reference: the forward without gradients that followed it in the same loss.
    """

    slot: Any
    seam: Seam
    actor: RecordedModel
    named: Mapping[str, Any]
    output: Any = None
    reference: CurrentForward | None = None

    @property
    def scores(self) -> Scores:
        """Return what the adapter reads of the result; nothing while the forward still runs."""
        return Scores() if self.output is None else self.seam.result(self.output)


class _Inside(threading.local):
    """What a thread is in: a recorded function, whose call waits; a loss; the last forward, kept while its loss runs.

    around: arguments of the function around that forward and its loss. micro_batch: how many losses were computed since the step.
    has_steps: an adapter says where steps end.
    """

    busy = in_loss = has_steps = False
    micro_batch = 0
    around: Mapping[str, Any] = {}
    call: Callable[[], Any] | None = None
    current: CurrentForward | None = None


inside = _Inside()
_told: set[str] = set()


class ModelOfCall:
    """Stands in for the DeepSpeed engine that the recorder reads: the step, and the module, by weak reference."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.global_steps: int | None = None
        self._model = weakref.ref(model)

    @property
    def module(self) -> torch.nn.Module | None:
        return self._model()


class RecordedModel:
    """A model that the recorder sees as an Actor, one per set of active LoRA adapters. Each seam has a subclass of its name."""

    known: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, RecordedModel]]
    recorded_as: Mapping[str, Any]

    def __init__(self, model: torch.nn.Module, adapters: list[str] | None = None) -> None:
        self.model = ModelOfCall(model)
        if adapters is not None:
            self.recorded_as = {**self.recorded_as, "lora_adapters": adapters}
        self.recorded_role = "reference" if adapters in ([], ["ref"]) else None  # none, or TRL's copy of the initial adapter
        self.training = self.packing_samples = False
        self.temperature = 1.0

    @classmethod
    def of(cls, rows: Rows) -> RecordedModel:
        """Return the instance for the model of a call, updated with the model's current state."""
        model = unwrap(rows.model)
        adapters = active_adapters(model)
        known, key = cls.known.setdefault(model, {}), str(adapters)
        instance = known.get(key) or known.setdefault(key, cls(model, adapters))
        instance.training, instance.temperature = model.training, float(rows.temperature)
        instance.packing_samples, instance.model.global_steps = rows.packed, rows.step
        return instance

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        return_logprobs: bool = False,
        return_entropy: bool = False,
        **more: torch.Tensor,
    ) -> Any:
        """Run the call that waits in this thread; the recorder reads its arguments and its result."""
        waiting = inside.call
        inside.call = None
        assert waiting is not None
        return waiting()


def active_adapters(model: Any) -> list[str] | None:
    """Return the names of the active peft adapters: empty under `disable_adapter()`, None for a model without peft."""
    if not hasattr(model, "peft_config"):
        return None
    layer: Any = next((module for module in model.modules() if hasattr(module, "_disable_adapters")), None)
    return [] if layer is None or layer._disable_adapters else list(layer.active_adapters)


class Returned(tuple[Any, ...]):
    """The result of `forward`: the function's own. Its scores are read only if the recorder unpacks this tuple."""

    output: Any
    read: Callable[[], Scores]

    def __iter__(self) -> Iterator[Any]:
        scores = self.read()
        return iter((scores,) if scores.log_probs is None else (scores.log_probs, scores))


def recorded(
    original: Callable[..., Any], seam: Seam, adapter: Adapter, store: str, made: Mapping[str, Any], where: str = ""
) -> Callable[..., Any]:
    """Return `original` with its calls recorded as rows.

    made: arguments of the function that prepared the model. where: the place of `original`, if it is not the seam's.
    """
    where = where or seam.where

    @functools.wraps(RecordedModel.forward)
    def forward(self: RecordedModel, *args: Any, **kwargs: Any) -> Any:
        return RecordedModel.forward(self, *args, **kwargs)

    whose = {"trainer": adapter.package, "adapter": adapter.name, "function": where}
    own = {"known": weakref.WeakKeyDictionary(), "forward": forward, "recorded_as": whose}  # the hook finds and wraps this
    kind: type[RecordedModel] = type(f"{adapter.name}.{where.partition(':')[2]}", (RecordedModel,), own)
    if not hook.install(kind, store=store):
        return original
    signature, slot = inspect.signature(original), getattr(vars(kind)["forward"], hook.SLOT)
    traced = slot.traced

    def prepared(args: Any, kwargs: Any) -> tuple[RecordedModel, Rows, dict[str, Any]] | None:
        """Return the model and the rows of a call, and the rows as arguments; None if it has none, or they cannot be read."""
        try:
            rows = seam.rows({**made, **arguments_of(signature, args, kwargs), "around": inside.around})
            return None if rows is None else (kind.of(rows), rows, named_rows(rows))
        except BaseException as error:  # an adapter may raise anything, and the training continues
            if from_outside(error):
                raise
            why = error
        tell(f"{seam.where}: a call was not recorded: {describe(why)}")
        slot.recorder.attempt(lambda: lost(why))
        return None

    def lost(error: BaseException) -> None:
        """Report a model that is not a policy; count any other call as dropped."""
        recorder = slot.recorder
        recorder.watch.start()
        if (control := recorder.control) is not None:
            ledger = recorder.meet(slot, control).ledger
            if isinstance(error, NoPolicy):
                ledger.last_error, ledger.changed = str(error), True
            elif ledger.open(control, None)[1] is None:
                ledger.drop("error", f"{seam.where}: {describe(error)}")

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            traced()
            return original(*args, **kwargs)
        if slot.enter is None or inside.busy:
            return original(*args, **kwargs)
        inside.busy = True
        before, last = inside.current, slot.recorder.last
        try:
            ready = prepared(args, kwargs)
            if ready is None:
                inside.busy = seam.silent  # calls inside it may be recorded
                return original(*args, **kwargs)
            actor, rows, named = ready

            def run() -> Returned:
                returned = Returned()
                returned.output = original(*args, **kwargs)
                returned.read = functools.partial(scores_of, seam, rows, returned.output)
                return returned

            inside.call, inside.current = run, CurrentForward(slot, seam, actor, named)
            slot.recorder.last = None
            inside.current.output = actor.forward(**named).output
            return inside.current.output
        finally:
            inside.busy, inside.call = False, None
            if seam.kept and inside.current is not None:
                inside.current.output = None  # a loss that follows has the log-probs
            elif not inside.in_loss:
                inside.current = None
            elif before is not None and before is not inside.current and not torch.is_grad_enabled():
                before.reference, inside.current, slot.recorder.last = inside.current, before, last

    setattr(function, MARK, original)
    return function


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults, and those of a `**kwargs` under their own names."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name))
    return arguments


def scores_of(seam: Seam, rows: Rows, output: Any) -> Scores:
    """Read the scores of a result through its adapter; compute log-probs from logits if it returned only those."""
    try:
        with torch.no_grad():
            return read_scores(seam, rows, output)
    except BaseException as error:  # an adapter may raise anything, and the training continues
        if from_outside(error):
            raise
        tell(f"{seam.where}: its result was not read: {describe(error)}")
        return Scores()


def tell(text: str) -> None:
    """Print a line to standard error, once per process."""
    if text not in _told and len(_told) < 100:
        _told.add(text)
        complain(f"process {os.getpid()}: {text}")


def attach(module: ModuleType, named: str, store: str) -> list[str]:
    """Wrap the functions of the adapter `named` in this module. Returns the functions that are recorded now."""
    adapter, attached = of_user(named), []
    facts.DISTRIBUTIONS.extend({adapter.package, distribution_of(named)}.difference(facts.DISTRIBUTIONS))
    for seam in adapter.seams:
        if seam.module != module.__name__:
            continue
        path, _, name = seam.function.rpartition(".")
        holder: Any = module
        for part in filter(None, path.split(".")):
            holder = getattr(holder, part, None)
        original = inspect.getattr_static(holder, name, None)
        if not inspect.isfunction(original):
            tell(f"adapter {adapter.name}: there is no function {seam.where}: not recording it")
            continue
        if not hasattr(original, MARK):
            if why := seam.differs(inspect.signature(original).parameters):
                tell(f"adapter {adapter.name}: {seam.where}: {why}: not recording it")
                continue
            if seam.loss or seam.steps or seam.around or seam.backward:
                from actordbg.trainers.recorded_losses import LossFollower

                _Inside.has_steps |= seam.steps is not None
                binds = functools.partial(arguments_of, inspect.signature(original))
                function = LossFollower(seam, inside, binds, tell).followed(original)
                setattr(function, MARK, original)
                setattr(holder, name, function)
            else:
                setattr(holder, name, (_making if seam.makes_model else recorded)(original, seam, adapter, store, {}))
        if hasattr(inspect.getattr_static(holder, name), MARK):
            attached.append(seam.where)
    return attached


def _making(original: Callable[..., Any], seam: Seam, adapter: Adapter, store: str, made: dict[str, Any]) -> Callable[..., Any]:
    """Return `original`, a function that prepares a model, so that the model's forward is recorded afterwards.

    The instance's own forward is wrapped if it has one (a later copy of the model also has it), else that of its class.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        try:
            known = arguments_of(signature, args, kwargs)
            model = known.pop(seam.makes_model)
            own, kind = vars(model).get("forward"), type(model)
            forward = kind.forward if own is None else own.__func__
            if hasattr(forward, MARK) or not {*seam.takes} <= {*inspect.signature(forward).parameters}:
                return output
            where = f"{kind.__module__}:{kind.__qualname__}.forward" if own is None else ""
            wrapped = recorded(forward, seam, adapter, store, known, where)
            if own is None:
                kind.forward = wrapped
            else:
                model.forward = MethodType(wrapped, model)
        except BaseException as error:  # the model exists; it is trained unrecorded
            if from_outside(error):
                raise
            tell(f"{seam.where}: its model is not recorded: {describe(error)}")
        return output

    setattr(function, MARK, original)
    return function
