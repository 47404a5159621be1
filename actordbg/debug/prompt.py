"""pdb over a Unix socket: whoever connects gets the prompt of this rank.

The socket has mode 0600 in a folder of the user, and only the user may connect. Output goes to the terminal at the other end, and
input comes from there. End of file (Ctrl-D, a closed terminal) is `quit`. Ctrl-C arrives as SIGINT, which interrupts the typed
command; before and after the prompt the signal keeps its usual handler.

A rank that others wait for does not step: the next line may be a collective that they are not in. So `next`, `step` and pdb's
breakpoints are refused there, and `layer` continues to the next layer on all ranks.

`shapes` and `stats` describe tensors. This module does not import torch: if there are tensors, it is already imported. Standard
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
import textwrap
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
"""Modules that stepping skips."""
_STEPS = ("step", "s", "next", "n", "until", "unt", "return", "r")
_ALONE = (*_STEPS, "jump", "j", "break", "b", "tbreak", "debug")
"""Commands that would continue a rank while the others are paused."""
_NEVER = ("run", "restart", "interact")
Named = Mapping[str, Any]
"""Values by the names that a frame, a call or a prompt gives them."""


class StoppedByUser(Exception):
    """The user ended this input at a prompt; the model did not fail."""


def folded(text: str) -> str:
    """Break a line between words, for a terminal of 80 columns, of which pdb may use four."""
    return "\n".join(textwrap.wrap(text, 76, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))


class Wire:
    """The file that pdb reads and writes: a terminal over a socket. While it waits, it prints the meeting's news."""

    encoding = "utf-8"

    def __init__(self, connection: socket.socket, others: Leading | None) -> None:
        self._connection, self._others = connection, others
        self._buffer = b""
        self.ended_by, self.prompt = "", ""

    def readline(self) -> str:
        """Return the next typed line; "" at the end, with the reason in `ended_by`."""
        while b"\n" not in self._buffer:
            readable = _awaited(self._connection, self._others, None)
            if self._others and (news := self._others.step(readable)):
                self.write(f"\n{folded(f'--- {news}')}\n{self.prompt}")
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
        """Send text. A closed terminal is detected when reading."""
        with contextlib.suppress(OSError):
            self._connection.sendall(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: output is not buffered."""

    def close(self) -> None:
        self._connection.close()


def _awaited(own: socket.socket, others: Leading | None, timeout_s: float | None) -> list[int]:
    """Wait for a socket and for news of the meeting; return the readable descriptors."""
    return select.select([own.fileno(), *(others.descriptors() if others else ())], [], [], timeout_s)[0]


def await_terminal(
    folder: Path, rank: int, others: Leading | None, wait_s: float | None, opened: Callable[[], None]
) -> Wire | None:
    """Wait until somebody connects to this rank's prompt; None if nobody does.

    wait_s: maximum seconds, None for no limit. opened: called once the socket is open.
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
    """A rank's prompt.

    names: names known at the prompt, besides the frame's. alone: no rank waits for this rank, so it may step. layers: the names
    that `layer` accepts. on_end: called once the rank leaves the prompt for good, with the word and the requested layer ("" for
    the next). waited_s: seconds that this process has spent at prompts.
    """

    waited_s = 0.0

    def __init__(
        self, wire: Wire, rank: int, names: Named, *, alone: bool, layers: Sequence[str],
        on_end: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        super().__init__(stdin=wire, stdout=wire, skip=_SKIPPED, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.wire, self.names, self._alone, self._layers, self._on_end = wire, names, alone, layers, on_end
        self.prompt = wire.prompt = f"(rank {rank}) "
        self._word, self._layer = CONTINUE, ""
        self.steps = False

    def ask(self, frame: FrameType | None, trace: Any = None) -> None:
        """Open the prompt at this frame, or at the end of a traceback; return when the rank continues. StoppedByUser for quit."""
        self.reset()
        self._alone = self._alone and trace is None
        outer = frame if self._alone else None
        while outer is not None:  # if the user steps, tracing continues in the outer frames
            outer.f_trace = self.trace_dispatch
            self.botframe, outer = outer, outer.f_back
        self.interaction(frame, trace)
        if self.steps:
            sys.settrace(self.trace_dispatch)

    def interaction(self, frame: FrameType | None, traceback: Any = None) -> None:  # type: ignore[override]
        """Run the prompt once; a rank that steps gets several."""
        self.steps, began = False, time.monotonic()
        with undisturbed(), _nameable(self.names), signals_to(signal.default_int_handler, [signal.SIGINT]):
            super().interaction(frame, traceback)
        Prompt.waited_s += time.monotonic() - began
        if not self.steps:
            self.end()
            if self._word == QUIT:
                raise StoppedByUser(self.wire.ended_by or "stopped by the user")

    def end(self) -> None:
        """End the prompt and continue."""
        sys.settrace(None)
        self.steps = False
        self._on_end(self._word, self._layer)
        self.wire.close()

    def onecmd(self, line: str) -> bool:
        """Run a command; refuse commands that would leave the paused ranks behind."""
        command = line.strip().split(" ", 1)[0]
        if command in _NEVER:
            self.error(f"{command} is not supported at a rank's prompt")
            return False
        if command in _ALONE and not self._alone:
            ways = (
                "`layer` continues to the next layer on all ranks, `continue` to the end"
                if self._layers
                else "`continue` continues on all ranks"
            )
            why = "would run this rank alone while the others are paused, and hang in the next collective"
            self.error(folded(f"{command} {why}; {ways}"))
            return False
        self.steps = self.steps or command in _STEPS
        return bool(super().onecmd(line))

    def _go(self, word: str) -> bool:
        self._word, self.steps = word, bool(word == CONTINUE and self._alone and self.breaks)
        self.set_continue()
        return True

    def do_continue(self, arg: str) -> bool:
        """continue: continue on all ranks."""
        return self._go(CONTINUE)

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool:
        """quit: end this input here, as stopped by the user. In a live job: like detach."""
        return self._go(QUIT)

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """End of file, Ctrl-D: like quit."""
        self.message("")
        return self._go(QUIT)

    def do_detach(self, arg: str) -> bool:
        """detach: continue, and ignore further breakpoints."""
        return self._go(DETACH)

    def do_layer(self, arg: str) -> bool:
        """layer [NAME]: continue on all ranks, and stop before the next layer (or before NAME, or after the forward)."""
        name = arg.strip()
        layers = [layer for layer in self._layers if f".{layer}".endswith(f".{name}")] if name else [""]
        if not self._layers or not layers:
            known = self._layers[:4] or ["this breakpoint has no layers"]
            self.error(f"no layer {name}: {', '.join(known)}, ...")
            return False
        self._layer = layers[0]
        return self._go(LAYER)


@contextlib.contextmanager
def _nameable(names: Named) -> Iterator[None]:
    """Add these names to the builtins inside the block, so that every frame without such a name knows them."""
    added = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    vars(builtins).update(added)
    try:
        yield
    finally:
        for name in added:
            vars(builtins).pop(name, None)


def evaluated(text: str, frame: FrameType, names: Named) -> str:
    """Evaluate an expression in a frame and return its value as text; an error as its name and message."""
    try:
        with undisturbed(), _nameable(names):
            return repr(eval(text, frame.f_globals, frame.f_locals))  # noqa: S307 - the user's expression, from the prompt
    except Exception as error:  # noqa: BLE001 - the user's expression may raise anything
        return f"{type(error).__name__}: {error}"


MOST = 60
"""Maximum number of listed tensors."""


class Said(str):
    """Text that a prompt prints without quotes when it is the value of an expression."""

    def __repr__(self) -> str:
        return str(self)


def is_tensor(value: Any) -> bool:
    """Check whether a value is a torch tensor, a parameter or a DTensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def form(tensor: Any) -> str:
    """Describe a tensor's shape, dtype and device: "[2, 96] int64 cpu"."""
    kind = f" {type(tensor).__name__}" if type(tensor).__name__ == "DTensor" else ""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}{kind}"


def tensors_in(values: Named) -> dict[str, Any]:
    """Return the tensors among these values by name, including those in lists, tuples and dicts one level down."""
    tensors: dict[str, Any] = {}
    for name, value in values.items():
        if is_tensor(value):
            tensors[name] = value
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
        tensors |= {f"{name}[{key!r}]": item for key, item in items if is_tensor(item)}
    return tensors


def shapes(values: Named) -> Said:
    """Format a line per tensor among these values."""
    tensors = tensors_in({name: value for name, value in values.items() if not name.startswith("__")})
    lines = [f"{name:<24} {form(tensor)}" for name, tensor in list(tensors.items())[:MOST]]
    lines += [f"... and {len(tensors) - MOST} more"] if len(tensors) > MOST else []
    return Said("\n".join(lines) or "no tensors here")


def stats(tensor: Any) -> Said:
    """Describe a tensor: shape, dtype, device, min, max, mean, and how many values are NaN or infinite.

    For a DTensor the values are those of this rank's shard: all ranks together hold the whole, and `gather` collects it.
    """
    if not is_tensor(tensor):
        return Said(f"{type(tensor).__name__}, not a tensor: {tensor!r:.200}")
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
    """Restore the RNG state of random, numpy and torch after the block."""
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
