"""A process that has torch and transformers loaded and forks for each trial, so that a trial costs what its case costs.

    python -m actordbg.reduce.trial_host        # reads a line of JSON for each trial, answers with a line

A request: `source` (the script of a case, rendered by this actordbg), `modules` (to load before the fork, and before
the clock starts), `ranks`, `timeout_s`. The answer is an `Ending`. A crash or a hang kills the trial's processes only; they die
with the host. What they print is dropped.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

RETURNED, RAISED, DIED, HUNG = "returned", "raised", "died", "hung"
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run a trial in one forked process for each rank, and say how it ended: the first rank that did not return decides."""
    for module in request["modules"]:
        with suppress(Exception):  # the trial says it
            importlib.import_module(module)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"WORLD_SIZE": str(request["ranks"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    deadline, answers = time.monotonic() + request["timeout_s"], list[dict[str, Any]]()
    ranks = [_forked(request["source"], where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(request["ranks"])]
    for process, pipe in ranks:
        try:
            answers.append(pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else {"status": HUNG})
        except EOFError:
            process.join()
            number = process.exitcode or 0
            ended = signal.Signals(-number).name if number < 0 else f"exit code {number}"
            answers.append({"status": DIED, "error": ended})
    for process, pipe in ranks:
        with suppress(ProcessLookupError):  # and what it started
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        pipe.close()
    return min(answers, key=lambda answer: (DIED, RAISED, HUNG, RETURNED).index(answer["status"]))


def _forked(source: str, where: dict[str, str]) -> tuple[BaseProcess, Connection]:
    """Fork a rank; return its process and the pipe on which it answers."""
    reading, writing = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_in_child, args=(os.getpid(), source, where, writing))
    process.start()
    writing.close()
    with suppress(OSError):  # the child does it as well: whoever is first
        os.setpgid(process.pid or 0, process.pid or 0)
    return process, reading


def _in_child(host: int, source: str, where: dict[str, str], answers: Connection) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:  # it died before prctl
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.chdir(tempfile.gettempdir())
    os.environ |= where
    answers.send(_attempt(source))
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
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
