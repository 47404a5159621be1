"""Asking another process, with an end in sight: what hangs is killed, with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from actordbg.doctor import doctor_probe as probe


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (negative: the signal that killed it; None: it was killed for taking too long)."""

    code: int | None
    output: str

    @property
    def last_words(self) -> str:
        """The last line that it printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run(command: Sequence[str], timeout: float) -> Ended:
    """Run a command to its end; OSError if it cannot be started."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        with _started(command, out, out) as child:
            try:
                code: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
        out.seek(0)
        return Ended(code, out.read())


def ask(python: str, question: Sequence[str], timeout: float) -> Iterator[dict[str, Any] | Ended]:
    """The probe's answers as they come, each within `timeout` seconds of the one before; an Ended comes last."""
    command = [python, "-c", Path(probe.__file__).read_text(encoding="utf-8"), *question]
    with tempfile.TemporaryFile("w+", errors="replace") as err:
        with _started(command, subprocess.PIPE, err) as child:
            assert child.stdout is not None
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_pump, args=(child.stdout, lines), daemon=True).start()
            code: int | None = None
            with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
                while (line := lines.get(timeout=timeout)) is not None:
                    if line.startswith(probe.MARK):
                        yield json.loads(line.removeprefix(probe.MARK))
                code = child.wait(timeout)
        err.seek(0)
        yield Ended(code, err.read())


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


@contextlib.contextmanager
def _started(command: Sequence[str], out: Any, err: Any) -> Iterator[subprocess.Popen[str]]:
    """A child in a session of its own; whatever is left of it is killed at the end of the block."""
    child = subprocess.Popen(
        command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
