"""Read and write the dump switch, `control.json`: the desk's side, which no training process loads."""

from __future__ import annotations

import json
from dataclasses import asdict

from actordbg.base.errors import StoreProblem, system_errors
from actordbg.capture.control import CONTROL_FORMAT, LARGEST, Control
from actordbg.formats.store_files import StoreFiles, atomic_write, read_regular


def control_text(control: Control) -> str:
    """Return the text of a control file."""
    return json.dumps({"format": CONTROL_FORMAT, **asdict(control)}, indent=1, allow_nan=False) + "\n"


def read_control(store: StoreFiles, job: str | None = None) -> Control | None:
    """Read the store's switch, or a named job's; None if it was never set. Raises StoreProblem or NewerFormat."""
    path = store.control_of(job)
    with system_errors(StoreProblem, f"cannot read {path}", "check its permissions"):
        try:
            return Control.from_json(read_regular(path, LARGEST))
        except FileNotFoundError:
            return None


def write_control(store: StoreFiles, control: Control, job: str | None = None) -> None:
    """Replace the store's switch, or a named job's. Running jobs see it within about half a second."""
    path = store.control_of(job)
    with system_errors(StoreProblem, f"cannot write {path}", "check the folder's permissions and free space"):
        atomic_write(path, control_text(control))
