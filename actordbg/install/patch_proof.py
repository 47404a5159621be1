"""Prove that the bytes on disk are what the target interpreter would run.

Python does not read actor.py if it trusts the .pyc beside it. A .pyc with an unchecked hash (compileall
--invalidation-mode unchecked-hash, some container builds) is trusted whatever the source says, so a patched file would
capture nothing, in silence; a .pyc with a timestamp is trusted if seconds and size happen to agree. So after every
change the interpreter itself is asked for the code that it would run.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from actordbg.base.errors import Conflict
from actordbg.install.patch_target import ask


def require_hooked(python: str, path: Path, store: str) -> None:
    """Conflict unless `python` would run the trailer of `path`, capturing into `store`."""
    _require(python, path, lambda proof: proof["hooked"] and store in proof["constants"], "does not see the hook in")


def require_clean(python: str, path: Path) -> None:
    """Conflict unless `python` would run `path` without a trailer."""
    _require(python, path, lambda proof: not proof["hooked"], "still sees the hook in")


def _require(python: str, path: Path, holds: Any, fault: str) -> None:
    proof = ask(python, "prove", str(path))
    if not holds(proof) and proof["kind"] == "timestamp":
        with contextlib.suppress(OSError):
            os.unlink(proof["cached"])  # a cache that contradicts its source, by a coincidence of second and size
        proof = ask(python, "prove", str(path))
    if holds(proof):
        return
    if proof["error"]:
        raise Conflict(
            f"{python} cannot compile {path}: {proof['error']}", hint="this Python is too old or too new for the file"
        )
    raise Conflict(
        f"{python} {fault} {path}: it runs {proof['cached']} ({proof['kind']}) instead of the source",
        hint=f"remove {proof['cached']} (Python makes it again from the source), then run this again",
    )
