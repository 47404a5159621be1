"""The combinations of a matrix: values for each setting, their product, and what of it is the same thing twice.

    axes = parse_axes({"attn": "sdpa,eager", "packing": "both"})
    [cell.name for cell in combinations(ReplayConfig(), axes)]
    # ['sdpa, not packed', 'sdpa, packed', 'eager, not packed', 'eager, packed']

The table of settings says which are axes (`actordbg.config.replay_config.AXES`). Without an option that lists several values,
the three axes that people ask about vary as far as they were not given: flash_attention_2 and sdpa, not compiled and
compiled, not packed and packed. That makes eight combinations.

An axis collapses where a backend does not have it: only DeepSpeed has ZeRO stages, and a compile backend needs something
to compile. Combinations that then are equal are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.config.replay_config import AXES, ReplayConfig, has
from actordbg.config.sources import FSDP_OFF, fsdp_is_off

Axes = dict[str, list[Any]]
"""Values by name of the setting, in the order of AXES."""


@dataclass(frozen=True)
class Combination:
    """One cell before it ran. `settings`: by axis, None where the axis means nothing here. `name`: the settings in words."""

    name: str
    settings: dict[str, Any]
    config: ReplayConfig


def parse_axes(given: Mapping[str, str | None]) -> Axes:
    """The axes of the options that were given (None: not given); the default ones where no option lists several values."""
    axes = {name: one.list_of(text) for name, one in AXES.items() if (text := given.get(name)) is not None}
    if all(len(values) == 1 for values in axes.values()):
        usual = {name: list(one.axis.default) for name, one in AXES.items() if one.axis and one.axis.default}
        axes = usual | axes
    return {name: axes[name] for name in AXES if name in axes}


def combinations(base: ReplayConfig, axes: Axes) -> list[Combination]:
    """The product of the axes over `base`, in its order, without what is the same thing twice.

    UsageError for an axis that means nothing to any of them: its table would answer another question than the one asked.
    """
    if fsdp_is_off() and "fsdp2" in axes.get("backend", ()):
        raise UsageError(f"{FSDP_OFF} is set, and --backend lists fsdp2", hint=f"unset {FSDP_OFF}, or leave fsdp2 out")
    by_config: dict[ReplayConfig, Combination] = {}
    for values in product(*axes.values()):
        asked = dict(zip(axes, values, strict=True))
        config = _collapse(base, asked)
        settings = {name: value if has(AXES[name], config.backend, config.compile) else None for name, value in asked.items()}
        by_config.setdefault(config, Combination(name_of(settings, axes), settings, config))
    for name, wanted in axes.items():
        axis = AXES[name]
        if wanted != [axis.idle] and all(combination.settings[name] is None for combination in by_config.values()):
            listed = ",".join(axis.typed(value) for value in wanted)
            raise UsageError(
                f"{axis.flag} {listed} means nothing to any of these cells",
                hint=f"add {axis.needs}; or leave {axis.flag} out",
            )
    return list(by_config.values())


def name_of(settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> str:
    """The settings that tell this combination from the others, in words: short, since a table has 24 columns for them.

    A group of one rank is none, and a ZeRO stage says that it is DeepSpeed's.
    """
    known = {name: value for name, value in settings.items() if value is not None}
    brief = {name: value for name, value in known.items() if len(axes.get(name, ())) > 1}
    brief = {name: value for name, value in brief.items() if not (name in ("tp", "ring") and value == 1)}
    if "zero_stage" in brief:
        brief.pop("backend", None)
    return ", ".join(AXES[name].in_words(value, brief=True) for name, value in (brief or known).items())


def _collapse(base: ReplayConfig, asked: Mapping[str, Any]) -> ReplayConfig:
    """The configuration that was asked for, without what its backend takes no notice of."""
    config = replace(base, **asked)
    idle: dict[str, Any] = {name: one.idle for name, one in AXES.items() if not has(one, config.backend, config.compile)}
    config = replace(config, **idle)
    if "nproc" not in asked and config.nproc < config.tp * config.ring:
        config = replace(config, nproc=config.tp * config.ring)
    return config
