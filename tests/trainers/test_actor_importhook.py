"""The import hook: actions run before or after a module, once, and the module notices nothing."""

import importlib
import inspect
import sys

import pytest

from actordbg.trainers.importhook import after_import, before_import

SOURCE = "value = 1\ndef answer():\n    return value\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported and is not imported yet."""
    name = f"waiting_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_actions_run_once_before_the_module_and_after_it_in_their_order_and_it_notices_nothing(module):
    seen = []
    before_import(module, lambda: seen.append(module in sys.modules))
    after_import(module, lambda loaded: setattr(loaded, "value", 2))
    for number in range(3):
        after_import(module, lambda loaded, number=number: seen.append(number + loaded.answer()))
    assert seen == []
    importlib.reload(importlib.import_module(module))
    assert seen == [False, 2, 3, 4]
    after_import(module, lambda loaded: seen.append(loaded.__name__))
    assert seen[4:] == [module], "it is imported already"
    loaded = sys.modules[module]
    assert "return value" in inspect.getsource(loaded.answer) and loaded.answer() == 1, "changed once"
    assert type(loaded.__spec__.loader).__name__ == "SourceFileLoader"
