"""Unix sockets in a folder: where ranks of one machine park while one of them is at a prompt, and where a terminal comes to it.

The *leader* listens on a socket, the others connect to it and wait for its word. So nobody waits in a collective, whose time
limit (or NCCL's watchdog) would end the job, and a process that dies is noticed at once: the kernel closes its connections.

    leader      listens, takes in the others, lets them compute something with it (`everywhere`), sends a word to all
    follower    connects, says which rank it is and where it stands, answers, returns with the word; LOST if the leader died

Who leads is agreed on beforehand. If that rank does not come in time, the first of those that wait leads. Only one process can:
the socket is made under a lock. Messages are lines of JSON.

The user's terminal (`Relay`) stays as it is: the kernel edits lines and echoes them. The relay never waits, so that a supervisor
can watch on: `descriptors` says what to wait for, `step` passes on what is there. Ctrl-C interrupts what was typed, in the rank;
a second one, with nothing typed between, is the command's own. Standard library only.
"""

from __future__ import annotations

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

CONTINUE, QUIT, DETACH, LOST = "continue", "quit", "detach", "lost"
"""Words that end a stop: continue; end this input; continue and stop no more; the rank at the prompt is gone."""
_HELLO_S = 10.0
_POLL_S = 0.02
IN, OUT = 0, 2
Message = dict[str, Any]


def socket_of(rank: int) -> str:
    """The name of the socket of a rank's prompt."""
    return f"prompt-{rank}.sock"


@contextlib.contextmanager
def address(folder: Path, name: str) -> Iterator[str]:
    """A short path of a socket in this folder: the kernel takes 107 bytes at most, and a store may lie deeper."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen(folder: Path, name: str) -> socket.socket:
    """A socket that only this user may connect to. What an earlier process left under the name is replaced."""
    remove(folder, name)
    with address(folder, name) as path:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        Path(path).chmod(0o600)
        server.listen(64)
        return server


def connect(folder: Path, name: str) -> socket.socket | None:
    """A connection to whoever listens there; None if nobody does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with address(folder, name) as path:
            connection.connect(path)
        return connection
    except OSError:
        connection.close()
        return None


def remove(folder: Path, name: str) -> None:
    """Take a socket's name away: nobody can connect any more."""
    with contextlib.suppress(OSError):
        (folder / name).unlink()


