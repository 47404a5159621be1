"""Merge what the user set: flag > `--config` file > environment > `actordbg.toml` > the recorded backend > default.

`actordbg.toml` is looked for in the current folder and its parents::

    store = "/shared/actordbg"        # relative paths are relative to this file

    [replay]                          # settings of `actordbg replay`, by option name
    model = "/models/llama-3.1-8b"
    backend = "deepspeed"
    timeout = 600

A `--config` file (TOML, or YAML with the same keys) has such a table, and `[inputs]`, the options that select inputs. It may set
what `actordbg.toml` may not: the truth and a name.

Environment variables: `ACTORDBG_STORE` (the store), `ACTORDBG_CONFIG` (a file instead of `actordbg.toml`),
`ACTORDBG_REPLAY_<SETTING>` (a setting of replays, such as `ACTORDBG_REPLAY_BACKEND`), `ACTORDBG_DISABLE=1` (turns the
capture hook off), `ACTORDBG_RUN` (the run's name, in the training job). `DEBUG_DISABLE_FSDP=1` alone wins over a flag: fsdp2 is
the plain Actor then, in one process.

An `actordbg.toml` decides which store and which model commands use, and anybody may have put it where it is found. So another
user's file is refused, unless ACTORDBG_CONFIG names it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from actordbg.base.errors import Refused, UsageError, require_package
from actordbg.base.fault import without_password
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import is_own, name_of, read_owned, user_cache
from actordbg.config.replay_config import SETTINGS, ReplayConfig, validate
from actordbg.config.setting import ENVIRONMENT, Setting

FILE_NAME = "actordbg.toml"
DEFAULT_STORE = "store"
FSDP_OFF = "DEBUG_DISABLE_FSDP"
Values = dict[str, Any]
"""Values of settings by name."""
Layer = dict[str, tuple[Any, str]]
"""Values of settings by name, and where each is from."""
NOTHING: Layer = {}
_BY_OPTION = {setting.option: setting for setting in SETTINGS.values() if not setting.flag_only}


@dataclass(frozen=True)
class Settings:
    """The merged settings: the store's folder, and the defaults of `replay` by option name. `file`: where those come from.

    url: of a remote store; then `store` is the folder of its mirror.
    """

    store: Path
    replay: Values = field(default_factory=dict)
    file: str = FILE_NAME
    url: str | None = None


@dataclass(frozen=True)
class Asked:
    """A configuration, and where each setting that no flag gave comes from: "ACTORDBG_REPLAY_BACKEND", or a file's path."""

    config: ReplayConfig
    sources: dict[str, str]

    @property
    def in_words(self) -> str:
        """The settings that no flag gave, in words: "backend plain (ACTORDBG_REPLAY_BACKEND)"; "" for none."""
        pairs = ((SETTINGS[name], source) for name, source in self.sources.items())
        return ", ".join(
            f"{setting.option} {setting.typed(getattr(self.config, setting.name))} ({source})" for setting, source in pairs
        )


def load_settings(store_flag: str | Path | None = None) -> Settings:
    """Merge flag, environment and file. Raises UsageError for a file that cannot be read or has unknown keys, Refused
    for another user's file."""
    path, named = find_file()
    data = _read(path, named, {"store": str, "replay": dict}) if path else {}
    store, source = DEFAULT_STORE, "default"
    if store_flag is not None:
        store, source = str(store_flag), "--store"
    elif os.environ.get("ACTORDBG_STORE"):
        store, source = os.environ["ACTORDBG_STORE"], "ACTORDBG_STORE"
    elif path and "store" in data:
        store, source = data["store"] if "://" in data["store"] else os.fspath(path.parent / data["store"]), str(path)
    if not store.strip():  # it would be the working folder
        raise UsageError(f"{source} names no store: it is empty", hint=f"set {source} DIR, or drop it for ./{DEFAULT_STORE}")
    store = store.removeprefix("file://")
    url = store if "://" in store else None
    # the mirror of a store behind a URL lies in the user's cache
    folder = user_cache() / "staged" / mirror_name(url) if url else Path(store)
    return Settings(folder, data.get("replay", {}), str(path or FILE_NAME), url)


def mirror_name(url: str) -> str:
    """Return the local name of a store behind a URL: readable, and unique for each URL."""
    import hashlib  # `--help` needs no more than the options

    address = without_password(url.partition("#")[0]).rstrip("/")
    last = address.rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9]+", "-", last)[:32].strip("-") or "store"
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return f"{name}-{digest}"


def build_config(settings: Settings, flags: Mapping[str, Any], recorded: Layer = NOTHING) -> Asked:
    """Build the validated configuration from flags (None: not given), environment, file, and what the dumps recorded.

    A source that names the backend, or requests the truth, overrides settings of weaker sources for another backend, or against
    a truth. FSDP_OFF wins over a flag: fsdp2 becomes the plain Actor in one process. Raises UsageError for unknown names, wrong
    types and invalid values.
    """
    values: Values = {}
    sources: dict[str, str] = {}
    layers: list[Layer]
    given = {name: (value, "") for name, value in flags.items() if value is not None}
    layers = [given, from_environment(), _from_file(settings), recorded]
    backend, _ = next((layer["backend"] for layer in layers if "backend" in layer), ("", ""))
    if backend == "fsdp2" and fsdp_is_off():
        layers.insert(0, {"backend": ("plain", FSDP_OFF), "nproc": (1, ""), "tp": (1, ""), "ring": (1, "")})
    for layer in layers:
        for name, (value, source) in beneath(values, layer).items():
            values[name] = value
            sources |= {name: source} if source else {}
    values.setdefault("nproc", values.get("tp", 1) * values.get("ring", 1))
    config = ReplayConfig(**values)
    validate(config)
    return Asked(config, sources)


