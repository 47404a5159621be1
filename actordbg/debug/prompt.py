"""pdb behind a Unix socket: whoever connects has the prompt of this rank.

The socket's file is 0600 in a folder of the user, and whoever connects must be the user. What is printed goes to the terminal at
the other end, what is typed comes from there. End of file (Ctrl-D, a closed terminal) is `quit`. Ctrl-C arrives as SIGINT, which
interrupts what was typed; before and after the prompt the signal means what it meant.

A rank on which others wait does not step: the next line may be a collective, which they are not in. So `next`, `step` and
breakpoints of pdb's own are refused there, and `layer` continues to the next layer on all ranks.

`shapes` and `stats` say what tensors are. torch is not imported here: where there are tensors, it is there already. Standard
library only.
"""

from __future__ import annotations

import builtins
import contextlib
import pdb
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from actordbg.base.processes import signals_to
from actordbg.debug import meeting
from actordbg.debug.meeting import CONTINUE, DETACH, QUIT, Leading

LAYER = "layer"
"""The word that continues to a layer, on all ranks."""
_SKIPPED = ["actordbg.*", "torch", "torch.*", "contextlib", "functools", "threading"]
"""Modules whose lines are not shown when stepping."""
_STEPS = ("step", "s", "next", "n", "until", "unt", "return", "r")
_ALONE = (*_STEPS, "jump", "j", "break", "b", "tbreak", "debug")
"""Commands that would run a rank on while the others are parked."""
_NEVER = ("run", "restart", "interact")


class StoppedByUser(Exception):
    """The user ended this input at a prompt: no fault of the model."""


