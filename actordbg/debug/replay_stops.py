"""The stops of a replay's worker: before and after a forward, before a layer, where an input failed, and the user's own.

The worker says which input begins and which ranks run with it (`begin`), the session says how far it is (`before`, `after`,
`failed`), hooks say which layer comes. Ranks that compute together stop together: where all of them pass for certain, or not at
all. The worker's journal tells the supervisor, whose clock stands still meanwhile:

    stop    a prompt can be connected to: its rank, where it stands, and the node's address or where an editor connects
    go      that rank continued
    line    a line of --verbose for the user's terminal
"""

from __future__ import annotations

import builtins
import inspect
import linecache
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from actordbg.base.fault import Unsupported
from actordbg.debug import editor
from actordbg.debug.meeting import DETACH
from actordbg.debug.prompt import LAYER, Prompt, StoppedByUser, form, stats, tensors_in
from actordbg.debug.stops import Stop

BEFORE, AFTER, ERROR = "before", "after", "error"
LEVELS = ("warning", "info", "debug")
POST_MORTEM = "RAY_DEBUG_POST_MORTEM"
"""Ray's variable for a worker that stops where it failed."""
ARRIVAL_S = 60.0
"""How long ranks wait for each other at a `breakpoint()` of the user's, which need not be on the way of all of them."""


class NotInEvalMode(Exception):
    """--expect-eval: a module was in training mode."""


@dataclass(frozen=True)
class StopOrder:
    """What the user asked for, as the work order carries it.

    at: before, after, error, a layer, or "". rank: which gets the prompt; None: 0, or the one with the input, or that failed.
    dump: stop only where this dump runs. wait_s: wait so long for `actordbg attach`. terminal: the command has one of its own.
    debugpy: the port for an editor instead; 0 for any port of the rank's own.
    """

    at: str = ""
    rank: int | None = None
    dump: str | None = None
    wait_s: float | None = None
    terminal: bool = False
    debugpy: int | None = None
    level: str = LEVELS[0]
    expect_eval: bool = False


