"""A module that registers further backends of torch.distributed, beyond gloo and nccl: `--dist-plugin MODULE`.

A plugin is code, so it is a fact of a process, like consent (`consent`): no file, no variable and no store can name it. A worker
gets it from its argument list, and imports it before it creates a process group.

Example::

    give("oneccl_bindings_for_pytorch")        # --dist-plugin
    load()                                     # in a worker: torch knows "ccl" now
"""

from __future__ import annotations

import re
from importlib import import_module

from actordbg.base.errors import UsageError

FLAG = "--dist-plugin"
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z", re.ASCII)
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
    """Import the plugin, in a worker. UsageError if that fails."""
    if _given is None:
        return
    try:
        import_module(_given)
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        hint = "install it where torch is, or set PYTHONPATH"
        raise UsageError(f"{FLAG} {_given} cannot be imported: {type(error).__name__}: {error}"[:400], hint=hint) from None


def arguments() -> list[str]:
    """Return the arguments that give a worker the plugin."""
    return [] if _given is None else [FLAG, _given]
