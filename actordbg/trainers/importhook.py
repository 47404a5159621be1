"""Run a function just before, or just after, a module is imported for the first time in this process.

A trainer imports names by value (`from x import y`). So replacements that it needs on a CPU have to be in place before its
modules run, and the modules themselves can only be changed afterwards. Importing a trainer (with torch and deepspeed: six
seconds) merely to change it would slow down every process, even those that never use it. So we wait for the import.

The module's own loader stays the loader (only the `exec_module` of that instance is wrapped), so `inspect.getsource`, `runpy` and
tracebacks see nothing unusual.

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
    """Call `action()` when `name` is first looked up. Does nothing if it is already imported: it is too late."""
    if name not in sys.modules:
        _finder().before.setdefault(name, []).append(action)


def after_import(name: str, action: Callable[[ModuleType], object]) -> None:
    """Call `action(module)` right after `name` has run; now, if it is already imported."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        _finder().after.setdefault(name, []).append(action)


def install(actor_cls: type, *, store: str) -> None:
    """Attach the adapter that has the name of the class's package, to its modules as they are imported: for a patched file."""
    from actordbg.trainers.find_adapter import of_user
    from actordbg.trainers.recorded_model import attach

    named = actor_cls.__module__.partition(".")[0]
    for module in dict.fromkeys(seam.module for seam in of_user(named).seams):
        after_import(module, functools.partial(attach, named=named, store=store))


class _WaitingFinder(MetaPathFinder):
    def __init__(self) -> None:
        self.before: dict[str, list[Callable[[], object]]] = {}
        self.after: dict[str, list[Callable[[ModuleType], object]]] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for action in self.before.pop(fullname, []):
            action()
        if fullname not in self.after:
            return None
        place = sys.meta_path.index(self)
        behind = sys.meta_path[place + 1 :]  # a similar finder (`actordbg run`) gets its turn
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
    """Make DeepSpeed runnable in this process if it has no CUDA; return whether it has none. Idempotent."""
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
    """Gather parameters one at a time. DeepSpeed starts all and waits for the last, which suffices only in a CUDA stream.

    Over gloo the others are still running, and may overwrite what `from_pretrained` has just loaded with the older values.
    """
    init = partition_parameters.Init
    original = init._allgather_params_coalesced

    @functools.wraps(original)
    def _allgather_params_coalesced(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in param_list:
            original(self, [parameter], *args, **kwargs)

    init._allgather_params_coalesced = _allgather_params_coalesced
