"""Reads and replaces the dump switch for commands; a training process has `actordbg.capture.control.ControlWatcher` instead.

Example::

    control = read_control(store)                              # None where the switch was never touched
    write_control(store, replace(control, enabled=False))
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from actordbg.base.errors import StoreProblem
from actordbg.capture.control import CONTROL_FORMATS, Control
from actordbg.formats.store_files import StoreFiles, atomic_write, read_regular


def control_dict(control: Control) -> dict[str, Any]:
    """The fields as plain data."""
    return {name: value for name, value in asdict(control).items() if name != "on"}


def control_text(control: Control) -> str:
    """The file's text."""
    return json.dumps({"format": CONTROL_FORMATS[-1], **control_dict(control)}, indent=1, allow_nan=False) + "\n"


def read_control(store: StoreFiles, job: str | None = None) -> Control | None:
    """The store's switch, or that of one named job; None where it was never touched. Raises StoreProblem or NewerFormat."""
    path = store.control_of(job)
    try:
        return Control.from_json(read_regular(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None


def write_control(store: StoreFiles, control: Control, job: str | None = None) -> None:
    """Replace the store's switch, or that of one named job. Running jobs see it within about half a second."""
    path = store.control_of(job)
    try:
        atomic_write(path, control_text(control).encode())
    except OSError as error:
        raise StoreProblem(
            f"cannot write {path}: {error.strerror}", hint="check the folder's permissions and free space"
        ) from None
