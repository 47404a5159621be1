"""A process that has torch and transformers loaded and forks for each trial, so that a trial costs what its case costs.

    python -m actordbg.reduce.trial_host        # reads a line of JSON for each trial, answers with a line

A request: `source` (the script of a case, rendered by this actordbg), `module` (a module of transformers to load before the
fork), `ranks`, `timeout_s`. The answer is an `Ending`. A crash or a hang kills the trial's processes only; what they print is
dropped.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

RETURNED, RAISED, DIED, HUNG = "returned", "raised", "died", "hung"


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a trial in one forked process for each rank, and say how it ended: the first rank that did not return decides."""
    with suppress(ImportError):
        importlib.import_module(request["module"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [_forked(request, rank, port) for rank in range(request["ranks"])]
    deadline, answers = time.monotonic() + request["timeout_s"], {}
    for rank, (_, pipe) in enumerate(children):
        data = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                answers[rank] = {"status": HUNG}
                break
            if not (more := os.read(pipe, 2**16)):
                break
            data += more
        if rank not in answers and data:
            answers[rank] = json.loads(data)
    for rank, (pid, pipe) in enumerate(children):
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(pipe)
        if rank not in answers:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            name = signal.Signals(number).name if number else f"exit code {os.waitstatus_to_exitcode(status)}"
            answers[rank] = {"status": DIED, "error": name}
    order = (DIED, RAISED, HUNG, RETURNED)
    return min(answers.values(), key=lambda answer: order.index(answer["status"]))


def _forked(request: dict[str, Any], rank: int, port: int) -> tuple[int, int]:
    """Fork a rank; return its pid and the pipe on which it answers."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        with suppress(OSError):  # the child does it as well: whoever is first
            os.setpgid(pid, pid)
        return pid, reading
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        os.close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.chdir(tempfile.gettempdir())
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["ranks"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.write(writing, json.dumps(_attempt(request["source"])).encode())
    finally:
        os._exit(0)


def _attempt(source: str) -> dict[str, Any]:
    import traceback

    names: dict[str, Any] = {"__name__": "case", "__file__": "case.py"}
    try:
        exec(compile(source, "case.py", "exec"), names)
        values = names["attempt"]()
    except BaseException as error:  # noqa: BLE001 - any exception is how the trial ended
        frames = [
            f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        return {"status": RAISED, "error_class": type(error).__name__, "error": str(error)[:2000], "frames": frames[-8:]}
    return {"status": RETURNED, "values": [value if value - value == 0 else None for value in values]}


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    import torch
    import transformers  # noqa: F401 - loaded for the trials

    torch.set_num_threads(1)
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
