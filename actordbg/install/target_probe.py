"""A script for another interpreter, to answer what only it can: `python -c <this file> COMMAND [ARGUMENTS]`.

    find MODULE        which files an import of this module could mean here, the winner first; nothing is imported
    hook               the version of actordbg here; a traceback if its capture hook does not import
    prove FILE         whether the code that this interpreter would run for FILE holds the trailer, with its text constants

The answer is a line of JSON after `MARK`, since a site's start-up files may print as well. The text is passed on the command
line, so the other environment needs nothing of actordbg; it must run on Python 3.8 and later, with the standard library alone.
Nothing is written, not even a .pyc.

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

MARK = "actordbg-probe:"
INSTALLER = "_actordbg_install"


def find(module: str) -> dict[str, object]:
    """Find the file that wins, and every other that some entry of the path would give, each with its entry."""
    entries = [os.getcwd(), *_path_without_here()]
    sys.path[:] = entries
    winner = _locate(module, None)
    copies: dict[str, str] = {}
    for entry in entries:
        copies.setdefault(_locate(module, [entry]), entry)
    copies.pop("", None)
    first = {winner: copies.pop(winner, "an import hook (editable installation)")} if winner else {}
    return {"winner": winner, "copies": [{"path": path, "entry": entry} for path, entry in {**first, **copies}.items()]}


def hook() -> dict[str, object]:
    """Return the version of the actordbg whose capture hook imports here; if it does not import, the error propagates."""
    sys.path[:] = _path_without_here()
    importlib.import_module("actordbg.capture.hook")
    return {"version": importlib.import_module("actordbg").__version__}


def prove(path: str) -> dict[str, object]:
    """Report whether the code that would run for `path` holds a trailer, its strings, and the cached file it may come from."""
    loader = importlib.machinery.SourceFileLoader("actor", path)
    try:
        code = loader.get_code("actor")
    except SyntaxError as error:
        return {"hooked": False, "constants": [], "error": str(error), **_cache(path)}
    installers = [c for c in code.co_consts if getattr(c, "co_name", None) == INSTALLER] if code else []
    constants = [c for i in installers for c in i.co_consts if isinstance(c, str)]
    return {"hooked": bool(installers), "constants": constants, "error": "", **_cache(path)}


def _cache(path: str) -> dict[str, object]:
    """Return the .pyc of `path` for this interpreter, if it exists, and how Python decides whether it is up to date."""
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
    """Return the file that a module has on these path entries (None: all, import hooks included), "" if none."""
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
    """Return sys.path without the entry that `python -c` put in front of it."""
    return [entry for entry in sys.path if entry not in ("", ".")]


def main(arguments: list[str]) -> None:
    """Run a command and answer on standard output."""
    sys.dont_write_bytecode = True
    question, *rest = arguments
    answer = find(*rest) if question == "find" else hook() if question == "hook" else prove(*rest)
    sys.stdout.write(f"\n{MARK}{json.dumps({**answer, 'executable': sys.executable})}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
