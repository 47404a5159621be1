"""Options of a command for settings, built from the table of settings (`actordbg.config.replay_config`).

A command takes them all in one parameter, and `from_signature` puts the options in its place::

    def replay(ctx: typer.Context, *, where: Where = None, settings: Given) -> None: ...

`settings` then holds the given values, by the settings' names; the options that need no value (plain `--truth`) are in the
command's `bare_values`. For settings that are axes, a matrix takes comma-separated lists.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output, place_of
from actordbg.cli.options import Given, option, take_consent
from actordbg.config import consent, sources
from actordbg.config.replay_config import SETTINGS, TRAINING_AXES
from actordbg.config.setting import Setting

_ACTOR, _AXES = "Configuration", "Axes (comma-separated lists)"
_SHORT = "short_"
_TRUST, _PLUGIN = "trust_remote_code", "dist_plugin"
_CONFIG, _ACCELERATE = "config", "accelerate_config"


def bare_values(command: str) -> dict[str, str]:
    """Return the values of the command's settings that are given without one, by their options."""
    return {setting.flag: str(setting.bare) for setting in _settings_of(command) if setting.bare is not None}


def options_of_settings(command: str) -> Iterator[inspect.Parameter]:
    """Build the options of a command that takes settings."""
    text = "Run the model's own code. Command line only."
    yield option(_TRUST, bool, False, text, consent.FLAG, rank=30)
    text = "Import a module that registers a --dist-backend. Command line only."
    yield option(_PLUGIN, str | None, None, text, consent.PLUGIN, metavar="MODULE", rank=30)
    text = "Read settings and inputs from a TOML or YAML file (docs/reference/settings.md)."
    facts: dict[str, Any] = {"metavar": "FILE", "rank": 17, "is_eager": True, "callback": _config_read}
    yield option(_CONFIG, Path | None, None, text, **facts)
    text = "Settings from an `accelerate config` file; flags win."
    yield option(_ACCELERATE, str | None, None, text, metavar="FILE|default|JSON", rank=30)
    for setting in _settings_of(command):
        if _takes_list(setting, command):
            yield _axis(setting)
            continue
        switch, values = setting.kind is bool, setting.values
        named = f"{setting.flag}/--no-{setting.option}" if switch else setting.flag
        facts = {
            "metavar": setting.metavar or "|".join(map(str, values)) or None,
            "heading": _ACTOR,
            "rank": setting.rank,
        }
        yield option(setting.name, (str if setting.named else setting.kind) | None, None, setting.help, named, **facts)
        for name, value in setting.shorthands.items():
            text = f"Alias of {setting.flag} {value}."
            yield option(_SHORT + name.replace("-", "_"), bool | None, None, text, f"--{name}", hidden=True)


def _settings_of(command: str) -> list[Setting]:
    return [setting for setting in SETTINGS.values() if command in setting.commands]


def _takes_list(setting: Setting, command: str) -> bool:
    """Check whether the command takes a comma-separated list of values."""
    of_training = command == "train-check" and setting.name in TRAINING_AXES
    return setting.axis is not None and (command == "matrix" or of_training)


def _axis(setting: Setting) -> inspect.Parameter:
    """Build the option that takes a comma-separated list of a setting's values."""
    text, metavar = ", ".join(map(str, setting.values)) or "Counts", "LIST"
    if setting.kind is bool:
        metavar = "off,on"
        what = setting.help.partition(" (")[0].rstrip(".")
        text = f"{what}: on, off or both"
    text += f" ({setting.axis})." if setting.axis else "."
    facts: dict[str, Any] = {"metavar": metavar, "heading": _AXES, "rank": setting.rank}
    return option(setting.name, str | None, None, text, setting.flag, **facts)


def merged_settings(command: str, **options: Any) -> Given:
    """Merge the settings given by options, those of a --config file, which are weaker and noted, and those implied by
    a launcher around this command, whose other ranks exit.

    Raises UsageError if two options conflict.
    """
    from actordbg.api.desk import launched

    take_consent(bool(options.get(_TRUST)))
    consent.use_plugin(options.get(_PLUGIN))
    given = {name: value for name, value in options.items() if value is not None and name in SETTINGS}
    for name, setting in SETTINGS.items():
        if setting.named and name in given:  # numbers that may have names ("all")
            given[name] = _parsed(setting, given[name], setting.flag)
        for short, value in setting.shorthands.items():
            if options.get(_SHORT + short.replace("-", "_")):
                _add(given, setting, value, f"--{short}")
    known = _settings_of(command)
    lists = [setting.name for setting in known if _takes_list(setting, command)]
    if (config := options.get(_ACCELERATE)) is not None:
        from actordbg.config.accelerate_file import with_accelerate

        given = with_accelerate(given, config, lists, output.note)
    if (file := options.get(_CONFIG)) is not None:
        added = sources.beneath(given, sources.settings_in(file.table, f"{file.name}: [replay]", known, lists))
        taken = [f"{SETTINGS[name].option} {SETTINGS[name].typed(value)}" for name, value in added.items()]
        taken = taken or ["nothing beyond the given flags"]
        output.note(f"from {file.name}: {', '.join(taken)}")
        given = added | given
    flags = launched(given, os.environ)
    if flags is None:
        raise typer.Exit
    return flags


def _parsed(setting: Setting, text: str, typed: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError:
        raise UsageError(f"{typed} {text:.60} is not known", hint=f"{setting.flag}: {setting.hint}") from None


def _add(given: dict[str, Any], setting: Setting, value: Any, typed: str) -> None:
    if given.setdefault(setting.name, value) != value:
        text = f"{typed} and {setting.flag} {setting.typed(given[setting.name])} conflict"
        raise UsageError(text, hint="use only one")


class ConfigFile(NamedTuple):
    """A --config file's name and its [replay] table."""

    name: str
    table: dict[str, Any]


def _config_read(ctx: typer.Context, file: Path | None) -> ConfigFile | None:
    """Read the --config file, and make its [inputs] the defaults of the command's options (callback of --config)."""
    if file is None or ctx.resilient_parsing:
        return None
    tables = sources.read_config(file)
    known = {
        name.removeprefix("--"): mine for mine in ctx.command.params for name in mine.opts if place_of(mine).heading == "Inputs"
    }
    for key, value in tables.get("inputs", {}).items():
        if (selected := known.get(key.replace("_", "-"))) is None:
            raise UsageError(f"{file.name}: [inputs] has an unknown key {key!r}", hint=sources.near(key, known))
        ctx.default_map = {**(ctx.default_map or {}), selected.name: value}
    return ConfigFile(file.name, tables.get("replay", {}))
