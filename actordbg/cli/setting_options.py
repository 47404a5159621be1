"""The options of a command that are settings, made from the table (`actordbg.config.replay_config`).

A command takes them all in one parameter, `settings`, and the decorator puts the options in its place::

    @takes_settings("replay")
    def replay(ctx: typer.Context, where: Where = None, settings: Given = NONE, quiet: Quiet = False) -> None: ...

`settings` then holds what was given, by the settings' names; the options that need no value (`--truth` alone) are in the
command's `bare_values`. A matrix takes comma lists where a setting is an axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.completion import of_values
from actordbg.cli.options import AccelerateConfig, DistPlugin, TrustRemoteCode, parameter, take_consent, takes_options
from actordbg.config import dist_plugin
from actordbg.config.accelerate_file import read_accelerate
from actordbg.config.replay_config import SETTINGS, TRUTHS
from actordbg.config.setting import Setting

Given = Mapping[str, Any]
"""The settings that were given on the command line, by name."""
NONE: Given = MappingProxyType({})
TruthDtype = Annotated[
    str | None, typer.Option("--truth", metavar="fp32|fp64", help="What the truth is computed in (default: fp32).")
]
_ACTOR, _AXES = "The actor", "The axes: comma lists"
TRAINING_AXES = ("backend", "zero_stage", "tp", "ring")
"""The settings of which `train-check` takes lists."""
_SHORT = "short_"
_TRUST, _PLUGIN, _ACCELERATE = "trust_remote_code", "dist_plugin", "accelerate_config"


def takes_settings(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the command's parameter `settings` becomes the options of the settings that `command` has."""
    options = list(_options(command))
    mine = [one for one in SETTINGS.values() if one.bare is not None and command in one.commands]
    bare = {f"--{name}": str(one.bare) for one in mine for name in (one.option, one.old_option) if name}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        called = takes_options("settings", options, _merged)(function)
        called.bare_values = bare  # type: ignore[attr-defined]
        return called

    return decorate


def truth_dtype(given: str | None) -> str:
    """What the truth is computed in; UsageError for a dtype that makes no truth."""
    dtype = given or str(SETTINGS["truth"].bare)
    if dtype not in TRUTHS:
        raise UsageError(f"--truth {dtype} is no truth", hint=f"one of: {', '.join(TRUTHS)}")
    return dtype


def _options(command: str) -> Iterator[inspect.Parameter]:
    yield parameter(_TRUST, TrustRemoteCode, False)
    yield parameter(_PLUGIN, DistPlugin, None)
    yield parameter(_ACCELERATE, AccelerateConfig, None)
    for one in SETTINGS.values():
        if command not in one.commands:
            continue
        of_training = command == "train-check" and one.name in TRAINING_AXES
        axis = one.axis is not None and (command in ("matrix", "families") or of_training)
        yield _given(one.name, str if axis or one.named else one.kind, _axis_option(one) if axis else _option(one))
        if one.shorthand and not axis:
            name, value = one.shorthand
            short = typer.Option(f"--{name}", help=f"The same as {one.flag} {value}.", rich_help_panel=_ACTOR)
            yield _given(_SHORT + one.name, bool, short)


def _given(name: str, kind: Any, declared: Any) -> inspect.Parameter:
    return parameter(name, Annotated[kind | None, declared])


def _option(one: Setting) -> Any:
    named = f"{one.flag}/--no-{one.option}" if one.kind is bool else one.flag
    offered = of_values(one.values) if one.values else None
    return typer.Option(named, help=one.help, metavar=one.metavar, rich_help_panel=_ACTOR, autocompletion=offered)


def _axis_option(one: Setting) -> Any:
    assert one.axis is not None
    of = "on, off or both" if one.kind is bool else ", ".join(map(str, one.values)) or "numbers"
    text = f"{one.help.partition(' (')[0].rstrip('.')}: {of}" if one.kind is bool else f"Of {of}"
    note = f" ({one.axis.note})" if one.axis.note else ""
    metavar = "off,on" if one.kind is bool else "LIST"
    offered = of_values(one.values or (("on", "off", "both") if one.kind is bool else ()))
    return typer.Option(one.flag, help=f"{text}{note}.", metavar=metavar, rich_help_panel=_AXES, autocompletion=offered)


def _merged(options: Mapping[str, Any]) -> Given:
    """What was given, with shorthands as what they stand for; UsageError where two contradict each other."""
    take_consent(bool(options.get(_TRUST)))
    dist_plugin.give(options.get(_PLUGIN))
    given = {name: value for name, value in options.items() if value is not None and name in SETTINGS}
    for one in SETTINGS.values():
        if one.named and one.name in given:
            given[one.name] = _number(one, given[one.name])
        if one.shorthand is None or not options.get(_SHORT + one.name):
            continue
        flag, other = f"--{one.shorthand[0]}", one.shorthand[1]
        if given.get(one.name, other) != other:
            raise UsageError(f"{flag} and {one.flag} {given[one.name]} contradict each other", hint="give one of them")
        given[one.name] = other
    return _of_accelerate(options.get(_ACCELERATE), given)


def _of_accelerate(named: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and below it what the file comes to; what came of the file is said."""
    if named is None:
        return dict(given)
    found, idle = read_accelerate(named)
    if "backend" in given:  # what belongs to another backend means nothing
        found = {name: value for name, value in found.items() if not SETTINGS[name].backends}
    told = ", ".join(
        f"{SETTINGS[name].option} {SETTINGS[name].typed(value)}" for name, value in found.items() if name not in given
    )
    output.note(f"from {named}: {told or 'nothing that no flag gave'}")
    if idle:
        output.note(f"not honoured of {named}: {', '.join(idle)}")
    return found | dict(given)


def _number(one: Setting, text: str) -> Any:
    """The value of a setting whose numbers may have names."""
    try:
        return one.parse(text)
    except ValueError:
        raise UsageError(f"{one.flag} {text:.60} is not known", hint=f"{one.flag}: {one.hint}") from None
