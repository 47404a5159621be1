"""Watch other processes through /proc, and end whole sessions of them. Linux only, standard library only.

A replay's workers are often not our children: a launcher starts them, reaps them and kills them.
To learn which worker died *first*, and of what, we read /proc a few times a second. A dead process that its parent has not
reaped is a zombie, and its exit status can still be read.

A pid alone is not an identity, because pids are used again. A pid with its start time is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALIVE = "alive"
STOPPED = "stopped"
ZOMBIE = "zombie"
GONE = "gone"

TERMINATED = int(signal.SIGTERM)
"""The wait status of a process that SIGTERM ended."""

_LOOKS = 5
"""How often an empty environment of a process is read again, a millisecond apart."""


@dataclass(frozen=True)
class Stat:
    """Fields of /proc/<pid>/stat: `state` letter, session id, start time in clock ticks, wait status (of zombies)."""

    state: str
    session: int
    start_ticks: int
    wait_status: int


def read_stat(pid: int) -> Stat | None:
    """Read the process's stat; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(fields[0], int(fields[3]), int(fields[19]), int(fields[49]))


def start_ticks(pid: int) -> int:
    """Return the process's start time in clock ticks since boot; 0 if there is no such process."""
    stat = read_stat(pid)
    return stat.start_ticks if stat else 0


def state_of(pid: int, ticks: int) -> tuple[str, int | None]:
    """Return ALIVE, STOPPED, ZOMBIE or GONE, and a zombie's wait status, for the process with this pid and start time."""
    stat = read_stat(pid)
    if stat is None or stat.start_ticks != ticks:
        return GONE, None
    if stat.state in "ZX":
        return ZOMBIE, stat.wait_status
    return (STOPPED if stat.state in "Tt" else ALIVE), None


def describe_status(wait_status: int | None) -> str:
    """Describe a wait status: "SIGKILL (...)", "exit code 1", or "an unknown end" for None."""
    if wait_status is None:
        return "an unknown end"
    if not os.WIFSIGNALED(wait_status):
        return f"exit code {os.waitstatus_to_exitcode(wait_status)}"
    number = os.WTERMSIG(wait_status)
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return f"{name} ({_SIGNAL_HINTS[name]})" if name in _SIGNAL_HINTS else name


def wait_status_of(returncode: int) -> int:
    """Convert `subprocess`'s return code (negative for a signal) to a wait status."""
    return -returncode if returncode < 0 else returncode << 8


_SIGNAL_HINTS = {
    "SIGKILL": "often the kernel's out-of-memory killer: see `dmesg`",
    "SIGSEGV": "an invalid memory access in native code",
    "SIGBUS": "a memory-mapped file shrank, or /dev/shm is full",
    "SIGABRT": "native code gave up: its message is in the log",
    "SIGILL": "an instruction that this processor does not have",
    "SIGFPE": "an arithmetic fault in native code",
}


class DeathWatch:
    """Wakes us as soon as a watched process dies: a launcher reaps a dead worker within a second, and the evidence is gone."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def add(self, pid: int, ticks: int) -> None:
        """Watch a process, child or not. Does nothing before Linux 5.3."""
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)
            if start_ticks(pid) == ticks:
                self.descriptors.append(descriptor)
            else:
                os.close(descriptor)

    def clear(self) -> None:
        """Stop watching."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def wait_for_any(descriptors: list[int], timeout_s: float) -> None:
    """Sleep for `timeout_s`, or until one of the watched processes is dead."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    waiting.poll(timeout_s * 1000)


@contextlib.contextmanager
def signals_to(handler: Callable[[int, Any], Any] | signal.Handlers, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Send these signals to `handler` inside the block. Only the main thread may do so; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def session_members(session: int, mark: str | None = None) -> list[int]:
    """Return the pids of the live (not zombie) processes in a session, or with `mark` ("NAME=value") in their environment.

    A mark also finds processes that left the session (torchrun's workers), even when their parents are dead.
    """
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            pid = int(entry)
            stat = read_stat(pid)
            if stat is not None and stat.state not in "ZX" and (stat.session == session or _carries(pid, mark, stat.session)):
                members.append(pid)
    return members


def _carries(pid: int, mark: str | None, session: int) -> bool:
    """Check whether the process was started with `mark` in its environment; False for other users' processes.

    The environment is empty for a moment in the middle of an exec, and always for the kernel's own processes, of session 0.
    """
    if mark is None or pid == os.getpid():
        return False
    for _ in range(_LOOKS):
        environment = environment_of(pid)
        if environment != b"" or not session:
            break
        time.sleep(0.001)
    return mark.encode() in (environment or b"").split(b"\0")


def environment_of(pid: int) -> bytes | None:
    """Read the environment that a process was started with; None if it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None


def end_session(session: int, grace_s: float = 2.0, *, mark: str | None = None) -> None:
    """End every process of a session or with its `mark`: SIGTERM, then SIGKILL after `grace_s` seconds."""
    if session == os.getsid(0):
        raise ValueError("that is our own session")
    deadline = time.monotonic() + grace_s
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process acts on SIGTERM only when it continues
        _signal(session_members(session, mark), number)
    while (left := session_members(session, mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    while left:
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)
        stats = {pid: read_stat(pid) for pid in session_members(session, mark)}
        # a process that waits for a disk or a device, in state D, ends when the kernel lets it
        left = [pid for pid, stat in stats.items() if stat is None or stat.state != "D"]


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
