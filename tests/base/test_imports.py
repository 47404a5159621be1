"""Large packages are imported without the collector, once; a garbage cycle of later is found as ever."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType

import pytest

from actordbg.base.imports import without_collecting


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_the_first_import_goes_uncollected_and_what_it_made_is_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_package_of_this_test"
    frozen = gc.get_freeze_count()
    try:
        with without_collecting(name):
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
        frozen = gc.get_freeze_count()
        with without_collecting(name):
            assert gc.isenabled(), "it is there already, and there may be garbage"
        assert gc.get_freeze_count() <= frozen
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None
    finally:
        gc.collect()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), without_collecting("no_such_package"):
        raise ImportError
    assert gc.isenabled()