class ReplayStops:
    """See the module. `tell(event, **values)` writes into the worker's journal.

    may_pause: somebody may sit at a prompt. active: the session has something to tell.
    """

    def __init__(self, folder: Path, rank: int, order: StopOrder, tell: Callable[..., None]) -> None:
        self._folder, self._rank, self._order, self._tell = folder, rank, order, tell
        self._ranks: tuple[int, ...] = (rank,)
        self._leader = rank
        self._engaged = bool(order.at)
        self._detached, self._forwarding = False, False
        self._asked_layer: str | None = None
        self._next_layer: str | None = None  # "" for whichever comes
        self._layers: dict[str, Any] = {}
        self._open: Prompt | None = None
        self._session: Any = None
        self._dump_id = ""
        self._held_s = 0.0
        self.begun = False
        self.may_pause = bool(order.at) or order.terminal or order.wait_s is not None or order.debugpy is not None
        self.active = bool(order.at) or order.level != LEVELS[0] or order.expect_eval

    # ---- what the worker says

    def fit(self, session: Any, layers: Mapping[str, Any], others: Mapping[str, Any], compiled: bool) -> None:
        """Take a built actor. layers: where all ranks stop for certain; others: modules at which only a rank alone may stop."""
        self._session = session
        at = self._order.at
        if at and not compiled:
            self._layers = dict(layers)
            if at not in (BEFORE, AFTER, ERROR):
                known = {**(others if not session.is_collective else {}), **layers}
                self._asked_layer = _module_called(at, known, others)
                self._layers[self._asked_layer] = known[self._asked_layer]
        if not compiled and (at or self._order.level == "debug"):
            for name, module in (self._layers or dict(layers)).items():
                module.register_forward_pre_hook(self._hook(name), prepend=True, with_kwargs=True)

    def begin(self, dump_id: str, ranks: Sequence[int], leader: int, chosen: bool) -> None:
        """An input begins, on these ranks together; `chosen`: it is one to stop at."""
        self._dump_id, self._ranks, self.begun = dump_id, tuple(ranks), False
        self._leader = leader if leader in ranks else ranks[0]
        self._engaged = bool(self._order.at) and chosen and not self._detached
        self._next_layer = self._asked_layer

    def end(self) -> None:
        """The forward, or the input, is over: a rank that was still stepping continues."""
        self._forwarding = False
        if self._open is not None and self._open.steps:
            self._open.end()
        self._open = None

    @property
    def held_s(self) -> float:
        """Seconds spent in stops so far, without what ran between two steps."""
        return self._held_s + Prompt.waited_s

    # ---- what the session says

    def forward(self, actor: Any, call: Mapping[str, Any], model: Any, names: Mapping[str, Any]) -> Any:
        """Call the Actor; a stop before that is at the line of the call, and a rank that is stepping continues behind it.

        StoppedByUser, NotInEvalMode.
        """
        began = time.monotonic()
        if self._order.level != LEVELS[0] or self._order.expect_eval:
            self._before(call, model)
        self._held_s += time.monotonic() - began
        if self._engaged and self._order.at == BEFORE:
            tensors_first = {**tensors_in(call), **call}
            shown = {**tensors_first, **names, "arguments": call, "actor": actor, "module": model}
            text = f"output = actor({', '.join(tensors_first)})"
            output = self._at_frame("before Actor.forward", text, shown, run="actor(**arguments)")
        else:
            self._forwarding = self.begun = True
            output = actor(**call)
        self.end()
        return output

    def _before(self, call: Mapping[str, Any], model: Any) -> None:
        """Tell what the forward begins with; NotInEvalMode."""
        training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
        mode = "training" if training else "eval"
        first = next(iter(model.parameters()), None)
        weights = "no weights" if first is None else f"weights {str(first.dtype).removeprefix('torch.')} on {first.device}"
        self._tell_of("before", call, f"{mode} mode, {weights}, input {self._dump_id}")
        if self._order.expect_eval and training:
            raise NotInEvalMode(
                f"{len(training)} modules are in training mode ({', '.join(training[:3])}, ...): dropout may be on"
            )

    def after(self, actor: Any, call: Mapping[str, Any], model: Any, names: Mapping[str, Any]) -> None:
        """The forward is done, and no backward yet. names: log_probs, entropy, mask, loss."""
        self._forwarding = False
        if self._order.level != LEVELS[0]:
            values = {name: value for name, value in names.items() if name != "loss"}
            self._tell_of("after", values, f"loss {float(names['loss']):.6g}")
        if self._engaged and (self._order.at == AFTER or self._next_layer in ("", AFTER)):
            shown = {**call, **names, "arguments": dict(call), "actor": actor, "module": model}
            self._at_frame("after Actor.forward", "log_probs, entropy = actor(...)", shown)

    def _tell_of(self, when: str, values: Mapping[str, Any], more: str) -> None:
        if self._order.level != LEVELS[0]:
            tensors = "; ".join(f"{name} {form(tensor)}" for name, tensor in tensors_in(values).items())
            self._line(f"{when} forward: {tensors}; {more}")

    def failed(self, error: Exception) -> None:
        """An input failed: the post mortem, while the frames are there."""
        self._forwarding = False
        if not (self._engaged and self._order.at == ERROR) or isinstance(error, StoppedByUser | NotInEvalMode):
            return
        stop = self._stop(
            "where the input failed", None, {"error": error, "module": self._model}, f" ({type(error).__name__}: {error!s:.200})"
        )
        stop.trace, stop.arrival_s = error.__traceback__, 5.0
        if self._order.rank in (None, self._rank):
            stop.leader = self._rank
        if len(self._ranks) > 1:
            stop.refusal = "after a failure they need not have come as far"
        self._hold(stop)

    # ---- what the user's code says

    def reached(self, frame: FrameType, rank: int | None) -> None:
        """A `breakpoint()`: refused where nobody can come to the prompt."""
        if self._detached:
            return
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not self.may_pause:
            raise Unsupported(
                f"breakpoint() at {place} was reached, but this command has no terminal for its prompt",
                hint="`actordbg replay` in a terminal; or `replay --break-wait 600`, then `actordbg attach` from another one",
            )
        stop = self._stop(f"at breakpoint(), {place}", frame, {"model": self._model}, f", in {frame.f_code.co_name}")
        stop.arrival_s = ARRIVAL_S
        if rank in self._ranks:
            stop.leader = rank
        self._hold(stop)

    # ---- the rest

    def _hook(self, name: str) -> Callable[..., None]:
        def before_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._forwarding:
                return
            if self._order.level == "debug":
                first = next(iter([*args, *kwargs.values()]), None)
                self._line(f"before {name}: {stats(first)}")
            if self._engaged and self._next_layer in ("", name):
                call = _bound(module, args, kwargs)
                names = {**call, "arguments": call, "module": module, "model": self._model}
                self._at_frame(f"before {name}", f"{name}({', '.join(call)})", names)

        return before_layer

    def _at_frame(self, place: str, code: str, names: Mapping[str, Any], run: str = "") -> Any:
        def stop_at(frame: FrameType) -> None:
            self._hold(self._stop(place, frame, names, f", input {self._dump_id}"))
            if run:
                self._forwarding = self.begun = True

        return in_a_frame(place, code, self._names(names), stop_at, run)

    def _stop(self, place: str, frame: FrameType | None, names: Mapping[str, Any], banner: str) -> Stop:
        def opened(missing: list[int], address: str) -> None:
            where = {"node_address": os.environ.get(editor.HOST, ""), "editor": address}
            self._tell("stop", place=place, missing=missing, **{name: value for name, value in where.items() if value})

        known, layers = self._names(names), (*self._layers, AFTER) if self._layers else ()
        stop = Stop(self._folder, self._rank, self._ranks, self._leader, place, frame, known, opened, self._ended)
        stop.banner, stop.layers, stop.attach_s, stop.debugpy = banner, layers, self._order.wait_s, self._order.debugpy
        stop.gathers = self._session.gather if self._session is not None else None
        return stop

    def _hold(self, stop: Stop) -> None:
        alone = len(self._ranks) == 1
        if self._order.debugpy and alone and stop.leader == self._rank != (self._order.rank or 0):
            return  # an editor is at one rank, and others that run alone do not wait for it
        began, waited_s = time.monotonic(), Prompt.waited_s
        try:
            self._open = stop.hold()
        finally:
            self._held_s += time.monotonic() - began - (Prompt.waited_s - waited_s)

    def _ended(self, word: str, layer: str) -> None:
        self._tell("go", word=word)
        self._detached = self._detached or word == DETACH
        self._engaged = self._engaged and not self._detached
        if word == LAYER:
            self._engaged, self._next_layer = True, layer
        elif self._next_layer == "":
            self._next_layer = None

    def _names(self, names: Mapping[str, Any]) -> dict[str, Any]:
        resolved = self._session.resolved if self._session is not None else {}
        world = int(resolved.get("world_size", len(self._ranks)))
        return {**names, "rank": self._rank, "world_size": world, "dump_id": self._dump_id}

    @property
    def _model(self) -> Any:
        return self._session.model if self._session is not None else None

    def _line(self, text: str) -> None:
        print(f"[rank {self._rank}] {text}", file=sys.stderr, flush=True)  # noqa: T201 - the worker's log
        self._tell("line", text=f"[rank {self._rank}] {text}")


