"""What only the examined interpreter can answer, as a script for it: `python -c <this file> COMMAND [NAMES]`.

    facts NAME...      versions of distributions (None: not installed), Python's version and folders; imports nothing
    imports MODULE...  imports modules one after the other, and says of each how it went and how long it took

Each answer is a line of JSON behind `MARK`, at once, so that a module which hangs or kills the process is known by the
line that is missing. The text is handed over on the command line, so the examined environment needs nothing of actordbg
(but its CPU support is used where it is there). Any Python from 3.8 on, standard library only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import time

MARK = "actordbg-doctor:"


class RaisedHere:
    """Keeps whatever an import raises: a module may raise anything, and what it raised is the answer here."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> RaisedHere:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt)


def say(answer: dict[str, object]) -> None:
    """One line of the answer."""
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def facts(names: list[str]) -> None:
    """Versions and folders; imports nothing of what it asks about."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    say(
        {
            "python": list(sys.version_info[:3]),
            "executable": sys.executable,
            "versions": versions,
            "include": sysconfig.get_paths()["include"],
            "scripts": sysconfig.get_paths()["scripts"],
        }
    )


def imports(modules: list[str]) -> None:
    """How each import went; torch and the CPU support come first, as in a replay worker."""
    say({"module": "torch", "state": "begin"})
    start = time.monotonic()
    with RaisedHere() as recorded:
        say({"torch": torch_facts()})
    say(ended("torch", recorded.error, time.monotonic() - start))
    with RaisedHere() as recorded:
        importlib.import_module("actordbg.host.trainer").TRAINER.support_cpu()
    if recorded.error is not None:
        say({"cpu_support": told(recorded.error)})
    for module in modules:
        say({"module": module, "state": "begin"})
        start = time.monotonic()
        with RaisedHere() as recorded:
            importlib.import_module(module)
        say(ended(module, recorded.error, time.monotonic() - start))


def torch_facts() -> dict[str, object]:
    """What torch says about CUDA."""
    torch = importlib.import_module("torch")
    return {"version": str(torch.__version__), "built_for": torch.version.cuda, "cuda": torch.cuda.is_available()}


def ended(module: str, error: BaseException | None, seconds: float) -> dict[str, object]:
    """The outcome of one import: `missing` is the module that was not found, `where` the file that asked for it."""
    answer: dict[str, object] = {"module": module, "state": "end", "seconds": round(seconds, 2), "error": None}
    if error is not None:
        first = error
        while first.__cause__ or (first.__context__ and not first.__suppress_context__):
            first = first.__cause__ or first.__context__ or first
        answer.update(error=told(error), first=told(first))
        answer["missing"] = first.name if isinstance(first, ModuleNotFoundError) else None
        answer["where"] = last_file(first)
    return answer


def told(error: BaseException) -> str:
    """An exception as one text, its class first."""
    return f"{type(error).__name__}: {error}"


def last_file(error: BaseException) -> str:
    """The last file of a traceback that is no part of the import system."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<") and "importlib" not in name:
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def main(arguments: list[str]) -> None:
    """Answer one question on standard output."""
    sys.dont_write_bytecode = True
    {"facts": facts, "imports": imports}[arguments[0]](arguments[1:])
    sys.stdout.flush()
    os._exit(0)  # what was imported may have started threads that would keep the process


if __name__ == "__main__":
    main(sys.argv[1:])
