"""Large packages are imported without the collector, once, or when they are used; a garbage cycle of later is found as ever."""

import builtins
import gc
import importlib.util
import inspect
import sys
import weakref
from importlib import import_module
from types import ModuleType

import pytest

from actordbg.base.imports import deferred, without_collecting


class Node:
    """An object that refers to itself."""

    def __init__(self):
        self.me = self


def test_the_first_import_goes_uncollected_and_what_it_made_is_out_of_sight(monkeypatch):
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
        with pytest.raises(ImportError), without_collecting("no_such_package"):
            raise ImportError
        assert gc.isenabled(), "an import that fails leaves the collector on"
    finally:
        gc.collect()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that counts how often it ran, with one module inside."""
    name = "a_costly_package"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("import builtins\nbuiltins.a_costly_package_ran += 1\n__version__ = '7'\nanswer = 42\n")
    (folder / "inner.py").write_text("from a_costly_package import answer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builtins, "a_costly_package_ran", 0, raising=False)
    yield name
    for loaded in (name, f"{name}.inner"):
        sys.modules.pop(loaded, None)


def ran():
    return int(builtins.a_costly_package_ran)  # type: ignore[attr-defined]


def test_a_deferred_package_runs_when_a_name_is_used_where_it_was_imported(package):
    with deferred(package):
        bound, again = import_module(package), import_module(package)
        assert bound is again and importlib.util.find_spec(package) is not None
        with pytest.raises(ImportError):
            import_module(f"{package}.inner")
    inspect.getmodule(bound)
    assert package not in sys.modules and ran() == 0
    assert import_module(f"{package}.inner").answer == 42
    assert (bound.answer, bound.__version__, bound.inner.answer, ran()) == (42, "7", 42, 1)
    with deferred(package):
        assert import_module(package) is not bound, "it is loaded already"


def test_a_deferred_package_that_cannot_run_says_so_and_one_that_is_missing_is_left_alone(package, tmp_path):
    (tmp_path / package / "__init__.py").write_text("raise ImportError('no such library')\n")
    with deferred(package):
        bound = import_module(package)
    with pytest.raises(ImportError, match="no such library"):
        _ = bound.answer
    with deferred("no_such_package"), pytest.raises(ModuleNotFoundError):
        import_module("no_such_package")
