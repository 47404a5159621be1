"""Find adapters: built-in ones by name, packages' by entry point (group `actordbg.adapters`), any other as `module:Class`.

Two functions: `installed` for a name from a store, which must not name a module; `of_user` for a name that the user typed, or
put into the environment of a job.

Loaded in training processes: imports only the standard library and the requested adapter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from actordbg.base.fault import EnvironmentProblem, Unsupported
from actordbg.trainers.seam import Adapter, Seam

GROUP = "actordbg.adapters"
BUILT_IN = {
    "areal": "actordbg.trainers.declared_adapter:AReaL",
    "miles": "actordbg.trainers.declared_adapter:Miles",
    "molt": "actordbg.trainers.molt_adapter:Molt",
    "nemo-rl": "actordbg.trainers.declared_adapter:NemoRl",
    "plain": "actordbg.trainers.plain_adapter:Plain",
    "prime-rl": "actordbg.trainers.declared_adapter:PrimeRl",
    "skyrl": "actordbg.trainers.skyrl_adapter:SkyRl",
    "slime": "actordbg.trainers.declared_adapter:Slime",
    "trl": "actordbg.trainers.trl_adapter:Trl",
    "verl": "actordbg.trainers.verl_adapter:Verl",
}
"""The class of each built-in adapter."""
HOSTS = ("molt",)
"""Built-in adapters that `run` always carries, and whose first seam is the forward of an Actor in a file that `patch` takes."""


def installed(named: str) -> Adapter:
    """Import a built-in adapter, or an installed package's, by name. Raises Unsupported for any other name."""
    place = BUILT_IN.get(named) or places().get(named)
    if place is None:
        hint = "run `actordbg adapters` to list them, or pass `run --adapter` a module:Class"
        raise Unsupported(f"no adapter {named:.80} is installed here", hint=hint)
    return _imported(place)


def of_user(named: str) -> Adapter:
    """Import an adapter by name or as `module:Class`. Raises Unsupported. Never pass a name from a store."""
    return _imported(named) if ":" in named else installed(named)


def _imported(place: str) -> Adapter:
    try:
        imported = resolve_name(place)
    except (Exception, SystemExit) as error:  # the user's module, which may fail in any way, or be a script
        raise Unsupported(f"adapter {place} cannot be imported: {type(error).__name__}: {error}", hint=_HINT) from error
    lacks = [part for part in ("name", "package", "tried", "seams") if not hasattr(imported, part)]
    if lacks:
        raise Unsupported(f"adapter {place} has no {', '.join(lacks)}", hint=_HINT)
    for part in ("tried", "seams"):
        if not isinstance(getattr(imported, part), tuple | list):
            what = f"its {part} is not a tuple: a tuple of one item ends in a comma, (item,)"
            raise Unsupported(f"adapter {place}: {what}", hint=_HINT)
    if not imported.seams or not all(isinstance(seam, Seam) for seam in imported.seams):
        raise Unsupported(f"adapter {place}: its seams are not one or more of Seam", hint=_HINT)
    adapter: Adapter = imported
    return adapter


_HINT = "an adapter is a class with name, package, tried and seams: see docs/how-to/other-trainers.md"


def places() -> dict[str, str]:
    """Return the class of each adapter by name: built-in ones take precedence over those of installed packages."""
    from importlib.metadata import entry_points  # it imports the parsers of e-mail

    return {**{entry.name: entry.value for entry in entry_points(group=GROUP)}, **BUILT_IN}


def callable_again(adapter: str) -> list[Seam]:
    """Return the functions that an installed adapter can repeat; empty if it is not installed."""
    try:
        return [seam for seam in installed(adapter).seams if seam.again is not None]
    except Unsupported:
        return []


def shards(adapter: str) -> bool:
    """Return whether an installed adapter's functions can be repeated around a model that FSDP2 shards."""
    return any(seam.shards for seam in callable_again(adapter))


def cannot_import(where: str, why: object) -> EnvironmentProblem:
    """Return the error for a trainer's function that cannot be imported."""
    return EnvironmentProblem(
        f"{where} cannot be imported: {why}; --through trainer needs the trainer installed, --through rows does not",
        hint="pass --through rows",
    )


def absent_trainer(adapter: str) -> EnvironmentProblem | None:
    """Return the error that repeating a call would raise without the adapter's trainer; None if it is there. Imports no trainer.

    Always None for adapters that are not built in: what their `again` imports is unknown.
    """
    from actordbg.base.imports import is_there  # not loaded in training

    again = callable_again(adapter) if adapter in BUILT_IN else []
    packages = [seam.module.partition(".")[0] for seam in again]
    if not again or any(is_there(package) for package in packages):
        return None
    return cannot_import(again[0].where, f"No module named {packages[0]!r}")


def distribution_of(named: str) -> str:
    """Return the package that provides an adapter: "actordbg" for a built-in one, the top module for a `module:Class`."""
    if named in BUILT_IN:
        return "actordbg"
    from importlib.metadata import entry_points

    distribution = next((entry.dist for entry in entry_points(group=GROUP, name=named)), None)
    return distribution.name if distribution is not None else named.partition(":")[0].partition(".")[0]


def carried_form(named: Sequence[str]) -> str:
    """Encode adapters for the environment of a job: "name=module,module;name=module". Raises like `of_user`."""
    if named:
        look_here()
    parts = {name: list(dict.fromkeys(seam.module for seam in of_user(name).seams)) for name in (*named, *HOSTS)}
    return ";".join(f"{name}={','.join(modules)}" for name, modules in parts.items())


def host_of(path: Path) -> str:
    """Return which of `HOSTS` has its Actor in this file; "" if none."""
    return next((name for name in HOSTS if path.with_suffix("").parts[-3:] == (*actor_module(name).split("."),)), "")


def actor_module(host: str) -> str:
    """Return the module that holds the Actor of one of `HOSTS`."""
    return installed(host).seams[0].module


def look_here() -> None:
    """Make modules in the working directory importable, for a `module:Class` beside the user's script."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
