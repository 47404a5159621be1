"""The breakpoints of a replay's worker: before and after a forward, before a layer, where an input failed, and `breakpoint()`.

The worker announces the input and the ranks that run with it (`begin`), the session its progress (`forward`, `after`, `failed`),
and hooks the next layer. Ranks that compute together stop together, where all of them are certain to pass, or not at all. The
worker's journal informs the supervisor, whose clock stops meanwhile:

    stop    a prompt is open: its rank, its place, and the node's address or an editor's
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from actordbg.base.fault import Unsupported
from actordbg.debug import editor
from actordbg.debug.meeting import DETACH
from actordbg.debug.prompt import LAYER, Named, Prompt, StoppedByUser, form, stats, tensors_in
from actordbg.debug.stops import Stop

BEFORE, AFTER, ERROR = "before", "after", "error"
LEVELS = ("warning", "info", "debug")
POST_MORTEM = "RAY_DEBUG_POST_MORTEM"
"""Ray's environment variable for workers that stop where they failed."""
ARRIVAL_S = 60.0
"""Seconds that ranks wait for each other at a `breakpoint()`, which some of them may not reach."""


class NotInEvalMode(Exception):
    """--expect-eval: a module was in training mode."""


@dataclass(frozen=True)
class StopOrder:
    """The user's breakpoint options, as the work order carries them.

    at: before, after, error, a layer, or "". rank: gets the prompt; None: 0, or the rank with the input, or the rank that failed.
    dump: stop only at this dump. wait_s: seconds to wait for `actordbg attach`. terminal: the command runs in a terminal.
    debugpy: the port for an editor instead of a prompt; 0 for any free port.
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
    """The breakpoints of a worker; see the module. `tell(event, **values)` writes to the worker's journal.

    may_pause: a prompt can be reached. active: the session has to report its progress.
    """

    def __init__(self, folder: Path, rank: int, order: StopOrder, tell: Callable[..., None]) -> None:
        self._folder, self._rank, self._order, self._tell = folder, rank, order, tell
        self._ranks: tuple[int, ...] = (rank,)
        self._leader = rank
        self._engaged = bool(order.at)
        self._detached, self._forwarding = False, False
        self._requested_layer: str | None = None
        self._next_layer: str | None = None  # "" for any layer
        self._layers: dict[str, Any] = {}
        self._open: Prompt | None = None
        self._session: Any = None
        self._dump_id = ""
        self._held_s = 0.0
        self.begun = False
        self.may_pause = bool(order.at) or order.terminal or order.wait_s is not None or order.debugpy is not None
        self.active = bool(order.at) or order.level != LEVELS[0] or order.expect_eval

    # ---- called by the worker

    def fit(self, session: Any, layers: Sequence[Any]) -> None:
        """Take a built actor. layers: modules that all ranks call; at others only a lone rank may stop."""
        self._session, at = session, self._order.at
        if session.config.compiles:
            return
        modules = {name: module for name, module in session.model.named_modules() if name}
        ids = set(map(id, layers))
        named = {name: module for name, module in modules.items() if id(module) in ids}
        if at:
            self._layers = dict(named)
        if at not in ("", BEFORE, AFTER, ERROR):
            known = named if session.is_collective else modules
            self._requested_layer = _module_called(at, known, modules)
            self._layers[self._requested_layer] = known[self._requested_layer]
        if at or self._order.level == "debug":
            for name, module in (self._layers or named).items():
                module.register_forward_pre_hook(self._hook(name), prepend=True, with_kwargs=True)

    def begin(self, dump_id: str, ranks: Sequence[int], leader: int, chosen: bool) -> None:
        """Start an input, on these ranks together; `chosen`: stop at this input."""
        self._dump_id, self._ranks, self.begun = dump_id, tuple(ranks), False
        self._leader = leader if leader in ranks else ranks[0]
        self._engaged = bool(self._order.at) and chosen and not self._detached
        self._next_layer = self._requested_layer

    def end(self) -> None:
        """Continue a rank that is still stepping, since the forward or the input is over."""
        self._forwarding = False
        if self._open is not None and self._open.steps:
            self._open.end()
        self._open = None

    @property
    def held_s(self) -> float:
        """Return the seconds spent in stops so far, without the code that ran between two steps."""
        return self._held_s + Prompt.waited_s

    # ---- called by the session

    def forward(self, call: Named, names: Named) -> Any:
        """Call the Actor, with a stop at the line of the call if requested; a stepping rank continues after it.

        Raises StoppedByUser and NotInEvalMode.
        """
        began, actor = time.monotonic(), self._session.actor
        if self._order.level != LEVELS[0] or self._order.expect_eval:
            self._before(call)
        self._held_s += time.monotonic() - began
        if self._engaged and self._order.at == BEFORE:
            tensors_first = {**tensors_in(call), **call}
            shown = {**tensors_first, **names, "arguments": call, "actor": actor, "module": self._model}
            text = f"output = actor({', '.join(tensors_first)})"
            output = self._at_frame("before Actor.forward", text, shown, run="actor(**arguments)")
        else:
            self._forwarding = self.begun = True
            output = actor(**call)
        self.end()
        return output

    def _before(self, call: Named) -> None:
        """Report the inputs and the mode of the forward; NotInEvalMode with --expect-eval."""
        model = self._model
        training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
        mode = "training" if training else "eval"
        first = next(iter(model.parameters()), None)
        weights = "no weights" if first is None else f"weights {str(first.dtype).removeprefix('torch.')} on {first.device}"
        self._tell_of("before", call, f"{mode} mode, {weights}, input {self._dump_id}")
        if self._order.expect_eval and training:
            raise NotInEvalMode(
                f"{len(training)} modules are in training mode ({', '.join(training[:3])}, ...): dropout may be on"
            )

    def after(self, call: Named, names: Named) -> None:
        """Handle the end of the forward, before any backward. names: log_probs, entropy, mask, loss."""
        self._forwarding = False
        if self._order.level != LEVELS[0]:
            values = {name: value for name, value in names.items() if name != "loss"}
            self._tell_of("after", values, f"loss {float(names['loss']):.6g}")
        if self._engaged and (self._order.at == AFTER or self._next_layer in ("", AFTER)):
            shown = {**call, **names, "arguments": dict(call), "actor": self._session.actor, "module": self._model}
            self._at_frame("after Actor.forward", "log_probs, entropy = actor(...)", shown)

    def _tell_of(self, when: str, values: Named, more: str) -> None:
        if self._order.level != LEVELS[0]:
            tensors = "; ".join(f"{name} {form(tensor)}" for name, tensor in tensors_in(values).items())
            self._line(f"{when} forward: {tensors}; {more}")

    def failed(self, error: Exception) -> None:
        """Stop where an input failed, while its frames exist."""
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
            stop.refusal = "after a failure some ranks may not have got this far"
        self._hold(stop)

    # ---- called by the user's code

    def reached(self, frame: FrameType, rank: int | None) -> None:
        """Stop at a `breakpoint()`; Unsupported if nobody can reach the prompt."""
        if self._detached:
            return
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not self.may_pause:
            raise Unsupported(
                f"breakpoint() at {place} was reached, but this command has no terminal for its prompt",
                hint="run `actordbg replay` in a terminal, or pass --break-wait 600 and run `actordbg attach` in another",
            )
        stop = self._stop(f"at breakpoint(), {place}", frame, {"model": self._model}, f", in {frame.f_code.co_name}")
        stop.arrival_s = ARRIVAL_S
        if rank in self._ranks:
            stop.leader = rank
        self._hold(stop)

    # ---- internals

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

    def _at_frame(self, place: str, code: str, names: Named, run: str = "") -> Any:
        def stop_at(frame: FrameType) -> None:
            self._hold(self._stop(place, frame, names, f", input {self._dump_id}"))
            if run:
                self._forwarding = self.begun = True

        return in_a_frame(place, code, self._names(names), stop_at, run)

    def _stop(self, place: str, frame: FrameType | None, names: Named, banner: str) -> Stop:
        def opened(missing: list[int], address: str) -> None:
            where = {"node_address": os.environ.get(editor.HOST, ""), "editor": address}
            self._tell("stop", place=place, missing=missing, **{name: value for name, value in where.items() if value})

        known, layers = self._names(names), (*self._layers, AFTER) if self._layers else ()
        return Stop(
            self._folder,
            self._rank,
            self._ranks,
            leader=self._leader,
            place=place,
            frame=frame,
            names=known,
            opened=opened,
            ended=self._ended,
            attach_s=self._order.wait_s,
            gathers=None if self._session is None else self._session.gather,
            banner=banner,
            layers=layers,
            debugpy=self._order.debugpy,
        )

    def _hold(self, stop: Stop) -> None:
        alone = len(self._ranks) == 1
        if self._order.debugpy and alone and stop.leader == self._rank != (self._order.rank or 0):
            return  # an editor is at one rank, and other lone ranks do not wait for it
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

    def _names(self, names: Named) -> dict[str, Any]:
        resolved = self._session.resolved if self._session is not None else {}
        world = int(resolved.get("world_size", len(self._ranks)))
        return {**names, "rank": self._rank, "world_size": world, "dump_id": self._dump_id}

    @property
    def _model(self) -> Any:
        return self._session.model if self._session is not None else None

    def _line(self, text: str) -> None:
        print(f"[rank {self._rank}] {text}", file=sys.stderr, flush=True)  # noqa: T201 - the worker's log
        self._tell("line", text=f"[rank {self._rank}] {text}")


def in_a_frame(place: str, call: str, names: Named, then: Callable[[FrameType], None], run: str = "") -> Any:
    """Call `then` with a synthetic frame that holds exactly these names, for places without a line of code to stop at.

    pdb shows `place` as the file name and `call` as its first line. `run`: the expression that this line then runs in the frame,
    so that `step` enters it and `next` continues to the next line; returns its value. The frame does not belong to an actordbg
    module, which stepping would skip.
    """
    name = f"<{place}>"
    linecache.cache[name] = (len(call), None, [call + "\n", "output\n"], name)
    scope = {**names, "__builtins__": builtins, "__name__": "replay" if run else __name__}
    scope["_stop"] = lambda: then(sys._getframe(1))
    exec(compile(f"_stop(); output = {run}\noutput" if run else "_stop()", name, "exec"), scope)
    return scope.get("output")


def _bound(module: Any, args: tuple[Any, ...], kwargs: Named) -> dict[str, Any]:
    """Return the arguments of a layer's call by name."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{f"argument_{place}": argument for place, argument in enumerate(args)}, **kwargs}
    flat = bound.arguments
    for name in [name for name in flat if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD]:
        flat.update(flat.pop(name))
    return flat


def _module_called(name: str, known: Named, others: Named) -> str:
    """Return the full name of the module with this suffix; Unsupported if none or several match, or not all ranks stop there."""
    matches = [name] if name in known else [module for module in known if module.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    at = ", ".join(list(known)[:4])
    if not matches and any(f".{module}".endswith(f".{name}") for module in others):
        raise Unsupported(
            f"--break {name}: ranks that compute together can stop only before a layer, not inside of it",
            hint=f"use one of {at}, ..., or any module with --backend plain",
        )
    what = "is not a layer of this model"
    if matches:
        what, at = f"matches {len(matches)} modules", ", ".join(matches[:4])
    raise Unsupported(f"--break {name} {what}", hint=f"use before, after, error, or one of {at}, ...")
