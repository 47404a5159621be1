"""A command out of a function: its options are the function's parameters, their help is the function's docstring.

    def create(ctx: typer.Context, *, count: Annotated[int, Option("-n", min=1)] = 1, run: str | None = None) -> None:
        '''Create random inputs of given shapes.

        Args:
            count: Calls per rank.
            run (NAME): Run name of the dumps.
        '''

A keyword-only parameter is an option. Another one is an argument, unless its mark has a name. The word in brackets stands for
the value in the help. A dataclass stands for options for its fields: the function gets an instance. `settings` stands for the
command's settings (`setting_options`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import typer

from actordbg.base.option import Option
from actordbg.cli import HelpPlace, output
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
            from actordbg.cli.setting_options import bare_values, merged_settings, options_of_settings

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
