"""A script that imports modules in order, and says how each import went: `python -c <this file> SECONDS MODULE...`.

    {"module": "torch", "state": "begin"}
    {"module": "torch", "state": "end", "seconds": 1.8, "error": null}

Each answer is a line of JSON after `MARK`, since modules may print as well. It is flushed at once, so the missing line identifies
a module that hangs or kills the process. A module that takes longer than SECONDS ends the process, with its stack on standard
error. torch and the trainer's CPU support come first, as in a replay worker. Nothing is written, not even a .pyc.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

MARK = "actordbg-probe:"
LATE = "Timeout ("
"""What faulthandler writes before the stack of a module that takes too long."""


def main(seconds: float, modules: list[str]) -> None:
    """Import the modules, and answer on standard output."""
    sys.dont_write_bytecode = True
    tried("torch", seconds, lambda: say(torch=torch_facts()))
    TRAINER = importlib.import_module("actordbg.trainers.trainer").TRAINER
    if not set(modules).isdisjoint(TRAINER.modules):
        TRAINER.support_cpu()
    for module in modules:
        tried(module, seconds, partial(importlib.import_module, module))
    os._exit(0)  # what was imported may have started threads that would keep the process


def tried(module: str, seconds: float, call: Callable[[], object]) -> None:
    """Report that an import begins, and how it ended."""
    say(module=module, state="begin")
    start = time.monotonic()
    faulthandler.dump_traceback_later(seconds, exit=True)
    error = raised_by(call)
    faulthandler.cancel_dump_traceback_later()
    say(module=module, state="end", seconds=round(time.monotonic() - start, 2), **blamed(error))


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """Call, and return what was raised, if anything: a module may raise any exception."""
    try:
        call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # raised by somebody's module
        return error
    return None


def say(**answer: Any) -> None:
    """Write a line of the answer."""
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def torch_facts() -> dict[str, Any]:
    """Return torch's version and what it says about CUDA."""
    torch = importlib.import_module("torch")
    return {"version": str(torch.__version__), "built_for": torch.version.cuda, "cuda": torch.cuda.is_available()}


def blamed(error: BaseException | None) -> dict[str, Any]:
    """Find the cause of a failed import. `missing`: the module that was not found; `where`: the file that imported it."""
    if error is None:
        return {"error": None}
    first = error
    while first.__cause__ or (first.__context__ and not first.__suppress_context__):
        first = first.__cause__ or first.__context__ or first
    missing = first.name if isinstance(first, ModuleNotFoundError) else None
    trace = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(first.__traceback__)]
    ours = [f"{name}:{line}" for name, line in trace if not name.startswith("<") and "importlib" not in name]
    return {"error": describe(first), "missing": missing, "where": ours[-1] if ours else ""}


def describe(error: BaseException) -> str:
    """Format an exception, its class first."""
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
