"""Hand each call of a model, of a function or of a trainer to a callback, as rows and scores, while a block lasts.

    with Tap(model, print):                 # each `model(**batch)` of a model of transformers
        trainer.train()
    with Tap("trl", print): ...             # each call of the functions that an adapter knows (`actordbg adapters`)
    scored = Tap(score, print)              # any function of rows: `scored(ids, mask)` calls it

The call runs first, once, with its own arguments. Unlike recording a job (`actordbg.capture`), the callback runs in the caller's
thread, and its exceptions reach the caller: this is for tests and notebooks, whose purpose it is.
"""

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any, TypeVar

import torch

from actordbg.base.errors import NothingToDo, Unsupported
from actordbg.capture.facts import unwrap
from actordbg.trainers.find_adapter import of_user
from actordbg.trainers.plain_adapter import Plain
from actordbg.trainers.recorded_model import RecordedModel, arguments_of
from actordbg.trainers.recorded_rows import read_scores
from actordbg.trainers.seam import Adapter, NoPolicy, Rows, Scores, Seam, Unreadable

IDS, MASKS = ("sequences", "input_ids", "ids"), ("attention_mask", "mask")
"""Names of a function's arguments that are token ids, and that say which of them are real."""


class Caller(RecordedModel):
    """What made a call, as the recorder sees it: the model in its current state, and the function."""

    def __init__(self, rows: Rows, seam: Seam, adapter: Adapter) -> None:
        super().__init__(unwrap(rows.model))
        self.training, self.temperature = rows.model.training, float(rows.temperature)
        self.packing_samples, self.model.global_steps = rows.packed, rows.step
        self.recorded_as = {"trainer": adapter.package, "adapter": adapter.name, "function": seam.where}


T = TypeVar("T", bound="Tap")
OnCall = Callable[[Rows, Scores, Caller], None]


class Tap:
    """A context manager around the target's calls; a tapped function can also be called itself (a decorator).

    target: a model, the name of an adapter, or a function that takes rows (IDS, MASKS, `action_mask`, `model`) and returns
    log-probs, or an output with `logits`. required: a block without a call is an error, not a warning. skipped: calls that are
    not rows of a policy, by reason.
    """

    def __init__(self, target: Any, on_call: OnCall, *, required: bool = False) -> None:
        self.target, self.on_call, self.required, self.calls = target, on_call, required, 0
        self.skipped: Counter[str] = Counter()
        self._undo = ExitStack()
        self._busy = False
        self.adapter: Adapter = of_user(target if isinstance(target, str) else "plain")
        if callable(target):
            functools.update_wrapper(self, target, updated=())
            self._called = target if isinstance(target, torch.nn.Module) else self._tapped(target, _seam_of(target))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, and hand the call to the callback."""
        with self if isinstance(self.target, torch.nn.Module) else ExitStack():
            return self._called(*args, **kwargs)

    def __enter__(self: T) -> T:
        target = self.target
        if isinstance(target, torch.nn.Module):
            self._replace(target, "forward", self._tapped(target.forward, Plain.seams[0], {"self": target}))
        elif isinstance(target, str):
            for seam in self.adapter.seams:
                if not (seam.makes_model or seam.silent):
                    path, _, name = seam.function.rpartition(".")
                    holder = functools.reduce(getattr, filter(None, path.split(".")), import_module(seam.module))
                    self._replace(holder, name, self._tapped(inspect.getattr_static(holder, name), seam))
        else:
            raise Unsupported("a function has no calls that could be tapped from outside", hint="call what `record` returned")
        return self

    def __exit__(self, *raised: object) -> None:
        self._undo.close()
        if not self.calls and raised[0] is None:
            reasons = "; ".join(f"{why} ({count})" for why, count in self.skipped.items()) or "there was none"
            name = self.target if isinstance(self.target, str) else type(self.target).__name__
            message = f"no call of {name} was seen: {reasons}"
            if self.required:
                raise NothingToDo(message, hint="call it inside the block")
            warnings.warn(f"actordbg: {message}", stacklevel=2)

    def _replace(self, holder: Any, name: str, function: Any) -> None:
        """Replace an attribute until the block ends; an inherited one is inherited again."""
        if name in vars(holder):
            self._undo.callback(setattr, holder, name, vars(holder)[name])
        else:
            self._undo.callback(delattr, holder, name)
        setattr(holder, name, function)

    def _tapped(self, original: Callable[..., Any], seam: Seam, more: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            known = {**arguments_of(signature, args, kwargs), **(more or {})}
            rows = None if self._busy else self._rows(seam, known)
            if rows is None:
                return original(*args, **kwargs)
            self._busy = True
            try:
                output = original(*args, **kwargs)
                with torch.no_grad():
                    scores = read_scores(seam, rows, output)
                self.calls += 1
                self.on_call(rows, scores, Caller(rows, seam, self.adapter))
                return output
            finally:
                self._busy = False

        return function

    def _rows(self, seam: Seam, call: Mapping[str, Any]) -> Rows | None:
        try:
            return seam.rows(call)
        except (Unreadable, NoPolicy) as why:
            self.skipped[str(why)] += 1
            return None


def _seam_of(function: Any) -> Seam:
    """Return the seam of a function that takes rows."""
    return Seam(f"{function.__module__}:{function.__qualname__}", rows_of_call, scores_of_output)


def rows_of_call(call: Mapping[str, Any]) -> Rows:
    """Read rows from the arguments of a function by their names. Raises Unreadable without token ids [B, S]."""
    ids = next((call[name] for name in IDS if call.get(name) is not None), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise Unreadable(f"none of its arguments {', '.join(IDS)} is a tensor of token ids [B, S]")
    model = next((call[name] for name in ("model", "self") if isinstance(call.get(name), torch.nn.Module)), torch.nn.Module())
    mask = next((call[name] for name in MASKS if call.get(name) is not None), None)
    return Rows(model, ids, mask, call.get("action_mask"), float(call.get("temperature") or 1.0))


def scores_of_output(output: Any) -> Scores:
    """Read log-probs, entropies or logits from what a function returned: a tensor or a tuple is of log-probs, then entropies."""
    parts = output if isinstance(output, tuple) else (output,) if isinstance(output, torch.Tensor) else ()
    if parts:
        return Scores(parts[0], parts[1] if len(parts) > 1 and isinstance(parts[1], torch.Tensor) else None)
    return Scores(*(getattr(output, name, None) for name in ("log_probs", "entropy", "logits")))
