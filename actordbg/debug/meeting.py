"""Unix sockets in a folder: ranks of one machine wait there while one of them is at a prompt, and a terminal connects to it.

The *leader* listens on a socket, the others connect and wait for its word. So no rank waits in a collective, whose timeout (or
NCCL's watchdog) would end the job, and a dead process is noticed at once: the kernel closes its connections.

    leader      listens, accepts the others, lets them compute something with it (`everywhere`), sends a word to all
    follower    connects, sends its rank and its place, answers, returns with the word; LOST if the leader died

The leader is agreed on beforehand. If that rank does not come in time, the first waiting rank leads. Only one process can: it
creates the socket under a lock. Messages are lines of JSON.

The user's terminal stays in its normal mode: the kernel edits lines and echoes them. The `Relay` never waits, so that a
supervisor can continue: `descriptors` returns what to wait for, `step` passes on available data. Ctrl-C interrupts the typed
command in the rank; a second Ctrl-C, with nothing typed between, interrupts actordbg itself. Standard library only.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from actordbg.formats.record_reading import strict_json

CONTINUE, QUIT, DETACH, LOST = "continue", "quit", "detach", "lost"
"""Words that end a stop: continue; end this input; continue without further breakpoints; the rank at the prompt is gone."""
_HELLO_S = 10.0
_POLL_S = 0.02
IN, OUT = 0, 2
Message = dict[str, Any]


def socket_of(rank: int) -> str:
    """Return the name of a rank's prompt socket."""
    return f"prompt-{rank}.sock"


@contextlib.contextmanager
def address(folder: Path, name: str) -> Iterator[str]:
    """Yield a short path to a socket in this folder: the kernel allows 107 bytes, and a store's path may be longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen(folder: Path, name: str) -> socket.socket:
    """Open a socket that only this user may connect to, replacing an earlier process's socket of this name."""
    remove(folder, name)
    with address(folder, name) as path:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        Path(path).chmod(0o600)
        server.listen(64)
        return server


def connect(folder: Path, name: str) -> socket.socket | None:
    """Connect to a socket; None if nobody listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with address(folder, name) as path:
            connection.connect(path)
        return connection
    except OSError:
        connection.close()
        return None


def remove(folder: Path, name: str) -> None:
    """Remove a socket's name, so that nobody can connect any more."""
    with contextlib.suppress(OSError):
        (folder / name).unlink()