def beneath(stronger: Mapping[str, Any], weaker: Mapping[str, Any]) -> Values:
    """Return the settings that a weaker source adds: none for a backend that was not chosen, and none against a truth."""
    backends = set(str(stronger.get("backend", "")).split(","))  # a matrix has several

    def adds(setting: Setting) -> bool:
        against_truth = "truth" in stronger and setting.beside_truth is not None
        of_others = setting.backends and "backend" in stronger and backends.isdisjoint(setting.backends)
        return not (setting.name in stronger or against_truth or of_others)

    return {name: value for name, value in weaker.items() if adds(SETTINGS[name])}


def near(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word nearest to a misspelled one, else all of them."""
    import difflib

    if nearest := difflib.get_close_matches(word, list(known), 1):
        return f"did you mean {nearest[0]}?"
    return f"known: {', '.join(sorted(known))}"


def from_environment() -> Layer:
    """Read the settings in environment variables: by name, (value, variable). UsageError for an unknown or invalid variable."""
    values: Layer = {}
    for variable in sorted(name for name in os.environ if name.startswith(ENVIRONMENT)):
        name = variable.removeprefix(ENVIRONMENT).replace("_", "-").lower()
        setting = _BY_OPTION.get(name)
        if setting is None:
            raise UsageError(f"{variable} is not a setting of a replay", hint=f"unset it; {near(name, _BY_OPTION)}")
        if setting.name in values:
            raise UsageError(f"{variable} and {values[setting.name][1]} set the same setting", hint="unset either")
        try:
            values[setting.name] = (setting.parse(os.environ[variable]), variable)
        except ValueError:
            raise UsageError(
                f"{variable}={os.environ[variable]:.60} is not a value of --{setting.option}", hint=f"{setting.hint}; or unset it"
            ) from None
    return values


def fsdp_is_off() -> bool:
    """Return whether FSDP_OFF is set."""
    return os.environ.get(FSDP_OFF, "") not in ("", "0")


def _from_file(settings: Settings) -> Layer:
    values = settings_in(settings.replay, f"{Path(settings.file).name}: [replay]", _BY_OPTION.values())
    return {name: (value, settings.file) for name, value in values.items()}


def settings_in(table: Mapping[str, Any], where: str, known: Iterable[Setting], lists: Collection[str] = ()) -> Values:
    """Read settings by option name, such as a file's [replay] table: the values by the settings' names.

    where: whose they are, in words. Those of `lists` may be lists, and become comma lists.

    Raises UsageError for a key that is not `known`, a value of another type, and a key in two spellings.
    """
    by_option = {setting.option: setting for setting in known}
    values: Values = {}
    for key, value in table.items():
        setting = by_option.get(key.replace("_", "-"))
        if setting is None:
            raise UsageError(f"{where} has an unknown key {key!r}", hint=near(key, by_option))
        listed = value if isinstance(value, list) and setting.name in lists else [value]
        if not all(setting.takes(item) for item in listed):
            text = f"{where} {key} = {value!r} is not of type {setting.kind.__name__}"
            raise UsageError(text, hint="correct the file")
        if setting.name in values:
            raise UsageError(f"{where} {key} appears in two spellings", hint="keep one spelling")
        values[setting.name] = ",".join(map(setting.typed, listed)) if setting.name in lists else setting.kind(value)
    return values


def read_config(path: Path) -> dict[str, Values]:
    """Read a `--config` file: its tables [inputs] and [replay]. Raises UsageError for other keys and for what is neither TOML
    nor YAML."""
    return _read(path, True, {"inputs": dict, "replay": dict})


def find_file() -> tuple[Path | None, bool]:
    """Find the settings file of commands in this folder, or None, and whether ACTORDBG_CONFIG names it."""
    named = os.environ.get("ACTORDBG_CONFIG")
    if named:
        if not Path(named).is_file():
            raise UsageError(f"ACTORDBG_CONFIG names {named}, which is not a file", hint="unset it or correct it")
        return Path(named).absolute(), True
    folder = Path.cwd()
    candidates = (parent / FILE_NAME for parent in (folder, *folder.parents))
    return next((path for path in candidates if path.is_file()), None), False


def parse_toml(text: str) -> Values:
    """Parse TOML; ValueError if it is invalid."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    data: Values = tomllib.loads(text)
    return data


def _read(path: Path, named: bool, kinds: Mapping[str, type]) -> Values:
    """Read a file of these keys. Refused if it is another user's; a file that the user named is the user's choice."""
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    if is_yaml:
        require_package(path.name, "yaml", "pyyaml")
    try:
        raw, owner = read_owned(path)
        if not (named or is_own(owner)):
            raise Refused(
                f"{path} belongs to {name_of(owner)}, not to you, and would decide which store and which model commands use",
                hint=f"if you trust it: export ACTORDBG_CONFIG={in_shell(str(path))}",
            )
        data = dict(import_module("yaml").safe_load(raw) or {}) if is_yaml else parse_toml(raw.decode("utf-8"))
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - yaml raises its own
        raise UsageError(f"{path} cannot be read: {error}"[:400], hint="correct the file, or remove it") from None
    unknown = sorted(set(map(str, data)) - set(kinds))
    if unknown:
        raise UsageError(f"{path} has unknown keys: {', '.join(unknown)}", hint=f"known keys: {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(data.get(name, kind()), kind):
            raise UsageError(f"{path}: {name} is not of type {kind.__name__}", hint="see docs/reference/settings.md")
    return data
