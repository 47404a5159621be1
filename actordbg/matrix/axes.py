"""The combinations of a matrix: values for each setting, their product, and what of it is the same thing twice. Pure.

    axes = parse_axes({"attn": "sdpa,eager", "packing": "both"})
    [cell.name for cell in combinations(ReplayConfig(), axes)]
    # ['sdpa, not packed', 'sdpa, packed', 'eager, not packed', 'eager, packed']

Without an option that lists several values the three axes that people ask about are taken as far as they were not given:
flash_attention_2 and sdpa, not compiled and compiled, not packed and packed: eight combinations.

An axis that means nothing to a backend collapses there: a ZeRO stage is DeepSpeed's, DeepCompile too, tensor parallelism and
rings need a backend whose processes compute together, a compile backend needs something to compile. Combinations that then
are equal are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.config.choices import ATTENTIONS, BACKENDS, COMPILE_BACKENDS, DTYPES
from actordbg.formats.replay_record import ReplayConfig

Axes = dict[str, list[Any]]
"""Values by name of the setting, in the order of AXES."""

_SWITCH = {"on": True, "off": False, "yes": True, "no": False, "true": True, "false": False}
_BOTH = "both"


@dataclass(frozen=True)
class Axis:
    """One setting that a matrix can vary. `allowed`: its values, or () for numbers from `least` on, or on and off."""

    name: str
    allowed: tuple[str, ...] = ()
    switch: bool = False
    least: int = 1

    @property
    def option(self) -> str:
        """As on the command line."""
        return "--" + self.name.replace("_", "-")

    def values(self, text: str) -> list[Any]:
        """The values of a comma list, each once, in its order; UsageError for one that the setting does not have."""
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if self.switch:
            parts = [one for part in parts for one in (("off", "on") if part.lower() == _BOTH else (part.lower(),))]
        if not parts:
            raise UsageError(f"{self.option} lists no value", hint=f"for example {self.option} {self._example()}")
        return list(dict.fromkeys(self._value(part) for part in parts))

    def _value(self, text: str) -> Any:
        if self.switch and text in _SWITCH:
            return _SWITCH[text]
        if text in self.allowed:
            return text
        if not self.switch and not self.allowed and text.isdecimal() and int(text) >= self.least:
            return int(text)
        raise UsageError(f"{self.option} {text} is not known", hint=f"for example {self.option} {self._example()}")

    def _example(self) -> str:
        if self.switch:
            return "off,on"
        return ",".join(self.allowed) or f"{self.least},{self.least + 1}"


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("backend", BACKENDS),
        Axis("zero_stage", least=0),
        Axis("nproc"),
        Axis("tp"),
        Axis("ring"),
        Axis("dtype", tuple(DTYPES)),
        Axis("attn", ATTENTIONS),
        Axis("compile", switch=True),
        Axis("compile_backend", COMPILE_BACKENDS),
        Axis("deepcompile", switch=True),
        Axis("packing", switch=True),
    )
}
"""What varies slowest first: that is the order of the combinations."""

DEFAULT: Axes = {"attn": ["flash_attention_2", "sdpa"], "compile": [False, True], "packing": [False, True]}


@dataclass(frozen=True)
class Combination:
    """One cell before it ran. `settings`: by axis, None where the axis means nothing here. `name`: the settings in words."""

    name: str
    settings: dict[str, Any]
    config: ReplayConfig


def parse_axes(given: Mapping[str, str | None]) -> Axes:
    """The axes of the options that were given (None: not given); the default ones where no option lists several values."""
    axes = {name: axis.values(text) for name, axis in AXES.items() if (text := given.get(name)) is not None}
    if all(len(values) == 1 for values in axes.values()):
        axes |= {name: values for name, values in DEFAULT.items() if name not in axes}
    return {name: axes[name] for name in AXES if name in axes}


def combinations(base: ReplayConfig, axes: Axes) -> list[Combination]:
    """The product of the axes over `base`, in its order, without what is the same thing twice.

    UsageError for an axis that means nothing to any of them: its table would answer another question than the one asked.
    """
    found: dict[ReplayConfig, Combination] = {}
    for values in product(*axes.values()):
        asked = dict(zip(axes, values, strict=True))
        meant = _collapse(base, asked)
        settings = {name: value if _applies(name, meant) else None for name, value in asked.items()}
        found.setdefault(meant, Combination(name_of(settings, axes), settings, meant))
    _require_a_use(axes, found.values())
    return list(found.values())


def name_of(settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> str:
    """The settings that tell this combination from the others, in words: short, since a table has 24 columns for them.

    A group of one rank is none, and a ZeRO stage says that it is DeepSpeed's.
    """
    told = {name: value for name, value in settings.items() if value is not None and len(axes.get(name, ())) > 1}
    brief = {name: value for name, value in told.items() if not (name in ("tp", "ring") and value == 1)}
    if "zero_stage" in brief:
        brief.pop("backend", None)
    return ", ".join(words(name, value) for name, value in (brief or settings).items() if value is not None)


def words(name: str, value: Any) -> str:
    """One setting in a word or two: "ZeRO 3", "packed", "not compiled"."""
    if name in _SWITCHED:
        return _SWITCHED[name][bool(value)]
    shape = _COUNTED.get(name)
    return shape.format(value) if shape else _SHORT.get(value, str(value))


_SWITCHED = {
    "compile": ("not compiled", "compiled"),
    "packing": ("not packed", "packed"),
    "deepcompile": ("no DeepCompile", "DeepCompile"),
}
_COUNTED = {"zero_stage": "ZeRO {}", "nproc": "{} proc", "tp": "tp {}", "ring": "ring {}"}
_SHORT = {"flash_attention_2": "flash"}


def _collapse(base: ReplayConfig, asked: Mapping[str, Any]) -> ReplayConfig:
    """The configuration that was asked for, without what its backend takes no notice of."""
    config = replace(base, **asked)
    idle: dict[str, Any] = {name: value for name, value in _NOTHING.items() if not _applies(name, config)}
    config = replace(config, **idle)
    if "nproc" not in asked and config.nproc < config.tp * config.ring:
        config = replace(config, nproc=config.tp * config.ring)
    return config


_NOTHING = {"zero_stage": 0, "deepcompile": False, "tp": 1, "ring": 1, "compile_backend": None}
"""What an axis collapses to where it does not apply."""


_NEEDS = {
    "zero_stage": "--backend deepspeed",
    "deepcompile": "--backend deepspeed",
    "tp": "--backend fsdp2",
    "ring": "--backend fsdp2, or deepspeed",
    "compile_backend": "--compile on, or off,on",
}
"""What has to be among the settings for an axis to mean anything."""


def _require_a_use(axes: Axes, found: Iterable[Combination]) -> None:
    used = {name for one in found for name, value in one.settings.items() if value is not None}
    for name, values in axes.items():
        if name not in used and values != [_NOTHING[name]]:
            option, listed = AXES[name].option, ",".join(_typed(value) for value in values)
            raise UsageError(
                f"{option} {listed} means nothing to any of these cells",
                hint=f"add {_NEEDS[name]}; or leave {option} out",
            )


def _typed(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _applies(name: str, config: ReplayConfig) -> bool:
    """Whether the setting means anything under this configuration."""
    if name in ("zero_stage", "deepcompile"):
        return config.backend == "deepspeed"
    if name in ("tp", "ring"):
        return config.backend != "plain"
    return name != "compile_backend" or config.compile