def who(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_mine(connection: socket.socket) -> bool:
    """Check whether the other end runs as this user or as root."""
    return who(connection)[1] in (os.getuid(), 0)


def clock(seconds: float | None) -> Callable[[], float | None]:
    """Return a function that returns the seconds left; None if there is no limit."""
    deadline = None if seconds is None else time.monotonic() + seconds
    return lambda: None if deadline is None else deadline - time.monotonic()


class Line:
    """An end of a bidirectional message connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. If the other end is gone, do nothing: `receive` reports that."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None if the other end is gone (or silent for `timeout_s`)."""
        self.connection.settimeout(timeout_s)
        text = b""
        with contextlib.suppress(OSError):
            text = self._file.readline(2**26)
        message: Message | None = strict_json(text) if text.endswith(b"\n") else None
        return message

    def follow(self, answer: Callable[[str], str]) -> Message:
        """Answer the leader's expressions until its word arrives; LOST if it died."""
        while (message := self.receive()) is not None and "ask" in message:
            self.send({"answer": answer(message["ask"])})
        self.close()
        return message or {"word": LOST}

    def close(self) -> None:
        self._file.close()
        self.connection.close()


class Leading:
    """The leader's end. `places`: the place of each rank that arrived. `gone`: ranks that arrived and died."""

    def __init__(self, server: socket.socket, folder: Path, name: str, rank: int, place: str) -> None:
        self._server, self._folder, self._name, self.rank = server, folder, name, rank
        self._lines: dict[int, Line] = {}
        self.places = {rank: place}
        self.gone: list[int] = []

    def descriptors(self) -> list[int]:
        """Return descriptors that become readable when a rank arrives or dies."""
        return [self._server.fileno(), *(line.fileno() for line in self._lines.values())]

    def step(self, readable: Collection[int]) -> str:
        """Take in ranks that arrived or died; return a description, "" for no news."""
        news = []
        if self._server.fileno() in readable:
            connection, _ = self._server.accept()
            came = Line(connection)
            if hello := came.receive(_HELLO_S) if is_mine(connection) else None:
                came.send({"welcome": self.rank})
                self._lines[hello["rank"]], self.places[hello["rank"]] = came, hello["place"]
                news.append(f"rank {hello['rank']} is paused at {hello['place']}")
            else:
                came.close()
        for rank, line in list(self._lines.items()):
            if line.fileno() in readable:  # followers send nothing on their own: this is their end
                self._drop(rank)
                news.append(f"rank {rank} is gone")
        return "; ".join(news)

    def await_ranks(self, ranks: Collection[int], patience_s: float | None) -> list[int]:
        """Wait until all of these arrived; return those that did not. patience_s: None for no limit, if a supervisor watches."""
        left = clock(patience_s)
        while missing := sorted(set(ranks) - set(self.places) - set(self.gone)):
            seconds = left()
            if seconds is not None and seconds <= 0:
                return missing
            self.step(select.select(self.descriptors(), [], [], seconds)[0])
        return []

    def everywhere(self, text: str, mine: Callable[[], str]) -> dict[int, str]:
        """Evaluate an expression on each rank. All evaluate it at the same time, so it may be a collective."""
        lines = dict(self._lines)
        for line in lines.values():
            line.send({"ask": text})
        answers = {self.rank: mine()}  # must not raise: the others' answers are on their way
        for rank, line in lines.items():
            answer = line.receive()
            if answer is None:
                self._drop(rank)
            answers[rank] = "(gone)" if answer is None else str(answer["answer"])
        return dict(sorted(answers.items()))

    def release(self, word: str, **more: Any) -> None:
        """Release all ranks. The socket is removed first: a rank that arrives later joins the next stop."""
        remove(self._folder, self._name)
        self._server.close()
        for line in self._lines.values():
            line.send({"word": word, **more})
            line.close()
        self._lines = {}

    def _drop(self, rank: int) -> None:
        self._lines.pop(rank).close()
        self.places.pop(rank, None)
        self.gone.append(rank)


def meet(folder: Path, name: str, rank: int, place: str, *, leads: bool, patience_s: float) -> Leading | Line:
    """Join the meeting of this name, as its leader or with a line to the leader.

    A rank with `leads` false becomes the leader if nobody else leads within `patience_s`.
    """
    deadline = time.monotonic() + (0.0 if leads else patience_s)
    while True:
        if (connection := connect(folder, name)) is not None:
            line = Line(connection)
            line.send({"rank": rank, "place": place})
            if is_mine(connection) and line.receive() is not None:
                return line
            line.close()  # the leader is leaving: it did not welcome us
        if time.monotonic() >= deadline and (server := _take_the_lead(folder, name)) is not None:
            return Leading(server, folder, name, rank, place)
        time.sleep(_POLL_S)


def _take_the_lead(folder: Path, name: str) -> socket.socket | None:
    """Open the meeting's socket; None if another process has it."""
    with open(os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (other := connect(folder, name)) is not None:
            other.close()
            return None
        return listen(folder, name)


class Relay:
    """A terminal, at one prompt after another. `at`: the rank whose prompt it is connected to, None between prompts."""

    def __init__(self) -> None:
        self.at: int | None = None
        self._connection: socket.socket | None = None
        self._waiting: list[tuple[Path, int]] = []
        self._reads = True
        self._interrupts = 0
        self._before: Any = None

    def call(self, folder: Path, rank: int) -> None:
        """Connect to a rank's prompt now, or once the current prompt is over."""
        self._waiting.append((folder, rank))
        self._next()

    def descriptors(self) -> list[int]:
        """Return the descriptors that `step` reads."""
        if self._connection is None:
            return []
        return [self._connection.fileno(), *([IN] if self._reads else [])]

    def step(self) -> None:
        """Pass on available data, without waiting."""
        if self._connection is not None:
            readable, _, _ = select.select(self.descriptors(), [], [], 0)
            if IN in readable:  # a line from the terminal, or its end: Ctrl-D, or a closed terminal
                typed = b""
                with contextlib.suppress(OSError):
                    typed = os.read(IN, 65536)
                self._interrupts = 0
                with contextlib.suppress(OSError):
                    if typed:
                        self._connection.sendall(typed)
                    else:
                        self._reads = False
                        self._connection.shutdown(socket.SHUT_WR)
            if self._connection.fileno() in readable:  # what the rank prints
                shown = b""
                with contextlib.suppress(OSError):
                    shown = self._connection.recv(65536)
                    os.write(OUT, shown)
                if not shown:
                    self.close()
        self._next()

    def close(self) -> None:
        """Leave the prompt."""
        if self._connection is not None:
            self._connection.close()
            self._connection, self.at = None, None
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGINT, self._before)

    def _next(self) -> None:
        while self._connection is None and self._waiting:
            folder, rank = self._waiting.pop(0)
            connection = connect(folder, socket_of(rank))
            if connection is None:  # it continued, or somebody else is connected
                continue
            if not is_mine(connection):
                return connection.close()
            self._connection, self.at, self._interrupts, self._reads = connection, rank, 0, True
            with contextlib.suppress(ValueError):
                self._before = signal.signal(signal.SIGINT, self._interrupt)
        return None

    def _interrupt(self, _number: int, _frame: object) -> None:
        self._interrupts += 1
        if self._interrupts > 1 or self._connection is None:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):
            os.kill(who(self._connection)[0], signal.SIGINT)


def clear_away(folder: Path) -> None:
    """Remove sockets left by processes that were ended at a stop."""
    for path in (*folder.glob("prompt-*.sock"), *folder.glob("stop-*.sock*")):
        remove(folder, path.name)


def attend(folders: Callable[[], list[Path]], goes_on: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Connect to every prompt that opens in these folders while `goes_on`; call `report` when a prompt is over."""
    relay = Relay()
    try:
        while relay.at is not None or goes_on():
            for path in (path for folder in folders() for path in sorted(folder.glob("prompt-*.sock")) if relay.at is None):
                if (rank := path.stem.removeprefix("prompt-")).isdigit():  # a store may be shared: others may put any file there
                    relay.call(path.parent, int(rank))
            if relay.at is None:
                time.sleep(0.1)
                continue
            select.select(relay.descriptors(), [], [], 0.1)
            relay.step()
            if relay.at is None:
                report("the prompt has ended")
    finally:
        relay.close()
