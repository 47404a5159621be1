"""Backends of torch.distributed beyond gloo and nccl, and the module that registers them: `--dist-plugin MODULE`.

A plugin is code, so it is a fact of a process, like consent (`consent`): no file, no variable and no store can name it. A worker
gets it from its argument list, and imports it before it creates a process group.

A separate process checks whether torch knows a backend: the desk imports neither torch nor a plugin.

Example::

    give("oneccl_bindings_for_pytorch")        # --dist-plugin
    require("ccl")                             # UsageError where torch does not know it even then
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from importlib import import_module

from actordbg.base.errors import UsageError
from actordbg.base.owners import NOT_FROM_HERE

FLAG = "--dist-plugin"
KNOWN = ("gloo", "nccl")
"""Backends that need no such check: rules say where these run."""
_NAME = re.compile(r"[A-Za-z_]\w{0,63}\Z", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z", re.ASCII)
_ASK = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
import torch.distributed as dist
own = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake") and dist.is_backend_available(name)]
print("\\n".join(sorted({name for name in own} | ({sys.argv[1]} if dist.is_backend_available(sys.argv[1]) else set()))))
"""
_LONGEST_S = 300.0
_given: str | None = None


def give(module: str | None) -> None:
    """Use this plugin in this process and its children; None: no plugin. UsageError if it is not a module name."""
    global _given
    if module is not None and not _MODULE.match(module):
        raise UsageError(
            f"{FLAG} {module!r:.80} is not a module name", hint="pass the name that Python imports, such as my_backend"
        )
    _given = module


def load() -> None:
    """Import the plugin, in a worker."""
    if _given is not None:
        import_module(_given)


def arguments() -> list[str]:
    """Return the arguments that give a worker the plugin."""
    return [] if _given is None else [FLAG, _given]


def require(backend: str | None) -> None:
    """Raise UsageError unless torch knows the backend after importing the plugin."""
    if backend is not None and (backend not in KNOWN or _given is not None):
        _require(backend, _given)


@functools.cache
def _require(backend: str, plugin: str | None) -> None:
    if not _NAME.match(backend):
        raise UsageError(f"--dist-backend {backend!r:.60} is not a backend name", hint="use a name such as gloo, nccl, mpi, ccl")
    command = [sys.executable, "-c", _ASK, backend, *([] if plugin is None else [plugin])]
    try:
        result = subprocess.run(
            command, env={**os.environ, **NOT_FROM_HERE}, capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot check --dist-backend {backend} in torch: {error}", hint="drop --dist-backend") from None
    if result.returncode:
        what = "torch" if plugin is None else f"{FLAG} {plugin}"
        last = result.stderr.strip().rpartition("\n")[2]
        raise UsageError(f"{what} cannot be imported: {last:.300}", hint="install it where torch is, or set PYTHONPATH")
    known = result.stdout.split()
    if backend not in known:
        after = "" if plugin is None else f" after importing {plugin}"
        raise UsageError(
            f"torch does not know --dist-backend {backend}{after}",
            hint=f"use {', '.join(known)}, or pass {FLAG} MODULE with the module that registers it",
        )
