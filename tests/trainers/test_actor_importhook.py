"""The import hook: actions run before or after a module, once, and the module notices nothing."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from actordbg.trainers.importhook import after_import, before_import

SOURCE = "value = 1\ndef answer():\n    return value\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported and is not imported yet."""
    name = f"waiting_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_an_action_after_import_sees_the_finished_module_and_runs_once(module: str) -> None:
    seen: list[int] = []
    after_import(module, lambda loaded: seen.append(loaded.answer()))
    assert seen == []
    loaded = importlib.import_module(module)
    importlib.reload(loaded)
    assert seen == [1]


def test_an_action_after_import_runs_at_once_for_a_module_that_is_imported(module: str) -> None:
    importlib.import_module(module)
    seen: list[str] = []
    after_import(module, lambda loaded: seen.append(loaded.__name__))
    assert seen == [module]


def test_an_action_before_import_runs_before_the_module(module: str) -> None:
    order: list[bool] = []
    before_import(module, lambda: order.append(module in sys.modules))
    importlib.import_module(module)
    assert order == [False]


def test_several_actions_run_in_the_order_they_were_given(module: str) -> None:
    order: list[int] = []
    for number in range(3):
        after_import(module, lambda _, number=number: order.append(number))
    importlib.import_module(module)
    assert order == [0, 1, 2]


def test_what_an_action_changes_is_what_importers_by_name_get(module: str) -> None:
    after_import(module, lambda loaded: setattr(loaded, "value", 2))
    namespace: dict[str, object] = {}
    exec(f"from {module} import value", namespace)
    assert namespace["value"] == 2


def test_the_module_keeps_its_source_and_loader(module: str) -> None:
    after_import(module, lambda loaded: None)
    loaded = importlib.import_module(module)
    assert "return value" in inspect.getsource(loaded.answer)
    assert type(loaded.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_module_that_does_not_exist_still_does_not() -> None:
    after_import("no_such_module_at_all", lambda loaded: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
