"""What was typed becomes a value without pydantic, where nothing about it is in question.

Recent releases of typer convert every value of a command line with pydantic, that of an option which nobody typed too, and
importing pydantic takes longer than importing typer. Nearly all values are clear: nothing, a text for a text, digits within
their limits, one of the listed words. Those are taken here as typer takes them. Typer converts or refuses all others.

Earlier releases have no `type_descriptor` and no pydantic: their parameters stay as they are.

Example: `quicken(command.get_params(ctx))`
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

_UNCLEAR: Any = object()
"""Stands for a value that typer has to look at."""
_WHOLE = re.compile(r"-?[0-9]{1,15}\Z", re.ASCII)
_REAL = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?\Z", re.ASCII)
_ASKING = ("exists", "writable", "resolve_path", "allow_dash", "path_type", "parser")
"""Facts of a parameter under which a text is more than a text."""


def quicken(parameters: Iterable[Any]) -> None:
    """Let these parameters of a command take their clear values themselves."""
    for one in parameters:
        if getattr(one, "type_descriptor", None) is not None and "process_value" not in vars(one):
            one.process_value = functools.partial(_process, one, one.process_value)


def _process(parameter: Any, usual: Callable[..., Any], ctx: Any, value: Any) -> Any:
    taken = plain_value(parameter, value)
    if taken is _UNCLEAR or (parameter.required and not taken):
        return usual(ctx, value)
    return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)


def plain_value(parameter: Any, value: Any) -> Any:
    """What typer makes of `value` for this parameter, or `_UNCLEAR`."""
    several = parameter.multiple or parameter.nargs == -1
    if value is None:
        return () if several else None
    kind, facts = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
    if any(getattr(facts, name, True) for name in _ASKING):
        return _UNCLEAR
    if not several:
        return _one(kind, facts, value)
    if get_origin(kind) is not list or not isinstance(value, list | tuple):
        return _UNCLEAR
    taken = [_one(get_args(kind)[0], facts, item) for item in value]
    return _UNCLEAR if any(item is _UNCLEAR for item in taken) else taken


def _one(kind: Any, facts: Any, value: Any) -> Any:
    if kind is int or kind is float:
        return _number(kind, facts, value)
    if kind is bool:
        return value if isinstance(value, bool) else _UNCLEAR
    if not isinstance(value, str):
        return _UNCLEAR
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _UNCLEAR
    if kind is Path:
        readable = facts.file_okay and facts.dir_okay and (not os.path.exists(value) or os.access(value, os.R_OK))
        return Path(value) if readable else _UNCLEAR
    return value if kind is str else _UNCLEAR


def _number(kind: Any, facts: Any, value: Any) -> Any:
    written = isinstance(value, str) and (_WHOLE if kind is int else _REAL).match(value)
    if not written and type(value) is not kind:
        return _UNCLEAR
    number, least, most = kind(value), facts.min, facts.max
    fits = (least is None or number >= least) and (most is None or number <= most)
    return number if fits else _UNCLEAR
