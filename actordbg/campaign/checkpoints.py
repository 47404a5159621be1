"""Locate the checkpoints of a training check, choose the newest usable checkpoint, and prune old ones. Desk and workers.

    DIR/<check>/cell-3/step-0004.2/     after step 4, by the second attempt at cell 3
    DIR/<check>/cell-3/.step-0005.2/    ranks are still writing it, or died while they did

Ranks only write; the desk process finds and removes, so no checkpoint disappears while it is read. Two are kept, because a
kill may come between a checkpoint and the journals of its step: the previous checkpoint has all its figures. torch and DeepSpeed
unpickle these files, so a folder that other users can write, or did write, is refused. Standard library only.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import StoreProblem, UnsafeInput, UsageError
from actordbg.base.owners import is_own, name_of
from actordbg.formats.store_files import make_folder

KEPT = 2
_NAME = re.compile(r"step-(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A complete checkpoint: after which step, by which attempt, and its folder."""

    step: int
    attempt: int
    folder: Path


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


def generation(folder: Path, step: int, attempt: int) -> Path:
    """Return the folder of one checkpoint once it is complete."""
    return folder / f"step-{step:04d}.{attempt}"


def unfinished(checkpoint: Path) -> Path:
    """Return the folder that ranks write into; it is renamed to `checkpoint` when every rank has written its part."""
    return checkpoint.with_name(f".{checkpoint.name}")


def complete(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints, newest first."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted((Checkpoint(int(match[1]), int(match[2]), path) for match, path in named), reverse=True)


def newest(folder: Path, most: int) -> Checkpoint | None:
    """Return the newest complete checkpoint of a step up to `most`. UnsafeInput if another user may have written it."""
    chosen = next((checkpoint for checkpoint in complete(folder) if checkpoint.step <= most), None)
    if chosen is not None:
        require_own(chosen.folder)
    return chosen


def clear(folder: Path, chosen: Checkpoint | None) -> None:
    """Remove checkpoints newer than the `chosen` checkpoint, and incomplete checkpoints."""
    newer = (checkpoint.folder for checkpoint in complete(folder) if chosen is None or checkpoint > chosen)
    _remove([*folder.glob(".step-*"), *newer])


def prune(folder: Path) -> None:
    """Remove all but the two newest complete checkpoints; incomplete checkpoints stay, as ranks may still write them."""
    _remove(checkpoint.folder for checkpoint in complete(folder)[KEPT:])


def remove_all(folder: Path) -> None:
    """Remove all checkpoints of a finished training, and the folders that this leaves empty."""
    clear(folder, None)
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


def _remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints, their name first, so that a half-removed checkpoint counts as incomplete."""
    for folder in folders:
        hidden = folder.with_name(f".{folder.name.lstrip('.')}")
        with contextlib.suppress(OSError):
            folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
