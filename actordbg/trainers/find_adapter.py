"""Which adapters there are: ours by name, others' by entry point (group `actordbg.adapters`), anybody's as `module:Class`.

Two doors: `installed` for a name that a store holds, which names no module; `of_user` for a name that the user typed, or put into
the environment of a job.

Loaded in training processes: the standard library only, and of the adapters the one that is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pkgutil import resolve_name

from actordbg.base.fault import EnvironmentProblem, Unsupported
from actordbg.trainers.seam import Adapter, Seam

GROUP = "actordbg.adapters"
BUILT_IN = {
    "plain": "actordbg.trainers.plain_adapter:Plain",
    "skyrl": "actordbg.trainers.skyrl_adapter:SkyRl",
    "trl": "actordbg.trainers.trl_adapter:Trl",
    "verl": "actordbg.trainers.verl_adapter:Verl",
}
"""Where each of our adapters is."""


def installed(named: str) -> Adapter:
    """Import the adapter of this name: ours, or one that an installed package announces. Raises Unsupported for any other."""
    place = places().get(named)
    if place is None:
        hint = "`actordbg adapters` lists them; `run --adapter` takes module:Class, too"
        raise Unsupported(f"no adapter {named:.80} is installed here", hint=hint)
    return _imported(place)


def of_user(named: str) -> Adapter:
    """Import the adapter of this name, or the class `module:Class`. Raises Unsupported. Never for a name out of a store."""
    return _imported(named) if ":" in named else installed(named)


def _imported(place: str) -> Adapter:
    try:
        found = resolve_name(place)
    except (Exception, SystemExit) as error:  # somebody's module, which may fail in any way, or be a script
        raise Unsupported(f"adapter {place} cannot be imported: {type(error).__name__}: {error}", hint=_HINT) from error
    lacks = [part for part in ("name", "package", "tried", "seams") if not hasattr(found, part)]
    if lacks:
        raise Unsupported(f"adapter {place} has no {', '.join(lacks)}", hint=_HINT)
    odd = [part for part in ("tried", "seams") if not isinstance(getattr(found, part), tuple | list)]
    if odd or not found.seams or not all(isinstance(seam, Seam) for seam in found.seams):
        raise Unsupported(f"adapter {place}: its {odd[0] if odd else 'seams'} {_TUPLES[not odd]}", hint=_HINT)
    adapter: Adapter = found
    return adapter


_TUPLES = ("is not a tuple: one of a single thing ends in a comma, (one,)", "are not one or more of Seam")


_HINT = "an adapter is a class with name, package, tried and seams: see docs/how-to/other-trainers.md"


def places() -> dict[str, str]:
    """Where each adapter is, by name: ours, then those that installed packages announce."""
    return {**{one.name: one.value for one in entry_points(group=GROUP)}, **BUILT_IN}


def callable_again(adapter: str) -> list[Seam]:
    """The functions that this installed adapter can call again; none where it is not installed."""
    try:
        return [seam for seam in installed(adapter).seams if seam.again is not None]
    except Unsupported:
        return []


def cannot_import(where: str, why: object) -> EnvironmentProblem:
    """What to raise where a trainer's function is asked for and cannot be imported."""
    return EnvironmentProblem(
        f"{where} cannot be imported: {why}; --through trainer needs the trainer installed, --through rows does not",
        hint="--through rows",
    )


def absent_trainer(adapter: str) -> EnvironmentProblem | None:
    """What a call of its trainer's functions would raise where none of them is installed; nothing of the trainer is imported.

    None of an adapter that is not ours: what its `again` imports is its own business.
    """
    from actordbg.base.imports import is_there  # not for a training

    again = callable_again(adapter) if adapter in BUILT_IN else []
    packages = [seam.module.partition(".")[0] for seam in again]
    if not again or any(is_there(package) for package in packages):
        return None
    return cannot_import(again[0].where, f"No module named {packages[0]!r}")


def distribution_of(named: str) -> str:
    """The package that an adapter comes in, ours for a built-in one; of a `module:Class` the module."""
    if named in BUILT_IN:
        return "actordbg"
    found = next((one.dist for one in entry_points(group=GROUP, name=named)), None)
    return found.name if found is not None else named.partition(":")[0].partition(".")[0]


def carried_form(named: Sequence[str]) -> str:
    """These adapters as the environment of a job carries them: "name=module,module;name=module". Raises as `of_user` does."""
    if named:
        look_here()
    parts = {one: list(dict.fromkeys(seam.module for seam in of_user(one).seams)) for one in named}
    return ";".join(f"{one}={','.join(modules)}" for one, modules in parts.items())


def look_here() -> None:
    """Find a module:Class that lies beside the user's script, too."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
