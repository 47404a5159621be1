"""The writer process (`actordbg.capture.writer_process`) as the writer thread sees it. Loaded only where there is one.

A request and its answer are a line of JSON each. The thread waits for an answer as long as the process lives, but not past the
moment at which its own time is over.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWER_SECONDS = 0.2
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from actordbg.capture.writer_process import main; main()"


class Scribe:
    """The writer process (`actordbg.capture.writer_process`), as the thread sees it."""

    def __init__(self) -> None:
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-I", "-c", _MAIN, str(os.getpid()), json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._said = b""
        self._ready = False

    def ask(self, request: dict[str, Any], is_over: Callable[[], bool]) -> Any:
        """The answer to a request. OSError if the process is gone, does not do it, or time is over meanwhile."""
        self._ready = self._ready or self._listen(is_over) == "ready"
        self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
        answer = self._listen(is_over)
        if not isinstance(answer, list):
            raise OSError(f"the writer process says {answer!s:.200}")
        return answer

    def stop(self) -> None:
        """End the process; also one that does not listen, or that is stuck and cannot end yet."""
        try:
            self._process.kill()
        finally:
            self._process.stdin.close(), self._process.stdout.close()  # type: ignore[union-attr]
            until = time.monotonic() + 1  # it may be stuck in a disk
            while self._process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)

    def _listen(self, is_over: Callable[[], bool]) -> Any:
        out: Any = self._process.stdout
        ear = select.poll()
        ear.register(out, select.POLLIN)
        while not self._said.endswith(b"\n"):
            more = out.read(65_536) if ear.poll(1000 * ANSWER_SECONDS) else None
            if more == b"" or is_over():
                raise OSError("the writer process ended" if more == b"" else "there is no time left")
            self._said += more or b""
        said, self._said = self._said, b""
        return json.loads(said)
