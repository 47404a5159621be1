"""A process that has torch and transformers loaded and forks for each trial, so that a trial costs what its case costs.

    python -m actordbg.reduce.trial_host        # reads a line of JSON for each trial, answers with a line

A request: `source` (the script of a case, rendered by this actordbg), `modules` (to load before the fork, and before
the clock starts), `ranks`, `timeout_s`. The answer is an `Ending`. A crash or a hang kills the trial's processes only; they die
with the host. What they print is dropped.
"""

from __future__ import annotations

import ctypes
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
_PR_SET_PDEATHSIG = 1


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a trial in one forked process for each rank, and say how it ended: the first rank that did not return decides."""
    for module in request["modules"]:
        with suppress(Exception):  # the trial says it
            importlib.import_module(module)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deadline, answers = time.monotonic() + request["timeout_s"], dict[int, dict[str, Any]]()
    children: list[tuple[int, int]] = []
    try:
        for rank in range(request["ranks"]):
            children.append(_forked(request, rank, port))
        for rank, (_, pipe) in enumerate(children):
            if answer := _read(pipe, deadline):
                answers[rank] = answer
    finally:
        statuses = [_end(*child) for child in children]
    for rank, status in enumerate(statuses):
        if rank not in answers:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            name = signal.Signals(number).name if number else f"exit code {os.waitstatus_to_exitcode(status)}"
            answers[rank] = {"status": DIED, "error": name}
    order = (DIED, RAISED, HUNG, RETURNED)
    return min(answers.values(), key=lambda answer: order.index(answer["status"]))


def _read(pipe: int, deadline: float) -> dict[str, Any] | None:
    """Return a rank's answer; None if it ended without one. After the deadline, a rank that has ended is still read."""
    data = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (more := os.read(pipe, 2**16)):
            return dict(json.loads(data)) if data else None
        data += more
    return {"status": HUNG}


def _end(pid: int, pipe: int) -> int:
    """Kill a rank and what it started; return its wait status."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(pipe)
    return os.waitpid(pid, 0)[1]


def _forked(request: dict[str, Any], rank: int, port: int) -> tuple[int, int]:
    """Fork a rank; return its pid and the pipe on which it answers."""
    reading, writing = os.pipe()
    host, pid = os.getpid(), os.fork()
    if pid:
        os.close(writing)
        with suppress(OSError):  # the child does it as well: whoever is first
            os.setpgid(pid, pid)
        return pid, reading
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != host:  # it died before prctl
            os._exit(1)
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
        if isinstance(error, SystemExit) and error.__context__:  # a script exits for a package that cannot be imported
            error = error.__context__
        frames = [
            f"{_without_folder(frame.filename)}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        return {"status": RAISED, "error_class": type(error).__name__, "error": str(error)[:2000], "frames": frames[-8:]}
    return {"status": RETURNED, "values": [value if value - value == 0 else None for value in values]}


def _without_folder(path: str) -> str:
    """Return a file's path inside its package folder; its name if it is elsewhere."""
    _, installed, inside = path.rpartition("site-packages/")
    return inside if installed else os.path.basename(path)


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
