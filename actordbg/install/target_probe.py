"""What only another interpreter can answer, as a script for it: `python -c <this file> COMMAND [ARGUMENTS]`.

    find MODULE        which files an import of this module could mean here, the winner first; nothing is imported
    hook               the version of actordbg here; a traceback if its capture hook does not import
    prove FILE         whether the code that this interpreter would run for FILE holds the trailer, with its text constants
    facts NAME...      versions of distributions (None: not installed), Python's version and folders; imports nothing
    imports MODULE...  imports modules one after the other, and says of each how it went and how long it took

Each answer is a line of JSON behind `MARK`, since a site's start-up files may print too, and comes at once, so that a module
which hangs or kills the process is known by the line that is missing. The text is handed over on the command line, so the
other environment needs nothing of actordbg (but doctor uses its CPU support where it is there); it must run on any Python from
3.8 on, with the standard library alone. Nothing is written, no .pyc either.

"Here" is the interpreter's own sys.path with the current folder in front, as `python -m` has it.
`hook` leaves the current folder out: a job that starts elsewhere must find actordbg as well.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable

MARK = "actordbg-probe:"
INSTALLER = "_actordbg_install"


def find(module: str) -> dict[str, object]:
    """The file that wins, and every other that a part of the path would give, each with the entry it comes from."""
    entries = [os.getcwd(), *_path_without_here()]
    sys.path[:] = entries
    winner = _locate(module, None)
    found: dict[str, str] = {}
    for entry in entries:
        found.setdefault(_locate(module, [entry]), entry)
    found.pop("", None)
    first = {winner: found.pop(winner, "an import hook (editable installation)")} if winner else {}
    return {"winner": winner, "copies": [{"path": path, "entry": entry} for path, entry in {**first, **found}.items()]}


def hook() -> dict[str, object]:
    """The version of the actordbg whose capture hook imports here; where it does not, the traceback is the answer."""
    sys.path[:] = _path_without_here()
    importlib.import_module("actordbg.capture.hook")
    return {"version": importlib.import_module("actordbg").__version__}


def prove(path: str) -> dict[str, object]:
    """Whether the code that would run for `path` holds a trailer, its strings, and the cached file it may come from."""
    loader = importlib.machinery.SourceFileLoader("actor", path)
    try:
        code = loader.get_code("actor")
    except SyntaxError as error:
        return {"hooked": False, "constants": [], "error": str(error), **_cache(path)}
    installers = [c for c in code.co_consts if getattr(c, "co_name", None) == INSTALLER] if code else []
    constants = [c for i in installers for c in i.co_consts if isinstance(c, str)]
    return {"hooked": bool(installers), "constants": constants, "error": "", **_cache(path)}


def _cache(path: str) -> dict[str, object]:
    """The .pyc of `path` for this interpreter, if it exists, and how Python decides whether it is still good."""
    try:
        cached = importlib.util.cache_from_source(path)
        with open(cached, "rb") as file:
            head = file.read(8)
    except (OSError, NotImplementedError):
        return {"cached": "", "kind": "none"}
    flags = int.from_bytes(head[4:8], "little")
    kind = "timestamp" if not flags & 1 else "checked-hash" if flags & 2 else "unchecked-hash"
    return {"cached": cached, "kind": kind}


def _locate(module: str, path: list[str] | None) -> str:
    """The file that these path entries (None: all, import hooks included) give, "" if none."""
    search, origin = path, None
    parts = module.split(".")
    finders = [importlib.machinery.PathFinder] if path else sys.meta_path
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            spec = next(filter(None, (finder.find_spec(name, search, None) for finder in finders)), None)
        except KeyError:  # a folder without __init__.py inside a package that is not imported
            return ""
        if spec is None:
            return ""
        search, origin = list(spec.submodule_search_locations or []), spec.origin
    return os.path.abspath(origin) if origin and os.path.isfile(origin) else ""


def _path_without_here() -> list[str]:
    """sys.path without the entry that `python -c` put in front of it."""
    return [entry for entry in sys.path if entry not in ("", ".")]


def raised_by(call: Callable[..., object], *arguments: object) -> BaseException | None:
    """Call, and return what was raised: a module may raise anything, and what it raised is the answer here."""
    try:
        call(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # of somebody's module
        return error
    return None


def say(answer: dict[str, object]) -> None:
    """One line of the answer."""
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def facts(names: list[str]) -> None:
    """Versions and folders; imports nothing of what it asks about."""
    import importlib.metadata  # it imports the parsers of e-mail

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
    tried("torch", lambda: say({"torch": torch_facts()}))
    error = raised_by(lambda: importlib.import_module("actordbg.trainers.trainer").TRAINER.support_cpu())
    if error is not None:
        say({"cpu_support": told(error)})
    for module in modules:
        tried(module, importlib.import_module, module)


def tried(module: str, call: Callable[..., object], *arguments: object) -> None:
    """Say that an import begins, and how it ended."""
    say({"module": module, "state": "begin"})
    start = time.monotonic()
    error = raised_by(call, *arguments)
    say({"module": module, "state": "end", "seconds": round(time.monotonic() - start, 2), "error": None, **blamed(error)})


def torch_facts() -> dict[str, object]:
    """What torch says about CUDA."""
    torch = importlib.import_module("torch")
    return {"version": str(torch.__version__), "built_for": torch.version.cuda, "cuda": torch.cuda.is_available()}


def blamed(error: BaseException | None) -> dict[str, object]:
    """What an import failed of: `missing` is the module that was not found, `where` the file that asked for it."""
    if error is None:
        return {}
    first = error
    while first.__cause__ or (first.__context__ and not first.__suppress_context__):
        first = first.__cause__ or first.__context__ or first
    missing = first.name if isinstance(first, ModuleNotFoundError) else None
    return {"error": told(error), "first": told(first), "missing": missing, "where": last_file(first)}


def told(error: BaseException) -> str:
    """An exception as one text, its class first."""
    return f"{type(error).__name__}: {error}"


def last_file(error: BaseException) -> str:
    """The last file of a traceback that is not part of the import system."""
    trace = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [f"{name}:{line}" for name, line in trace if not name.startswith("<") and "importlib" not in name]
    return ours[-1] if ours else ""


def main(arguments: list[str]) -> None:
    """Answer one question on standard output."""
    sys.dont_write_bytecode = True
    question, rest = arguments[0], arguments[1:]
    if question in ("facts", "imports"):
        (facts if question == "facts" else imports)(rest)
        os._exit(0)  # what was imported may have started threads that would keep the process
    answer = find(*rest) if question == "find" else hook() if question == "hook" else prove(*rest)
    say({**answer, "executable": sys.executable})


if __name__ == "__main__":
    main(sys.argv[1:])
