"""A command out of a function: its options are the function's parameters, their help is the function's docstring.

    def create(ctx: typer.Context, *, count: Annotated[int, Option("-n", min=1)] = 1, run: str | None = None) -> None:
        '''Create random inputs of given shapes.

        Args:
            count: Calls per rank.
            run (NAME): Run name of the dumps.
        '''

A keyword-only parameter is an option. Another one is an argument, unless its mark has a name. The word in brackets stands for
the value in the help. A dataclass stands for options for its fields: the function gets an instance. `settings` stands for the
command's settings: it has the given values, by the settings' names, and the options that need no value (plain `--truth`) are in
the command's `bare_values`. For settings that are axes, a matrix takes comma-separated lists.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import typer

from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.cli import HelpPlace, output, place_of
from actordbg.cli.options import (
    ConfirmOption,
    Given,
    TrustRemoteCode,
    Where,
    option,
    refuse_beside,
    take_consent,
    with_parameters,
)
from actordbg.cli.output import TokenizerFile
from actordbg.cli.replay_options import ChosenInputs, ComparisonLimits, EngineOptions
from actordbg.config import consent, sources
from actordbg.config.replay_config import SETTINGS, TRAINING_AXES
from actordbg.config.setting import Setting
from actordbg.config.training_options import TrainingOptions

_TOLD = re.compile(r"^    (\w+)(?: \((\S+)\))?: (.*(?:\n     .*)*)", re.MULTILINE)
Told = dict[str, dict[str, Any]]
"""The help of each parameter, and what stands for its value, as typer has them."""
_ANSWER: dict[str, Any] = {"CommandResult": object}
_OF_METHODS = {**_ANSWER, "Where": ChosenInputs, "Limits": ComparisonLimits, "Training": TrainingOptions}
"""What the types in the signatures of methods are here: those of answers are imported when they are called."""
_hints = partial(inspect.get_annotations, eval_str=True, locals=_ANSWER)
_NONE: Given = MappingProxyType({})
_UNMARKED, _USUAL = Option(), HelpPlace()


def told(docstring: str | None) -> tuple[str, Told]:
    """Split a docstring into its prose and what it says of each parameter."""
    prose, _, listed = inspect.cleandoc(docstring or "").partition("\n\nArgs:\n")
    found = _TOLD.findall(listed)
    return prose, {name: {"metavar": metavar or None, "help": " ".join(text.split())} for name, metavar, text in found}


def as_command(function: Callable[..., Any], settings_of: str) -> Callable[..., Any]:
    """Return the function as typer takes it. settings_of: the command whose settings its parameter `settings` stands for."""
    prose, texts = told(function.__doc__)
    hints = _hints(function)
    parameters: list[inspect.Parameter] = []
    gathered: dict[str, tuple[list[inspect.Parameter], Callable[..., Any]]] = {}

    def called(**given: Any) -> Any:
        for name, (group, gather) in gathered.items():
            given[name] = gather(**{mine.name: given.pop(mine.name) for mine in group})
        return function(**given)

    for mine in inspect.signature(function).parameters.values():
        kind = hints[mine.name]
        if kind is typer.Context:
            options = [mine.replace(annotation=kind)]
        elif mine.name == "settings":
            options = list(options_of_settings(settings_of))
            gathered[mine.name] = options, partial(merged_settings, settings_of)
            called.bare_values = bare_values(settings_of)  # type: ignore[attr-defined]
        elif dataclasses.is_dataclass(kind):
            options = _options_of_fields(kind)
            gathered[mine.name] = options, typing.cast(type, kind)
        else:
            options = [_declared(mine, kind, texts)]
        parameters += options
    return with_parameters(function, called, parameters, prose)


_SHARED = {"where": Where, "tokenizer": TokenizerFile, "trust_remote_code": TrustRemoteCode}
"""What some parameters of methods are on the command line."""


def of_method(method: Callable[..., Any], on_cluster: bool) -> Callable[..., Any]:
    """Return the function that calls a method of the opened store and returns its answer, for `as_command`.

    A method that loads models has --trust-remote-code and --yes; where it takes settings, the first is among them, and the second
    is for what a name stands for. on_cluster: it has the options of a cluster.
    """
    first, *own = inspect.signature(method).parameters.values()
    if first.name != "self":
        return method  # a static method, which needs no store
    hints = _hints(method, locals=_OF_METHODS)
    hints |= {name: kind for name, kind in _SHARED.items() if name in hints and hints[name] is not ChosenInputs}
    many = next((mine.name for mine in own if mine.kind is mine.VAR_POSITIONAL), "")

    def called(
        ctx: typer.Context, *, yes: bool = False, settings: Given = _NONE, machines: EngineOptions | None = None, **given: Any
    ) -> object:
        from actordbg.cli.terminal import opened

        if "trust_remote_code" in given:
            take_consent(given["trust_remote_code"])
        for word, may_stay in (("show", ()), ("resume", (EngineOptions,))):
            if given.get(word) is not None:
                refuse_beside(ctx, f"--{word} keeps the settings", word, "yes", "dry_run", groups=may_stay)
        if isinstance(chosen := given.get("where"), ChosenInputs):
            given["where"] = None if chosen == ChosenInputs() else chosen.selection
        if "charts" in hints:
            given["charts"] = output.wanted.whole or output.wanted.opened
        if (limits := given.pop("limits", None)) is not None:
            given |= vars(limits)
        return method(opened(ctx, yes=yes, machines=machines), *(given.pop(many, None) or ()), **given, **settings)

    usual = inspect.signature(called).parameters
    parameters = [usual["ctx"]]
    for mine in own:
        if mine.name == many:
            hints[many] = list[str] | None
            parameters.append(mine.replace(kind=mine.POSITIONAL_OR_KEYWORD, default=None))
        elif mine.name == "trust_remote_code" and "settings" in hints:
            parameters.append(usual["settings"])
        elif mine.name not in ("settings", "charts"):
            parameters.append(mine.replace(kind=mine.KEYWORD_ONLY) if mine.kind is mine.VAR_KEYWORD else mine)
    if "trust_remote_code" in hints and ("settings" not in hints or {"replay", "resume"} & hints.keys()):
        parameters.append(usual["yes"])
    if on_cluster:
        parameters.append(usual["machines"])
    own_types = {"ctx": typer.Context, "yes": ConfirmOption, "machines": EngineOptions}
    called.__doc__, called.__annotations__ = method.__doc__, hints | own_types
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _declared(mine: inspect.Parameter, kind: Any, texts: Told, place: HelpPlace = _USUAL) -> inspect.Parameter:
    """Build the option or argument for a parameter. place: where the help shows it, unless its mark says so."""
    (mark,) = getattr(kind, "__metadata__", (_UNMARKED,))
    facts = {"help": ""} | texts.get(mine.name, {}) | mark.facts
    default = ... if mine.default is mine.empty else mine.default
    plain = kind if mark is _UNMARKED else mark.kind or kind.__origin__
    if mine.kind is not mine.KEYWORD_ONLY and not mark.names:
        return inspect.Parameter(mine.name, mine.kind, default=typer.Argument(default, **facts), annotation=plain)
    facts |= {"heading": mark.heading or place.heading, "rank": place.rank if mark.rank is None else mark.rank}
    return option(mine.name, plain, default, facts.pop("help"), *mark.names, **facts)


def _options_of_fields(group: Any) -> list[inspect.Parameter]:
    """Build an option for each field of a dataclass, under its `panel` in the help if it has one."""
    texts, hints = told(group.__doc__)[1], _hints(group)
    place = HelpPlace(getattr(group, "panel", ""), getattr(group, "rank", _USUAL.rank))
    fields = (mine.replace(kind=mine.KEYWORD_ONLY) for mine in inspect.signature(group).parameters.values())
    return [_declared(mine, hints[mine.name], texts, place) for mine in fields]


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
