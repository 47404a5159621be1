"""Locate the checkpoints of a training check, choose the newest usable checkpoint, and prune old ones. Desk and workers.

    DIR/<check>/cell-3/step-0004.2/                 after step 4, by the second attempt at cell 3
    DIR/<check>/cell-3/step-0004.2/checkpoint.json  written last: what it belongs to. Without it the checkpoint is incomplete.

Ranks only write; the desk process finds and removes, so no checkpoint disappears while it is read. Two are kept, because a
kill may come between a checkpoint and the journals of its step: the previous checkpoint has all its figures. torch and DeepSpeed
unpickle these files, so a folder that other users can write, or did write, is refused. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actordbg.base.errors import StoreProblem, UnsafeInput, Unsupported, UsageError
from actordbg.base.owners import is_own, name_of
from actordbg.formats.store_files import atomic_write, make_folder, read_regular
from actordbg.records.replay_record import ReplaySpec

CHECKPOINT = "checkpoint.json"
KEPT = 2
_NAME = re.compile(r"step-\d+\.\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: after which step, by which attempt, and what it belongs to."""

    folder: Path
    step: int
    attempt: int
    belongs: dict[str, Any]


def checked_storage(text: str, store: Path) -> Path:
    """Return the folder that `--storage` names. Raises UsageError if it cannot hold checkpoints."""
    if "://" in text:
        raise UsageError(
            f"--storage {text} is a URL, but all ranks write checkpoints into one folder",
            hint="name a folder on a file system that every rank mounts at the same path",
        )
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--storage {folder} is not a folder", hint="name a folder; it is created if missing")
    if folder.resolve().is_relative_to(store.resolve()):
        raise UsageError(
            f"--storage {folder} is inside the store, which holds only its own files", hint="name a folder beside it"
        )
    return folder


def open_folder(folder: Path) -> None:
    """Create the folder of a cell's checkpoints, private to this user. Raises StoreProblem if it cannot be created."""
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreProblem(f"cannot write checkpoints to {folder}: {error.strerror}", hint="use another --storage") from None


def belongs_to(
    check_id: str, index: int, spec: ReplaySpec, training: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """Return, as JSON data, what must be unchanged for a training to continue. `spec`: the spec of the whole training."""
    inputs = json.dumps([asdict(item) for item in spec.inputs], sort_keys=True).encode()
    identity = {
        "check": check_id,
        "cell": index,
        "inputs": hashlib.sha256(inputs).hexdigest(),
        "configuration": spec.config.to_dict(),
        "optimizer": dict(training),
        "versions": dict(versions),
    }
    return dict(json.loads(json.dumps(identity)))


def generation(folder: Path, step: int, attempt: int) -> Path:
    """Return the folder of one checkpoint."""
    return folder / f"step-{step:04d}.{attempt}"


def complete(folder: Path, step: int, belongs: Mapping[str, Any]) -> None:
    """Mark a checkpoint as complete: every rank has written its part."""
    atomic_write(folder / CHECKPOINT, json.dumps({"format": 1, "step": step, "belongs": belongs}, indent=1).encode())


def newest(folder: Path, belongs: Mapping[str, Any], most: int) -> Checkpoint | None:
    """Return the newest complete checkpoint of a step up to `most`.

    Raises Unsupported if it belongs to something else, UnsafeInput if another user may have written it.
    """
    for checkpoint in _complete(folder):
        if checkpoint.step <= most:
            if other := _differences(checkpoint.belongs, belongs):
                raise Unsupported(
                    f"cannot resume from checkpoint {checkpoint.folder}: {'; '.join(other)}",
                    hint=f"use the same installation as before, or remove {folder} to start the configuration from step 1",
                )
            require_own(checkpoint.folder)
            return checkpoint
    return None


def clear(folder: Path, chosen: Checkpoint | None) -> None:
    """Remove checkpoints newer than the `chosen` checkpoint, and incomplete checkpoints."""
    kept = [
        checkpoint.folder
        for checkpoint in _complete(folder)
        if chosen and (checkpoint.step, checkpoint.attempt) <= (chosen.step, chosen.attempt)
    ]
    _remove(path for path in _generations(folder) if path not in kept)


def prune(folder: Path) -> None:
    """Remove all but the two newest complete checkpoints; incomplete checkpoints stay, as ranks may still write them."""
    _remove(checkpoint.folder for checkpoint in _complete(folder)[KEPT:])


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a finished training, and the folders that this leaves empty."""
    _remove(_generations(folder))
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def require_own(folder: Path) -> None:
    """Raise UnsafeInput unless this user wrote every file and nobody else can write there: the files are unpickled."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            raise UnsafeInput(f"{path} is a link, not a checkpoint", hint=f"remove {folder}")
        if not is_own(state.st_uid):
            raise UnsafeInput(
                f"{path} was written by {name_of(state.st_uid)}, and reading a checkpoint can run code",
                hint="use a --storage folder that only you write",
            )
        if path in (folder.parent, folder) and state.st_mode & 0o022:  # this guards everything below
            raise UnsafeInput(
                f"other users can write to {path}, and reading a checkpoint can run code", hint=f"run `chmod -R go-w {folder}`"
            )


def _complete(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints, newest first."""
    checkpoints = []
    for path in _generations(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data, (step, attempt) = json.loads(read_regular(path / CHECKPOINT)), map(int, path.name[5:].split("."))
            if data["step"] == step and data["format"] == 1:
                checkpoints.append(Checkpoint(path, step, attempt, dict(data["belongs"])))
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt), reverse=True)


def _generations(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints, their marker first, so that a half-removed checkpoint counts as incomplete."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.unlink(folder / CHECKPOINT)
        shutil.rmtree(folder, ignore_errors=True)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    other = [f"another {name}" for name in now if name != "versions" and before.get(name) != now[name]]
    was, are = dict(before.get("versions") or {}), now["versions"]
    changed = sorted(name for name in {*was, *are} if was.get(name) != are.get(name))
    return other + [f"{name} was {was.get(name, 'none')}, and is {are.get(name, 'none')}" for name in changed]
