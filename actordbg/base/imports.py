"""Import large packages at less cost, or not at all.

torch, transformers and DeepSpeed create half a million objects that stay, and no garbage. Garbage collection costs a sixth of
their import time, and each full collection afterwards a third of a second: so these objects are hidden from the collector.

A package that others import at module level, and that a process may never use, is deferred: it is imported when the first of its
names is used.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def is_there(package: str) -> bool:
    """Check whether a package can be found, here or by a `python -m` process in this folder, without running any of it."""
    if package in sys.modules:
        return True
    try:
        return find_spec(package) is not None or PathFinder.find_spec(package, [os.getcwd()]) is not None
    except ImportError:
        return False


@contextlib.contextmanager
def without_collecting(module: str) -> Iterator[None]:
    """Disable garbage collection around the first import of a module, and exempt all objects that exist afterwards from it.

    Does nothing if the module is already imported: there may be garbage by then.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def deferred(package: str) -> Iterator[None]:
    """Within the block, make `import package` bind a stand-in, which imports the package when one of its names is used.

    Does nothing if the package is loaded or not installed. `from package import name` and imports of its submodules raise
    ImportError in the block; the caller then has to import without `deferred`. The package's errors are raised at first use.
    """
    spec = None if package in sys.modules else find_spec(package)
    if spec is None:
        yield
        return
    stand_in = _StandIn(package)
    stand_in.__spec__ = spec
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(package) is stand_in:
            del sys.modules[package]


class _StandIn(ModuleType):
    """Stand-in that `import` bound for a deferred package. It is not in sys.modules when its names are used."""

    def __getattr__(self, name: str) -> Any:
        package = sys.modules.get(self.__name__)
        if package is self:
            raise AttributeError(f"module {self.__name__!r} is deferred: its {name!r} is not available yet")
        return getattr(package or import_module(self.__name__), name)
