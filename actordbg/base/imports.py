"""Import large packages at less cost, or not at all.

torch, transformers and DeepSpeed make half a million objects that stay, and no garbage. Collecting while they are imported costs
a sixth of that time, and each full collection afterwards a third of a second: so they are put out of its sight.

A package that others import at their top, and that a process may never use, is deferred: it is imported when the first of its
names is used there. What uses nothing pays nothing.
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
    """Whether this package can be found, here or by a process that `python -m` starts in this folder. Nothing of it is run."""
    if package in sys.modules:
        return True
    try:
        return find_spec(package) is not None or PathFinder.find_spec(package, [os.getcwd()]) is not None
    except ImportError:
        return False


@contextlib.contextmanager
def without_collecting(module: str) -> Iterator[None]:
    """Around the first import of this module: what is there then stays for ever. Later it does nothing: there may be garbage."""
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
    """While it lasts, `import package` binds a stand-in, which imports the package when a name of it is used.

    A package that is loaded, or not installed, is left alone. So are `from package import name` and modules inside it: these
    raise ImportError, and whoever defers has to import again without. An error of the package is raised where it is used.
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
    """What `import` bound where a package was deferred. It is not in sys.modules when its names are used."""

    def __getattr__(self, name: str) -> Any:
        package = sys.modules.get(self.__name__)
        if package is self:
            raise AttributeError(f"module {self.__name__!r} is deferred: its {name!r} cannot be had yet")
        return getattr(package or import_module(self.__name__), name)
