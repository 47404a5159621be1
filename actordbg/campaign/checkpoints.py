"""Where the checkpoints of a training check lie, which one a configuration continues from, and which may go. Desk and workers.

    DIR/<check>/cell-3/step-0004.2/                 after step 4, by the second attempt at cell 3
    DIR/<check>/cell-3/step-0004.2/checkpoint.json  written last: what it belongs to. Without it the checkpoint is none.

Ranks only write; the desk process finds and removes, so nothing goes while somebody reads it. Two are kept, because a kill may
come between a checkpoint and the journals of its step: the one before has all its figures. torch and DeepSpeed read pickles
there, so a folder that others may write, or did write, is refused. Standard library only.
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
    """The folder that `--storage` names. UsageError for what cannot be one."""
    if "://" in text:
        raise UsageError(
            f"--storage {text} is a URL, and checkpoints are written into a folder by all ranks at once",
            hint="a folder on a file system that every rank mounts at the same place",
        )
    folder = Path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--storage {folder} is not a folder", hint="name a folder; it is made if there is none")
    if folder.resolve().is_relative_to(store.resolve()):
        raise UsageError(f"--storage {folder} lies in the store, where only its own files belong", hint="a folder beside it")
    return folder


def open_folder(folder: Path) -> None:
    """Make the folder of a cell's checkpoints, for this user alone. StoreProblem where that cannot be."""
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreProblem(f"no checkpoint can be written to {folder}: {error.strerror}", hint="another --storage") from None


def belongs_to(
    check_id: str, index: int, spec: ReplaySpec, training: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """What has to be the same when a training continues, as JSON has it. `spec`: of the whole training."""
    inputs = json.dumps([asdict(item) for item in spec.inputs], sort_keys=True).encode()
    told = {
        "check": check_id,
        "cell": index,
        "inputs": hashlib.sha256(inputs).hexdigest(),
        "configuration": spec.config.to_dict(),
        "optimizer": dict(training),
        "versions": dict(versions),
    }
    return dict(json.loads(json.dumps(told)))


def generation(folder: Path, step: int, attempt: int) -> Path:
    """The folder of one checkpoint."""
    return folder / f"step-{step:04d}.{attempt}"


def complete(folder: Path, step: int, belongs: Mapping[str, Any]) -> None:
    """Say that every rank has written its part."""
    atomic_write(folder / CHECKPOINT, json.dumps({"format": 1, "step": step, "belongs": belongs}, indent=1).encode())


def newest(folder: Path, belongs: Mapping[str, Any], most: int) -> Checkpoint | None:
    """The newest complete checkpoint of a step up to `most`. Unsupported if it belongs to something else, UnsafeInput if others
    may have written it.
    """
    for found in _complete(folder):
        if found.step <= most:
            if other := _differences(found.belongs, belongs):
                raise Unsupported(
                    f"cannot resume from checkpoint {found.folder}: {'; '.join(other)}",
                    hint=f"the same installation as before, or remove {folder}: the configuration then starts from step 1",
                )
            require_own(found.folder)
            return found
    return None


def clear(folder: Path, chosen: Checkpoint | None) -> None:
    """Remove what is newer than the checkpoint that is continued from, and what is not complete."""
    kept = [one.folder for one in _complete(folder) if chosen and (one.step, one.attempt) <= (chosen.step, chosen.attempt)]
    _remove(path for path in _generations(folder) if path not in kept)


def prune(folder: Path) -> None:
    """Remove all but the two newest complete checkpoints; what may still be written stays."""
    _remove(one.folder for one in _complete(folder)[KEPT:])


def remove_all(folder: Path) -> None:
    """The training is over: remove its checkpoints, and the folders above that are empty then."""
    _remove(_generations(folder))
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def require_own(folder: Path) -> None:
    """UnsafeInput unless all in there was written by this user, where no one else may write: pickles are read from it."""
    for path in (folder.parent, folder, *folder.rglob("*")):
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            raise UnsafeInput(f"{path} is a link, not a checkpoint", hint=f"remove {folder}")
        if not is_own(state.st_uid):
            raise UnsafeInput(
                f"{path} was written by {name_of(state.st_uid)}, and a checkpoint can run code when it is read",
                hint="a --storage of your own",
            )
        if path in (folder.parent, folder) and state.st_mode & 0o022:  # nobody else comes to what is below
            raise UnsafeInput(f"others may write to {path}, and a checkpoint can run code", hint=f"chmod -R go-w {folder}")


def _complete(folder: Path) -> list[Checkpoint]:
    """The newest first."""
    found = []
    for path in _generations(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told, (step, attempt) = json.loads(read_regular(path / CHECKPOINT)), map(int, path.name[5:].split("."))
            if told["step"] == step and told["format"] == 1:
                found.append(Checkpoint(path, step, attempt, dict(told["belongs"])))
    return sorted(found, key=lambda one: (one.step, one.attempt), reverse=True)


def _generations(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _remove(folders: Iterable[Path]) -> None:
    """The last file of each first, so that a half removed checkpoint is none."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.unlink(folder / CHECKPOINT)
        shutil.rmtree(folder, ignore_errors=True)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    other = [f"another {name}" for name in now if name != "versions" and before.get(name) != now[name]]
    was, are = dict(before.get("versions") or {}), now["versions"]
    changed = sorted(name for name in {*was, *are} if was.get(name) != are.get(name))
    return other + [f"{name} was {was.get(name, 'none')}, and is {are.get(name, 'none')}" for name in changed]