def who(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def is_mine(connection: socket.socket) -> bool:
    """Whether the other end runs as this user, or as root."""
    return who(connection)[1] in (os.getuid(), 0)


def clock(seconds: float | None) -> Callable[[], float | None]:
    """A function that says how many of these seconds are left; None where there is no limit."""
    deadline = None if seconds is None else time.monotonic() + seconds
    return lambda: None if deadline is None else deadline - time.monotonic()


class Line:
    """One end of a connection on which messages go both ways."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        """Send it; nothing if the other end is gone, which `receive` then says."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None if the other end is gone (or silent for `timeout_s`)."""
        self.connection.settimeout(timeout_s)
        text = b""
        with contextlib.suppress(OSError):
            text = self._file.readline()
        message: Message | None = json.loads(text) if text.endswith(b"\n") else None
        return message

    def follow(self, answer: Callable[[str], str]) -> Message:
        """Compute what the leader asks for until its word comes; LOST if it died."""
        while (message := self.receive()) is not None and "ask" in message:
            self.send({"answer": answer(message["ask"])})
        self.close()
        return message or {"word": LOST}

    def close(self) -> None:
        self._file.close()
        self.connection.close()


class Leading:
    """The leader's end. `places`: where each rank that came stands. `gone`: those that came and died."""

    def __init__(self, server: socket.socket, folder: Path, name: str, rank: int, place: str) -> None:
        self._server, self._folder, self._name, self.rank = server, folder, name, rank
        self._lines: dict[int, Line] = {}
        self.places = {rank: place}
        self.gone: list[int] = []

    def descriptors(self) -> list[int]:
        """What to wait on for news: somebody comes, or dies."""
        return [self._server.fileno(), *(line.fileno() for line in self._lines.values())]

    def step(self, readable: Collection[int]) -> str:
        """Take in who came, and who died; in words, "" for nothing."""
        news = []
        if self._server.fileno() in readable:
            connection, _ = self._server.accept()
            came = Line(connection)
            if hello := came.receive(_HELLO_S) if is_mine(connection) else None:
                came.send({"welcome": self.rank})
                self._lines[hello["rank"]], self.places[hello["rank"]] = came, hello["place"]
                news.append(f"rank {hello['rank']} is parked at {hello['place']}")
            else:
                came.close()
        for rank, line in list(self._lines.items()):
            if line.fileno() in readable:  # it has nothing to say on its own: that is its end
                self._drop(rank)
                news.append(f"rank {rank} is gone")
        return "; ".join(news)

    def await_ranks(self, ranks: Collection[int], patience_s: float | None) -> list[int]:
        """Wait until all of these came; those that did not in time. None: without a limit, since somebody else watches."""
        left = clock(patience_s)
        while missing := sorted(set(ranks) - set(self.places) - set(self.gone)):
            seconds = left()
            if seconds is not None and seconds <= 0:
                return missing
            self.step(select.select(self.descriptors(), [], [], seconds)[0])
        return []

    def everywhere(self, text: str, mine: Callable[[], str]) -> dict[int, str]:
        """What an expression comes to on each rank. All compute it at the same time, so it may be a collective."""
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
        """Send everybody on. The socket is gone before: who comes now comes to the next stop."""
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
    """Come to the meeting of this name: as its leader, or with a line to whoever leads.

    A rank that does not lead does so after all when nobody leads within `patience_s`.
    """
    deadline = time.monotonic() + (0.0 if leads else patience_s)
    while True:
        if (connection := connect(folder, name)) is not None:
            line = Line(connection)
            line.send({"rank": rank, "place": place})
            if is_mine(connection) and line.receive() is not None:
                return line
            line.close()  # the leader is just leaving: it did not welcome us
        if time.monotonic() >= deadline and (server := _take_the_lead(folder, name)) is not None:
            return Leading(server, folder, name, rank, place)
        time.sleep(_POLL_S)


def _take_the_lead(folder: Path, name: str) -> socket.socket | None:
    """The socket of the meeting; None if another process has it."""
    with open(os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (other := connect(folder, name)) is not None:
            other.close()
            return None
        return listen(folder, name)


class Relay:
    """One terminal, at one prompt after the other. `at`: the rank whose prompt it is at, None between prompts."""

    def __init__(self) -> None:
        self.at: int | None = None
        self._connection: socket.socket | None = None
        self._waiting: list[tuple[Path, int]] = []
        self._reads = True
        self._interrupts = 0
        self._before: Any = None

    def call(self, folder: Path, rank: int) -> None:
        """A rank's prompt can be connected to: now, or when the one before is over."""
        self._waiting.append((folder, rank))
        self._next()

    def descriptors(self) -> list[int]:
        """What `step` waits for."""
        if self._connection is None:
            return []
        return [self._connection.fileno(), *([IN] if self._reads else [])]

    def step(self) -> None:
        """Pass on what is there."""
        if self._connection is not None:
            readable, _, _ = select.select(self.descriptors(), [], [], 0)
            if IN in readable:  # a line from the terminal, or its end: Ctrl-D, or nobody there any more
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
            if connection is None:  # somebody else is there, or it continued
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
    """Remove the sockets that processes left which were ended at a stop."""
    for path in (*folder.glob("prompt-*.sock"), *folder.glob("stop-*.sock*")):
        remove(folder, path.name)


def attend(folders: Callable[[], list[Path]], goes_on: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Be at every prompt that opens in these folders while `goes_on`; `told` hears when one is over."""
    relay = Relay()
    try:
        while relay.at is not None or goes_on():
            for path in (path for folder in folders() for path in sorted(folder.glob("prompt-*.sock")) if relay.at is None):
                if (rank := path.stem.removeprefix("prompt-")).isdigit():  # a store may be shared: others may put anything there
                    relay.call(path.parent, int(rank))
            if relay.at is None:
                time.sleep(0.1)
                continue
            select.select(relay.descriptors(), [], [], 0.1)
            relay.step()
            if relay.at is None:
                report("the prompt is over")
    finally:
        relay.close()
