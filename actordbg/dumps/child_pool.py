"""Run the decoding child: one process for many pickles, replaced when one kills it.

Starting a Python for every file would take longer than decoding it, so one child serves a whole import. A file that
makes it die (out of CPU time, out of memory, an audited event) or exceed the wall clock is refused by name, and the
next file gets a new child.

Example::

    with LegacyReader() as reader:
        value = reader.tree(reader.load(Path("actor_inputs_rank0_20250619_052608_430740.pkl")))
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from actordbg.base.errors import CorruptDump, EnvironmentProblem, LaunchProblem, UnsafeInput, system_errors
from actordbg.dumps.decode_child import EXIT_AUDIT, EXIT_MEMORY
from actordbg.dumps.pickle_notes import corrupt, unsafe
from actordbg.dumps.pickle_tree import MOST_VALUES
from actordbg.formats.record_reading import strict_json

_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from actordbg.dumps.decode_child import main; main(int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))"
)
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_CAUSES = {
    -signal.SIGPROF: "took more CPU time than a dump may take",
    -signal.SIGKILL: "took longer than a dump may take",
    EXIT_MEMORY: "took more memory than a dump may take",
    EXIT_AUDIT: "made the decoding process attempt something other than decoding",
}
"""Why a child ended, by its exit status."""
START_SECONDS = 60.0
"""How long a child may take to start and answer that nothing is not a pickle."""


@dataclass(frozen=True)
class Limits:
    """Limits of decoding a pickle. file_bytes: of a pickle that is read whole; larger pickles are mapped."""

    file_bytes: int = 512 * 2**20
    memory_bytes: int = 4096 * 2**20
    cpu_seconds: float = 300.0
    wall_seconds: float = 600.0
    answer_bytes: int = 1024 * 2**20


class LegacyReader:
    """Decodes pickles as plain data in a child process. A context manager; not thread-safe."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.started = 0
        """Children started so far; 1 unless files killed some."""
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LegacyReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, path: Path) -> bytes:
        """Read a regular file of at most `limits.file_bytes` bytes."""
        with system_errors(EnvironmentProblem, "cannot be read", "check its permissions"):
            if not path.is_file():
                raise EnvironmentProblem("no such file", hint="check the path")
            with path.open("rb") as file:
                data = file.read(min(os.fstat(file.fileno()).st_size, self.limits.file_bytes) + 1)
        if len(data) > self.limits.file_bytes:
            raise unsafe(f"larger than {self.limits.file_bytes} bytes, which no actor dump is")
        return data

    def tree(self, data: bytes) -> Any:
        """Decode a pickle in the child (`pickle_tree`). Raises UnsafeInput, CorruptDump, LaunchProblem."""
        return _told(self._answer(data))

    def tree_in(self, file: BinaryIO, start: int, end: int) -> Any:
        """Decode the pickle in `file[start:end]` in a child of its own, which maps the file. Raises as `tree`."""
        child = self._start(file, start, end)
        try:
            return _told(self._asked(child, b""))
        finally:
            _end(child)

    def _answer(self, data: bytes) -> bytes:
        return self._asked(self._running(), data)

    def _asked(self, child: subprocess.Popen[bytes], data: bytes) -> bytes:
        answer = _exchange(child, data, self.limits.wall_seconds, self.limits.answer_bytes)
        if not answer:
            if child is self._child:
                self._child = None
            status = _end(child)
            raise unsafe(_CAUSES.get(status, f"ended the decoding process (status {status})"))
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            _end(self._child)
            self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the child that takes one file after another."""
        if self._child is not None:
            return self._child
        child = self._child = self._start(subprocess.PIPE, 0, 0)
        if not _exchange(child, b"", START_SECONDS, self.limits.answer_bytes):
            self._child = None
            raise LaunchProblem(f"the decoding process did not start (status {_end(child)})", hint=_HINT)
        return child

    def _start(self, source: BinaryIO | int, start: int, end: int) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        numbers = self.limits.memory_bytes, self.limits.cpu_seconds, start, end
        command = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, root, *map(str, numbers)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self.started += 1
        with system_errors(LaunchProblem, "cannot start the decoding process", _HINT):
            return subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)


_HINT = f"check that {sys.executable} runs"
_INVALID = "the decoding process sent an invalid answer"
_ERRORS = {UnsafeInput.code: unsafe, CorruptDump.code: corrupt}


def _told(answer: bytes) -> Any:
    """Return the tree of an answer, or raise the refusal."""
    try:
        told = strict_json(answer, most=2 * MOST_VALUES)
        if "error" in told:
            raise _ERRORS[told["error"]](str(told["message"]))
        return told["ok"]
    except (ValueError, KeyError, TypeError):
        raise unsafe(_INVALID) from None


def _exchange(child: subprocess.Popen[bytes], data: bytes, seconds: float, most: int) -> bytes:
    """Return the child's answer about `data`, or its file, at most `most` bytes; empty if it died, could not read the request, or
    took longer than `seconds`.
    """
    watchdog = threading.Timer(seconds, child.kill)
    watchdog.start()
    assert child.stdout is not None
    try:
        if child.stdin is not None:
            child.stdin.write(len(data).to_bytes(8, "little"))
            child.stdin.write(data)
            child.stdin.flush()
        head = child.stdout.read(4)
        size = int.from_bytes(head, "little")
        answer = child.stdout.read(size) if len(head) == 4 and size <= most else b""
        return answer if len(answer) == size else b""
    except OSError:
        return b""
    finally:
        watchdog.cancel()


def _end(child: subprocess.Popen[bytes]) -> int:
    """Make sure that the child is gone; return its exit status (negative: the signal)."""
    for stream in filter(None, (child.stdin, child.stdout)):
        with contextlib.suppress(OSError):
            stream.close()
    try:
        return child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
