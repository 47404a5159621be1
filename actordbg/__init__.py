"""Debug the actor of an RLHF run without the run: `open(store)`, `check_model(model, batch)`, `record`, `truth`.

Each name is imported when it is first used, so that `import actordbg` costs nothing: training processes load this module.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["ActordbgError", "BadResult", "CommandResult", "OpenStore", "StoredDump", "check_model", "open", "record", "truth"]

if TYPE_CHECKING:
    from actordbg.api.dump_list import StoredDump
    from actordbg.api.opened_store import OpenStore, open, record
    from actordbg.api.own_model import check_model, truth
    from actordbg.base.errors import ActordbgError, BadResult
    from actordbg.document.command_result import CommandResult
else:
    _HOMES = {
        "actordbg.api.dump_list": ("StoredDump",),
        "actordbg.api.opened_store": ("OpenStore", "open", "record"),
        "actordbg.api.own_model": ("check_model", "truth"),
        "actordbg.base.errors": ("ActordbgError", "BadResult"),
        "actordbg.document.command_result": ("CommandResult",),
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for module, names in _HOMES.items():
            if name in names:
                globals()[name] = value = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module 'actordbg' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
