"""Wrap a trainer's functions in the process that imported them: `actordbg run --adapter` calls this when a module has run.

A function whose arguments are not those that the adapter reads is left alone, and one line says what differs: another release of
a trainer is trained with, never guessed at.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from actordbg.base.fault import describe
from actordbg.capture import facts
from actordbg.trainers import recorded_model
from actordbg.trainers.find_adapter import distribution_of, of_user
from actordbg.trainers.recorded_model import MARK, arguments_of
from actordbg.trainers.seam import Adapter, Seam


def attach(module: ModuleType, named: str, store: str) -> list[str]:
    """Wrap what the adapter `named` has in this module. Returns the functions that are recorded now."""
    adapter = of_user(named)
    facts.DISTRIBUTIONS.extend({adapter.package, distribution_of(named)}.difference(facts.DISTRIBUTIONS))
    seams = [seam for seam in adapter.seams if seam.module == module.__name__]
    return [seam.where for seam in seams if _attach(module, adapter, seam, store)]


def _attach(module: ModuleType, adapter: Adapter, seam: Seam, store: str) -> bool:
    path, _, name = seam.function.rpartition(".")
    holder: Any = module
    for part in filter(None, path.split(".")):
        holder = getattr(holder, part, None)
    original = inspect.getattr_static(holder, name, None)
    if not inspect.isfunction(original):
        recorded_model.tell(f"adapter {adapter.name}: there is no function {seam.where}: not recording it")
        return False
    if hasattr(original, MARK):
        return True
    if why := seam.differs(inspect.signature(original).parameters):
        recorded_model.tell(f"adapter {adapter.name}: {seam.where}: {why}: not recording it")
        return False
    wrap = _making if seam.makes_model else recorded_model.recorded
    setattr(holder, name, wrap(original, seam, adapter, store, {}))
    return hasattr(inspect.getattr_static(holder, name), MARK)


def _making(original: Callable[..., Any], seam: Seam, adapter: Adapter, store: str, made: dict[str, Any]) -> Callable[..., Any]:
    """`original`, which prepares a model; then that model's forward is recorded."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        try:
            known = arguments_of(signature, args, kwargs)
            _record_model(known.pop(seam.makes_model), seam, adapter, store, known)
        except Exception as error:  # noqa: BLE001  # the model was made; it is trained unrecorded
            recorded_model.tell(f"{seam.where}: its model is not recorded: {describe(error)}")
        return output

    setattr(function, MARK, original)
    return function


def _record_model(model: Any, seam: Seam, adapter: Adapter, store: str, known: dict[str, Any]) -> None:
    """Record a model's forward: its own where it has one, as a copy of it has then; else that of its class."""
    own = vars(model).get("forward")
    forward = type(model).forward if own is None else own.__func__
    if hasattr(forward, MARK) or not {*seam.takes} <= {*inspect.signature(forward).parameters}:
        return
    if own is None:
        where = f"{type(model).__module__}:{type(model).__qualname__}.forward"
        type(model).forward = recorded_model.recorded(forward, seam, adapter, store, known, where)
    else:
        model.forward = MethodType(recorded_model.recorded(forward, seam, adapter, store, known), model)
