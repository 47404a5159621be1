"""What the user set, wherever they set it: flag > environment > `actordbg.toml` > default.

`actordbg.toml` is looked for in the current folder and its parents::

    store = "/shared/actordbg"        # relative paths are relative to this file

    [replay]                          # defaults of `actordbg replay`, by option name
    model = "/models/llama-3.1-8b"
    backend = "deepspeed"
    timeout = 600

Environment variables: `ACTORDBG_STORE` (the store), `ACTORDBG_CONFIG` (another file than `actordbg.toml`),
`ACTORDBG_DISABLE=1` (turns the capture hook off), `ACTORDBG_RUN` (the run's name, in the training job).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "actordbg.toml"
DEFAULT_STORE = "store"


@dataclass(frozen=True)
class Settings:
    """The merged settings: the store's folder and the defaults of `replay` by option name."""

    store: Path
    source: str
    replay: dict[str, Any] = field(default_factory=dict)


def load_settings(store_flag: Path | None = None, start: Path | None = None) -> Settings:
    """Merge flag, environment and file. Raises UsageError for a file that cannot be read or has unknown keys."""
    path = _find(start or Path.cwd())
    data = _read(path) if path else {}
    replay = data.get("replay", {})
    if store_flag is not None:
        return Settings(store_flag, "--store", replay)
    if os.environ.get("ACTORDBG_STORE"):
        return Settings(Path(os.environ["ACTORDBG_STORE"]), "ACTORDBG_STORE", replay)
    if path and "store" in data:
        return Settings(path.parent / data["store"], str(path), replay)
    return Settings(Path(DEFAULT_STORE), "default", replay)


def _find(folder: Path) -> Path | None:
    named = os.environ.get("ACTORDBG_CONFIG")
    if named:
        if not Path(named).is_file():
            raise UsageError(f"ACTORDBG_CONFIG names {named}, which is not a file", hint="unset it or correct it")
        return Path(named).absolute()
    candidates = (parent / FILE_NAME for parent in (folder, *folder.parents))
    return next((path for path in candidates if path.is_file()), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="correct the file, or remove it") from None
    unknown = sorted(set(data) - {"store", "replay"})
    if unknown:
        raise UsageError(f"{path} has unknown keys: {', '.join(unknown)}", hint="known keys: store, [replay]")
    if not isinstance(data.get("store", ""), str) or not isinstance(data.get("replay", {}), dict):
        raise UsageError(f"{path}: `store` is a string and `replay` a table", hint="see docs/reference/settings.md")
    return data
