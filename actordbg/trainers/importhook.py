"""Run a function just before, or just after, a module is imported for the first time in this process.

A trainer imports names by value (`from x import y`). So what it needs on a CPU has to be in place before its modules run, and
what changes inside them can only change afterwards. Importing a trainer (and torch, deepspeed: six seconds) merely to change it
would cost every process that, also those that never use it. So we wait for the import.

The module's own loader stays the loader (only its `exec_module` is wrapped on that one instance), so `inspect.getsource`,
`runpy` and tracebacks see nothing unusual.

Example:
    after_import("trainer.utils", lambda module: setattr(module, "convert_to_torch_dtype", mine))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Before = Callable[[], object]
After = Callable[[ModuleType], object]


def before_import(name: str, action: Before) -> None:
    """Call `action()` when `name` is first looked for. If it is imported already, nothing happens: it is too late."""
    if name not in sys.modules:
        _finder().before.setdefault(name, []).append(action)


def after_import(name: str, action: After) -> None:
    """Call `action(module)` right after `name` has run; now, if it is imported already."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        _finder().after.setdefault(name, []).append(action)


class _WaitingFinder(MetaPathFinder):
    def __init__(self) -> None:
        self.before: dict[str, list[Before]] = {}
        self.after: dict[str, list[After]] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for action in self.before.pop(fullname, []):
            action()
        if fullname not in self.after:
            return None
        spec = self._found_behind_me(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._wrap(fullname, spec)
        return spec

    def _found_behind_me(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """What the finders after this one say: another that waits for the same module (`actordbg run`) gets its turn, too."""
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _wrap(self, fullname: str, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.after.pop(fullname, []):
                action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _finder() -> _WaitingFinder:
    for finder in sys.meta_path:
        if isinstance(finder, _WaitingFinder):
            return finder
    finder = _WaitingFinder()
    sys.meta_path.insert(0, finder)
    return finder