class Wire:
    """The file that pdb reads and writes: a terminal behind a socket. While it waits, the meeting's news are told."""

    encoding = "utf-8"

    def __init__(self, connection: socket.socket, others: Leading | None) -> None:
        self._connection, self._others = connection, others
        self._buffer = b""
        self.ended_by, self.prompt = "", ""

    def readline(self) -> str:
        """The next line that was typed; "" at its end, and `ended_by` says why."""
        while b"\n" not in self._buffer:
            readable = _awaited(self._connection, self._others, None)
            if self._others and (news := self._others.step(readable)):
                self.write(f"\n--- {news}\n{self.prompt}")
                if self._others.gone:
                    self.ended_by = news
                    return ""
            if self._connection.fileno() in readable:
                data = b""
                with contextlib.suppress(OSError):
                    data = self._connection.recv(65536)
                if not data:
                    self.ended_by = "the terminal at the prompt is closed"
                    return ""
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace") + "\n"

    def write(self, text: str) -> int:
        """Send it; a terminal that is gone is found out when reading."""
        with contextlib.suppress(OSError):
            self._connection.sendall(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._connection.close()


def _awaited(own: socket.socket, others: Leading | None, timeout_s: float | None) -> list[int]:
    """Wait for a socket, and for news of the meeting; the descriptors that have some."""
    return select.select([own.fileno(), *(others.descriptors() if others else ())], [], [], timeout_s)[0]


def await_terminal(
    folder: Path, rank: int, others: Leading | None, wait_s: float | None, opened: Callable[[], None]
) -> Wire | None:
    """Wait until somebody connects to this rank's prompt; None when nobody did.

    wait_s: how long, None for ever. opened: called once one can connect.
    """
    left = meeting.clock(wait_s)
    server = meeting.listen(folder, meeting.socket_of(rank))
    try:
        opened()
        while (seconds := left()) is None or seconds > 0:
            readable = _awaited(server, others, seconds)
            if others:
                others.step(readable)
                if others.gone:
                    return None
            if server.fileno() in readable:
                connection, _ = server.accept()
                if meeting.is_mine(connection):
                    return Wire(connection, others)
                connection.close()
        return None
    finally:
        meeting.remove(folder, meeting.socket_of(rank))
        server.close()


class Prompt(pdb.Pdb):
    """One rank's prompt.

    names: what can be named at the prompt beside what the frame has. alone: no rank waits for this one, so it may step.
    layers: the names that `layer` takes. on_end: called once the rank continues for good, with the word and the layer that was
    asked for ("" for the next one). waited_s: seconds that this process has spent at prompts.
    """

    waited_s = 0.0

    def __init__(
        self, wire: Wire, rank: int, names: Mapping[str, Any], *, alone: bool, layers: Sequence[str],
        on_end: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        super().__init__(stdin=wire, stdout=wire, skip=_SKIPPED, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.wire, self.names, self._alone, self._layers, self._on_end = wire, names, alone, layers, on_end
        self.prompt = wire.prompt = f"(rank {rank}) "
        self._word, self._layer = CONTINUE, ""
        self.steps = False

    def ask(self, frame: FrameType | None, trace: Any = None) -> None:
        """Have a prompt at this frame, or at the end of a traceback; returns when the rank continues, StoppedByUser for quit."""
        self.reset()
        self._alone = self._alone and trace is None
        outer = frame if self._alone else None
        while outer is not None:  # tracing continues from here outwards, if a step is asked for
            outer.f_trace = self.trace_dispatch
            self.botframe, outer = outer, outer.f_back
        self.interaction(frame, trace)
        if self.steps:
            sys.settrace(self.trace_dispatch)

    def interaction(self, frame: FrameType | None, traceback: Any = None) -> None:  # type: ignore[override]
        """One prompt; a rank that steps has several."""
        self.steps, began = False, time.monotonic()
        with undisturbed(), _nameable(self.names), signals_to(signal.default_int_handler, [signal.SIGINT]):
            super().interaction(frame, traceback)
        Prompt.waited_s += time.monotonic() - began
        if not self.steps:
            self.end()
            if self._word == QUIT:
                raise StoppedByUser(self.wire.ended_by or "stopped by the user")

    def end(self) -> None:
        """Continue for good."""
        sys.settrace(None)
        self.steps = False
        self._on_end(self._word, self._layer)
        self.wire.close()

    def onecmd(self, line: str) -> bool:
        """One command; those that would leave the parked ranks behind are refused."""
        command = line.strip().split(" ", 1)[0]
        if command in _NEVER:
            self.error(f"{command} means nothing in a rank")
            return False
        if command in _ALONE and not self._alone:
            ways = (
                "`layer` continues to the next layer on all ranks, `continue` to the end"
                if self._layers
                else "`continue` continues"
            )
            why = "would run on alone while the other ranks are parked, and hang in the next collective"
            self.error(f"{command} {why}.\n    {ways}")
            return False
        self.steps = self.steps or command in _STEPS
        return bool(super().onecmd(line))

    def _go(self, word: str) -> bool:
        self._word, self.steps = word, bool(word == CONTINUE and self._alone and self.breaks)
        self.set_continue()
        return True

    def do_continue(self, arg: str) -> bool:
        """continue: continue, with all ranks."""
        return self._go(CONTINUE)

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool:
        """quit: end this input here, as stopped by the user. In a live job: the same as detach."""
        return self._go(QUIT)

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """End of file, Ctrl-D: the same as quit."""
        self.message("")
        return self._go(QUIT)

    def do_detach(self, arg: str) -> bool:
        """detach: continue, and stop no more."""
        return self._go(DETACH)

    def do_layer(self, arg: str) -> bool:
        """layer [NAME]: continue, and stop before the next layer (or that one, or after the forward) on all ranks."""
        name = arg.strip()
        layers = [layer for layer in self._layers if f".{layer}".endswith(f".{name}")] if name else [""]
        if not self._layers or not layers:
            self.error(f"no layer {name}: {', '.join(self._layers[:4]) or 'this stop knows none'}, ...")
            return False
        self._layer = layers[0]
        return self._go(LAYER)


@contextlib.contextmanager
def _nameable(names: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block these names are known wherever a frame does not know them itself: that is what builtins are."""
    added = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    vars(builtins).update(added)
    try:
        yield
    finally:
        for name in added:
            vars(builtins).pop(name, None)


def evaluated(text: str, frame: FrameType, names: Mapping[str, Any]) -> str:
    """What an expression comes to in a frame, as text; an error as its name and message."""
    try:
        with undisturbed(), _nameable(names):
            return repr(eval(text, frame.f_globals, frame.f_locals))  # noqa: S307 - the user's own expression, out of the prompt
    except Exception as error:  # noqa: BLE001 - whatever the user typed may raise anything
        return f"{type(error).__name__}: {error}"


MOST = 60
"""How many tensors are listed at most."""


class Said(str):
    """Text that shows itself without quotes where a prompt prints the value of an expression."""

    def __repr__(self) -> str:
        return str(self)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch, a parameter or a DTensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def form(tensor: Any) -> str:
    """Shape, dtype and device: "[2, 96] int64 cpu"."""
    kind = f" {type(tensor).__name__}" if type(tensor).__name__ == "DTensor" else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}{kind}"


def tensors_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors among these values by name, also in lists, tuples and dicts one level down."""
    tensors: dict[str, Any] = {}
    for name, value in values.items():
        if is_tensor(value):
            tensors[name] = value
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
        tensors |= {f"{name}[{key!r}]": item for key, item in items if is_tensor(item)}
    return tensors


def shapes(values: Mapping[str, Any]) -> Said:
    """A line for each tensor among these values."""
    tensors = tensors_in({name: value for name, value in values.items() if not name.startswith("__")})
    lines = [f"{name:<24} {form(tensor)}" for name, tensor in list(tensors.items())[:MOST]]
    lines += [f"... and {len(tensors) - MOST} more"] if len(tensors) > MOST else []
    return Said("\n".join(lines) or "no tensors here")


def stats(tensor: Any) -> Said:
    """Shape, dtype, device, smallest, largest and mean value, and how many are NaN or infinite.

    Of a DTensor it is this rank's part: the whole would need all ranks, and `gather` does that.
    """
    if not is_tensor(tensor):
        return Said(f"{type(tensor).__name__}, no tensor: {tensor!r:.200}")
    torch = sys.modules["torch"]
    with torch.no_grad():
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        whole = "" if part is tensor else f"this rank's {list(part.shape)} of it: "
        if part.numel() == 0:
            return Said(f"{form(tensor)}  {whole}empty")
        values = (part.detach().abs() if part.is_complex() else part.detach()).double()
        finite = values[torch.isfinite(values)]
        bad = f"NaN {int(torch.isnan(values).sum())}, infinite {int(torch.isinf(values).sum())}"
        if finite.numel() == 0:
            return Said(f"{form(tensor)}  {whole}nothing finite, {bad}")
        spread = f"min {finite.min():.6g}, max {finite.max():.6g}, mean {finite.mean():.6g}"
    return Said(f"{form(tensor)}  {whole}{spread}, {bad}")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside the block random numbers may be drawn: afterwards all generators are where they were."""
    states = [(random.setstate, random.getstate())]
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        states.append((torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        for put, state in states:
            put(state)
