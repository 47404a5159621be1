"""A configuration as it ran: its label, how two differ, whether they are the same, and the options that repeat it.

Workers report how open settings were resolved (`resolved`); the others count as requested. Everything here reads the table of
settings, so two commands cannot describe the same replays differently::

    ours, theirs = as_ran(config, resolved), as_ran(other, resolved_there)
    label(ours)                      # "TOY MODEL (tiny) bf16 sdpa, packed, deepspeed ZeRO 3, 2 processes"
    apart(ours, theirs)              # ("compiled", "not compiled"); ("", "") where nothing differs
    repeat_options(ours)             # ["--model", "tiny", "--backend", "plain", "--no-packing"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from actordbg.config.replay_config import SETTINGS, TINY, TOY_MODEL, TRUTHS, ReplayConfig, has
from actordbg.config.setting import Setting

Values = dict[str, Any]
"""The value of each setting by name."""
Known = Mapping[str, Any]
"""Values of all settings, or of some, that are only read."""

_HEAD = ("model", "dtype", "attn")
_ENGINE = ("backend", "zero_stage", "tp", "ring")
_ALWAYS_TYPED = ("model", "backend")
_TELLING = [setting for setting in SETTINGS.values() if setting.numbers or setting.cost]
"""The settings that distinguish configurations: numbers, time or memory depend on them."""


def as_ran(config: ReplayConfig | Known, resolved: Known | None = None) -> Values:
    """Return each setting's value as the workers reported it, else as given. `config` may be plain data, as files have it."""
    requested = config.to_dict() if isinstance(config, ReplayConfig) else config
    values = {}
    for setting in SETTINGS.values():
        ran = (resolved or {}).get(setting.resolved) if setting.resolved else None
        values[setting.name] = ran if ran is not None and setting.takes(ran) else requested.get(setting.stored, setting.default)
    return values


def label(values: Known) -> str:
    """Describe a configuration in words: "TOY MODEL (tiny) bf16 sdpa, packed, deepspeed ZeRO 3, 2 processes"."""
    if values["truth"]:
        what = "the truth" if values["truth"] in TRUTHS else "each row alone"
        model = SETTINGS["model"].in_words(values["model"])
        beside = [
            setting.name
            for setting in _TELLING
            if setting.beside_truth is None and setting.name not in ("model", "dtype", "truth")
        ]
        weights = f" of {values['dtype']} weights" if values["dtype"] else ""
        return ", ".join([f"{model}, {what} in {values['truth']}{weights}", *_words(values, beside)])
    parts = [" ".join(_words(values, _HEAD)), *_words(values, ("packing",)), " ".join(_words(values, _ENGINE))]
    rest = [setting.name for setting in _TELLING if setting.name not in (*_HEAD, *_ENGINE, "packing")]
    return ", ".join([*parts, *_words(values, rest)])


def toy(model: object, before: str = "") -> str:
    """Return the suffix of the toy model's figures: " of a TOY MODEL" with `before` " of a "; "" for any other model."""
    return f"{before}{TOY_MODEL}" if model == TINY else ""


def on_machine(config: ReplayConfig | Known, resolved: Known) -> str:
    """Describe a configuration that ran: its label, and the device and kernels that it ran on."""
    device = resolved.get("device_name") or "an unknown device"
    parts = [label(as_ran(config, resolved)), f"on {device}"]
    parts += [f"ring kernel: {resolved['ring_kernel']}"] if "ring_kernel" in resolved else []
    return ", ".join(parts)


def apart(ours: Known, theirs: Known) -> tuple[str, str]:
    """Return the settings in which two configurations differ, in the words of each; ("", "") if they are the same."""
    names = differing(ours, theirs)
    return _side(names, ours, theirs), _side(names, theirs, ours)


def differing(ours: Known, theirs: Known) -> list[str]:
    """Return the settings that change numbers, time or memory, and that differ between the two."""
    mine, other = telling(ours), telling(theirs)
    return [name for name, value in mine.items() if value != other[name]]


def telling(values: Known) -> Values:
    """Return the settings that distinguish configurations: numbers, time or memory depend on them. A setting that the backend
    does not have counts as its idle value."""
    return {setting.name: values[setting.name] if _has(setting, values) else setting.idle for setting in _TELLING}


def deciding(values: Known) -> Values:
    """Return the settings that change results. Plain ranks are independent, so their number does not count, nor does a seed."""
    apart = _DECIDE_NOTHING | ({"nproc"} if values["backend"] == "plain" else set())
    return {name: value for name, value in telling(values).items() if SETTINGS[name].numbers and name not in apart}


_DECIDE_NOTHING = {"vary", "seed"}
"""Settings that do not change what a configuration computes."""


def meant(values: Known, differs: Known) -> Values:
    """Keep the settings of `differs` that apply to a configuration: a plain replay has no ZeRO stage. Other facts stay."""
    return {name: value for name, value in differs.items() if name not in SETTINGS or _has(SETTINGS[name], values)}


def complete(values: Known) -> Values:
    """Complete `values` with the defaults of all other settings."""
    return {setting.name: values.get(setting.name, setting.default) for setting in SETTINGS.values()}


def is_chosen(values: Known) -> bool:
    """Check whether asked values are one of the configurations that a matrix tries beside the usual one."""
    return any(values.get(name) not in (None, False, "sdpa") for name in ("attn", "compile", "packing"))


def in_words(name: str, value: Any) -> str:
    """Describe a setting, or another fact that workers report, in words: "ZeRO 3", "engine training"."""
    if name in SETTINGS:
        return SETTINGS[name].in_words(value)
    if isinstance(value, float):
        return f"{name} {value:g}"
    return f"{name} {value}".lower() if isinstance(value, bool) else f"{name} {value}"


def difference(ours: Known, theirs: Known) -> str:
    """Describe the difference of two configurations: "A is compiled, B not compiled"; "Both are configured alike"."""
    mine, other = apart(ours, theirs)
    if mine and other:
        return f"A is {mine}, B {other}"
    if mine:
        return f"A is {mine}, B is not"
    if other:
        return f"B is {other}, A is not"
    return "Both are configured alike"


def repeat_options(values: Known, command: str = "replay") -> list[str]:
    """Return the options of a command that repeat this configuration, whatever model and backend `actordbg.toml` has."""
    words: list[str] = []
    left_out = ("name",) if values["backward"] is not False else ("name", "keep_gradients")
    for setting in SETTINGS.values():
        value = values[setting.name]
        if setting.name in left_out or command not in setting.commands or not _has(setting, values):
            continue
        words += [setting.flag, str(value)] if setting.name in _ALWAYS_TYPED else setting.options(value)
    return words


def _has(setting: Setting, values: Known) -> bool:
    return has(setting, values["backend"], bool(values["compile"]))


def _words(values: Known, names: Iterable[str]) -> list[str]:
    pairs = ((SETTINGS[name], values[name]) for name in names)
    return [setting.in_words(value) for setting, value in pairs if _has(setting, values) and not setting.is_quiet(value)]


def _side(names: Iterable[str], mine: Known, other: Known) -> str:
    """Describe one side where the two differ. A setting that the other side cannot have appears only if a label would show it."""
    settings = [SETTINGS[name] for name in names if _has(SETTINGS[name], mine)]
    return ", ".join(
        setting.in_words(mine[setting.name])
        for setting in settings
        if _has(setting, other) or not setting.is_quiet(mine[setting.name])
    )
