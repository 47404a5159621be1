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

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def before_import(name: str, action: Callable[[], object]) -> None:
    """Call `action()` when `name` is first looked for. If it is imported already, nothing happens: it is too late."""
    if name not in sys.modules:
        _finder().before.setdefault(name, []).append(action)


def after_import(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call `action(module)` right after `name` has run; now, if it is imported already."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        _finder().after.setdefault(name, []).append(action)


class _WaitingFinder(MetaPathFinder):
    def __init__(self) -> None:
        self.before: dict[str, list[Callable[[], object]]] = {}
        self.after: dict[str, list[Callable[[ModuleType], object]]] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for action in self.before.pop(fullname, []):
            action()
        if fullname not in self.after:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another that waits (`actordbg run`) gets its turn
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for action in self.after.pop(fullname, []):
                    action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _finder() -> _WaitingFinder:
    for finder in sys.meta_path:
        if isinstance(finder, _WaitingFinder):
            return finder
    finder = _WaitingFinder()
    sys.meta_path.insert(0, finder)
    return finder


_MARK = "__actordbg_deepspeed_cpu__"


def prepare_deepspeed() -> bool:
    """Make DeepSpeed runnable in this process if it has no CUDA; say whether it has none. Calling it again does nothing more."""
    import torch

    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda, _MARK, False):
        setattr(torch.cuda, _MARK, True)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # its collectives over gloo are enough; its C++ ones would be compiled in every fresh environment
        after_import("deepspeed.ops", lambda ops: ops.__compatible_ops__.update(deepspeed_shm_comm=False))
        after_import("deepspeed.runtime.zero.partition_parameters", _waiting_for_each)
    return True


def _waiting_for_each(partition_parameters: Any) -> None:
    """Gather parameters one at a time. DeepSpeed starts all and waits for the last one, which is enough in a CUDA stream only.

    Over gloo the others continue, and may overwrite what `from_pretrained` has just put there with what was gathered before.
    """
    init = partition_parameters.Init
    original = init._allgather_params_coalesced

    @functools.wraps(original)
    def _allgather_params_coalesced(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> None:
        for one in param_list:
            original(self, [one], *args, **kwargs)

    init._allgather_params_coalesced = _allgather_params_coalesced