def in_a_frame(place: str, call: str, names: Mapping[str, Any], then: Callable[[FrameType], None], run: str = "") -> Any:
    """Call `then` with a frame that holds exactly these names, where there is no line of code to stop at.

    `place` takes the file's place in pdb's words, and `call` that of its first line. `run`: the expression that this line then
    runs in the frame, so that `step` enters it, and `next` continues to the line behind it; its value is returned. Such a frame
    is
    no module of actordbg's, which stepping passes by.
    """
    name = f"<{place}>"
    linecache.cache[name] = (len(call), None, [call + "\n", "output\n"], name)
    scope = {**names, "__builtins__": builtins, "__name__": "replay" if run else __name__}
    scope["_stop"] = lambda: then(sys._getframe(1))
    exec(compile(f"_stop(); output = {run}\noutput" if run else "_stop()", name, "exec"), scope)
    return scope.get("output")


def _bound(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a layer's call by name."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{f"argument_{place}": argument for place, argument in enumerate(args)}, **kwargs}
    flat = bound.arguments
    for name in [name for name in flat if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD]:
        flat.update(flat.pop(name))
    return flat


def _module_called(name: str, known: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """The full name of a module by its end; Unsupported if there is none, or not one alone, or not where all ranks stop."""
    matches = [name] if name in known else [module for module in known if module.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    at = ", ".join(list(known)[:4])
    if not matches and any(f".{module}".endswith(f".{name}") for module in others):
        raise Unsupported(
            f"--break {name}: ranks that compute together stop before a layer, where all of them come, and not inside of one",
            hint=f"one of: {at}, ...; or --backend plain, where any module will do",
        )
    what = f"fits {len(matches)} modules" if matches else "is not a layer of this model"
    raise Unsupported(f"--break {name} {what}", hint=f"before, after, error, or one of: {', '.join(matches[:4]) or at}, ...")
