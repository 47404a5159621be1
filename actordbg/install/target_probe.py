"""What only the target interpreter can answer, as a script for it: `python -c <this file> COMMAND [ARGUMENTS]`.

    find MODULE     which files an import of this module could mean here, the winner first; nothing is imported
    hook            the version of actordbg here; a traceback if its capture hook does not import
    prove FILE      whether the code that this interpreter would run for FILE holds the trailer, with its text constants

The answer is one line of JSON behind `MARK`, since a site's start-up files may print too. The text is handed over on
the command line, so the target environment needs nothing of actordbg; it must run on any Python from 3.8 on, with the
standard library alone. Nothing is written, no .pyc either.

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
    """The file that wins, and every other that a part of the path would give, each with the entry it comes from."""
    entries = [os.getcwd(), *_path_without_here()]
    sys.path[:] = entries
    winner = _locate(module, None)
    others = [(entry, _locate(module, [entry])) for entry in entries]
    copies = [{"path": winner, "entry": "an import hook (editable installation)"}] if winner else []
    for entry, path in others:
        known = next((copy for copy in copies if copy["path"] == path), None)
        if known is None and path:
            copies.append({"path": path, "entry": entry})
        elif known is not None and known["entry"] not in entries:
            known["entry"] = entry
    return {"winner": winner, "copies": copies}


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
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        try:
            spec = importlib.machinery.PathFinder.find_spec(name, search) if path else _first_spec(name, search)
        except KeyError:  # a folder without __init__.py inside a package that is not imported
            return ""
        if spec is None:
            return ""
        search, origin = list(spec.submodule_search_locations or []), spec.origin
    return os.path.abspath(origin) if origin and os.path.isfile(origin) else ""


def _first_spec(name: str, search: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search, None)
        if spec is not None:
            return spec
    return None


def _path_without_here() -> list[str]:
    """sys.path without the entry that `python -c` put in front of it."""
    return [entry for entry in sys.path if entry not in ("", ".")]


def main(arguments: list[str]) -> None:
    """Answer one question on stdout."""
    sys.dont_write_bytecode = True
    question, rest = arguments[0], arguments[1:]
    answer = find(*rest) if question == "find" else hook() if question == "hook" else prove(*rest)
    answer["executable"] = sys.executable
    sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
