"""Settings: everything that the product knows about a setting, declared beside the field that holds its value.

A configuration is a dataclass, and each of its fields is a setting (`actordbg.config.replay_config`)::

    tp: int = setting(1, help="Tensor parallelism over N processes.", column="ranks of a group", least=1, words="tp {}")

`table_of(ReplayConfig)` then gives a `Setting` for each field. Options, `actordbg.toml`, environment variables, validation,
labels, differences, repeat commands, columns and reference pages are all derived from it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.base.units import plural

ENVIRONMENT = "ACTORDBG_REPLAY_"
"""Prefix of the settings' environment variables."""
COMMANDS = ("replay", "check", "locate", "noise", "matrix", "actor init", "train-check", "step")
"""The commands that take settings."""
_SWITCH = {"on": True, "off": False, "yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class Setting:
    """A setting of a replay.

    kind: bool, int, float or str. default: None means "as the dump's record has it, else what suits the machine".
    stored: its key in files and its column in the catalog. option: its name on the command line, without dashes.
    rank: where `--help` shows it, the most used settings first; it has room for fifteen options.
    bare: the value of an option that is typed without a value. shorthands: options
    that stand for a value.
    named: numbers that have a name, such as all.
    values: all valid values; least: the smallest number; above: what the number must exceed.
    words: its words in a label: a format of the value with its noun in the singular, the words for off and on, or by value.
    brief: like words, but shorter.
    unset: the words for None. quiet: values that a label leaves out, beside None.
    backends: the backends that have it, () for all. needs: the options that it needs. idle: its value without them.
    commands: the commands with its option; axis: the note of `matrix`, which varies it, on its values; axis_values: those
    if none are given. flag_only: it never comes from a file or a variable.
    numbers: it changes the results. cost: it changes time or memory. switchable: a loaded Actor can be switched to it.
    decides_truth: the truth depends on it. beside_truth: the values, beside the default, that do not
    contradict a truth; None: all.
    resolved: the name under which workers report its value, None if only the request counts.
    """

    name: str
    kind: type
    default: Any
    help: str
    column: str
    stored: str
    option: str
    metavar: str | None = None
    rank: int = 40
    bare: str | None = None
    shorthands: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    named: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: tuple[Any, ...] = ()
    least: int | None = None
    above: float | None = None
    words: str | tuple[str, str] | Mapping[str, str] | None = None
    brief: str | Mapping[Any, str] | None = None
    unset: str | None = None
    quiet: tuple[Any, ...] = ()
    backends: tuple[str, ...] = ()
    needs: str | None = None
    idle: Any = None
    commands: tuple[str, ...] = COMMANDS
    axis: str | None = None
    axis_values: tuple[Any, ...] = ()
    flag_only: bool = False
    numbers: bool = False
    cost: bool = False
    switchable: bool = False
    decides_truth: bool = False
    beside_truth: tuple[Any, ...] | None = None
    resolved: str | None = None

    @property
    def flag(self) -> str:
        """The option on the command line: "--zero-stage"."""
        return f"--{self.option}"

    @property
    def variable(self) -> str:
        """The environment variable: "ACTORDBG_REPLAY_ZERO_STAGE"."""
        return ENVIRONMENT + self.option.replace("-", "_").upper()

    @property
    def hint(self) -> str:
        """The valid values in words: "one of: 0, 1, 2, 3"."""
        if self.values:
            return f"one of: {', '.join(map(str, self.values))}"
        if self.kind is bool:
            return "on or off"
        if self.above is not None:
            return f"a number above {self.above:g}"
        names = "".join(f", or {name}" for name in self.named)
        return f"{self.least} or more{names}" if self.least is not None else f"a {_KINDS[self.kind]}"

    def parse(self, text: str) -> Any:
        """Parse a value; ValueError if it is invalid."""
        if self.kind is bool:
            if text.strip().lower() not in _SWITCH:
                raise ValueError(text)
            return _SWITCH[text.strip().lower()]
        value = self.named[text.strip()] if text.strip() in self.named else self.kind(text.strip())
        if not self.allows(value):
            raise ValueError(text)
        return value

    def allows(self, value: Any) -> bool:
        """Return whether the setting can have this value. None, for a setting that may be left open, is always allowed."""
        if value is None:
            return True
        if self.values and value not in self.values:
            return False
        if self.least is not None and value < self.least:
            return False
        return self.above is None or bool(value > self.above)

    def is_quiet(self, value: Any) -> bool:
        """Return whether a label leaves this value out."""
        return value is None or value in self.quiet

    def takes(self, value: Any) -> bool:
        """Return whether a value from a file has the setting's type. An integer counts as a float, but a bool not as a number."""
        return type(value) in ((int, float) if self.kind is float else (self.kind,))

    def list_of(self, text: str) -> list[Any]:
        """Parse a matrix's comma list into values, each once, in order; UsageError for an invalid value."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if self.kind is bool:
            parts = [item for part in parts for item in (("off", "on") if part.lower() == "both" else (part,))]
        example = f"for example {self.flag} {self.example}"
        if not parts:
            raise UsageError(f"{self.flag} lists no value", hint=example)
        values = []
        for part in parts:
            try:
                values.append(self.parse(part))
            except ValueError:
                raise UsageError(f"{self.flag} {part} is not known", hint=example) from None
        return list(dict.fromkeys(values))

    @property
    def example(self) -> str:
        """A comma list of its values."""
        if self.kind is bool:
            return "off,on"
        least = int(self.least or 0)
        return ",".join(map(str, self.values)) or f"{self.least},{least + 1}"

    def typed(self, value: Any) -> str:
        """Format a value as in a list or a variable: "on", "3"."""
        name = next((name for name, number in self.named.items() if number == value), str(value))
        return ("on" if value else "off") if isinstance(value, bool) else name

    def in_words(self, value: Any, *, brief: bool = False) -> str:
        """Describe a value in a word or two: "ZeRO 3", "packed", "not compiled". brief: for a table column of 24 characters."""
        if value is None:
            return self.unset or f"{self.plain_name} left open"
        if brief and isinstance(self.brief, Mapping):
            return self.brief.get(value, self.typed(value))
        shape = self.brief if brief and isinstance(self.brief, str) else self.words
        if isinstance(shape, tuple):
            return shape[bool(value)]
        if isinstance(shape, Mapping):
            return shape.get(value, str(value))
        before, place, noun = (shape or "").partition("{} ")
        if place and self.kind is int:
            return before + plural(value, noun)
        return shape.format(value) if shape else f"{self.plain_name} {self.typed(value)}"

    @property
    def plain_name(self) -> str:
        """The name in plain words: "compile backend"."""
        return self.option.replace("-", " ")

    def options(self, value: Any) -> list[str]:
        """Return the command-line words that set this value; [] for the default."""
        if value is None or value == self.default:
            return []
        if self.kind is bool:
            return [self.flag if value else f"--no-{self.option}"]
        return [self.flag, f"{value:g}" if isinstance(value, float) else self.typed(value)]


_KINDS = {str: "text", int: "whole number", float: "number"}


def setting(default: Any, **facts: Any) -> Any:
    """Make a dataclass field that is a setting: its default, and the facts that `Setting` names."""
    return dataclasses.field(default=default, metadata=facts)


def table_of(configuration: Any) -> dict[str, Setting]:
    """Return the settings of a configuration's dataclass by name, in the order of its fields."""
    hints, table = typing.get_type_hints(configuration), {}
    for field in dataclasses.fields(configuration):
        kind = next(member for member in typing.get_args(hints[field.name]) or (hints[field.name],) if member is not type(None))
        usual = {"stored": field.name, "option": field.name.replace("_", "-"), "resolved": field.name, "idle": field.default}
        table[field.name] = Setting(field.name, kind, field.default, **{**usual, **field.metadata})
    return table
