"""Options of a command for settings, built from the table of settings (`actordbg.config.replay_config`).

A command takes them all in one parameter, `settings`, and the decorator puts the options in its place::

    @takes_settings("replay")
    def replay(ctx: typer.Context, where: Where = None, settings: Given = NONE) -> None: ...

`settings` then holds the given values, by the settings' names; the options that need no value (plain `--truth`) are in the
command's `bare_values`. For settings that are axes, a matrix takes comma-separated lists.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import (
    DistPlugin,
    TrustRemoteCode,
    of_values,
    option,
    parameter,
    take_consent,
    takes_groups,
    takes_options,
)
from actordbg.config import consent
from actordbg.config.replay_config import ANY_WIDER, SETTINGS, TRUTHS
from actordbg.config.setting import Setting

Given = Mapping[str, Any]
"""The settings that were given on the command line, by name."""
NONE: Given = MappingProxyType({})
TruthDtype = Annotated[
    str | None, typer.Option("--truth", metavar="fp32|fp64", help="Dtype of the truth (default: fp64 for fp32, else fp32).")
]
_ACTOR, _AXES = "Configuration", "Axes (comma-separated lists)"
TRAINING_AXES = ("backend", "zero_stage", "tp", "ring")
"""The settings for which `train-check` takes lists."""
_SHORT = "short_"
_TRUST, _PLUGIN = "trust_remote_code", "dist_plugin"


def takes_settings(command: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command: replace its parameter `settings` by the settings of `command`. Also applies `takes_groups`."""
    options = list(_options(command))
    mine = [setting for setting in SETTINGS.values() if setting.bare is not None and command in setting.commands]
    bare = {f"--{name}": str(setting.bare) for setting in mine for name in (setting.option, setting.old_option) if name}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        called = takes_options("settings", options, merged_settings)(takes_groups(function))
        called.bare_values = bare  # type: ignore[attr-defined]
        return called

    return decorate


def truth_dtype(given: str | None) -> str:
    """Return the dtype of the truth, or ANY_WIDER. Raises UsageError if a truth cannot have this dtype."""
    if given not in (None, *TRUTHS):
        raise UsageError(f"--truth cannot be {given}", hint=f"one of: {', '.join(TRUTHS)}")
    return given or ANY_WIDER


def _options(command: str) -> Iterator[inspect.Parameter]:
    yield parameter(_TRUST, TrustRemoteCode, False)
    yield parameter(_PLUGIN, DistPlugin)
    for setting in SETTINGS.values():
        if command not in setting.commands:
            continue
        of_training = command == "train-check" and setting.name in TRAINING_AXES
        if setting.axis is not None and (command in ("matrix", "families") or of_training):
            yield _axis(setting)
            continue
        switch, values = setting.kind is bool, setting.values
        named = f"{setting.flag}/--no-{setting.option}" if switch else setting.flag
        facts = {"metavar": setting.metavar, "rich_help_panel": _ACTOR, "autocompletion": of_values(values) if values else None}
        yield parameter(setting.name, (str if setting.named else setting.kind) | None, option(None, setting.help, named, **facts))
        if setting.shorthand:
            name, value = setting.shorthand
            short = option(None, f"Alias of {setting.flag} {value}.", f"--{name}", rich_help_panel=_ACTOR)
            yield parameter(_SHORT + setting.name, bool | None, short)


def _axis(setting: Setting) -> inspect.Parameter:
    """Build the option that takes a comma-separated list of a setting's values."""
    assert setting.axis is not None
    text, metavar, values = f"{', '.join(map(str, setting.values)) or 'Counts'}", "LIST", setting.values
    if setting.kind is bool:
        values, metavar = ("on", "off", "both"), "off,on"
        text = f"{setting.help.partition(' (')[0].rstrip('.')}: on, off or both"
    text += f" ({setting.axis.note})." if setting.axis.note else "."
    facts = {"metavar": metavar, "rich_help_panel": _AXES, "autocompletion": of_values(values)}
    return parameter(setting.name, str | None, option(None, text, setting.flag, **facts))


def merged_settings(**options: Any) -> Given:
    """Merge the given settings and their shorthands. Raises UsageError if two conflict."""
    take_consent(bool(options.get(_TRUST)))
    consent.use_plugin(options.get(_PLUGIN))
    given = {name: value for name, value in options.items() if value is not None and name in SETTINGS}
    for name, setting in SETTINGS.items():
        if setting.named and name in given:  # numbers that may have names ("all")
            try:
                given[name] = setting.parse(given[name])
            except ValueError:
                hint = f"{setting.flag}: {setting.hint}"
                raise UsageError(f"{setting.flag} {given[name]:.60} is not known", hint=hint) from None
        if setting.shorthand is not None and options.get(_SHORT + name):
            short, value = setting.shorthand
            if given.setdefault(name, value) != value:
                text = f"--{short} and {setting.flag} {given[name]} conflict"
                raise UsageError(text, hint="use only one")
    return given
