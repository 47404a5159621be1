"""The folder that `families` works in: a store, the small models, and a file for each family that is done.

    DIR/store/                  an ordinary store with the dumps and every replay
    DIR/models/NAME-<hash>/     a small model, by the hash of its configuration
    DIR/families/NAME.json      what became of a family (`FamilyResult`), and what was asked of it

A run that was killed goes on in the same folder: a family whose file says that the same was asked of it, under the same versions,
is taken from there. So a long list may be run in parts, and the last one writes all of them into one page.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actordbg.actor.family_models import VOCABULARY
from actordbg.base.errors import ActordbgError, Conflict, UsageError
from actordbg.campaign.axes import Axes
from actordbg.campaign.family_matrix import SHAPES, FamilyResult, Subject
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.store_files import atomic_write
from actordbg.store.layout import Store


@dataclass(frozen=True)
class FamilyFolder:
    """A folder to work in. base, axes: what is asked of every family."""

    folder: Path
    base: ReplayConfig
    axes: Axes

    @property
    def store(self) -> Store:
        """Its store; it may not be there yet."""
        return Store(self.folder / "store")

    def model(self, subject: Subject) -> Path:
        """Where the small model of a family belongs."""
        return self.folder / "models" / f"{subject.name}-{_hash(subject.config)}"

    def make_inputs(self) -> None:
        """The dumps that every family replays; those that are there stay."""
        from actordbg.dumps.create import create_dumps  # and numpy

        there = len(list(self.store.iter_dumps())) if self.store.root.is_dir() else 0
        for seed, shape in list(enumerate(SHAPES))[there:]:
            create_dumps(self.store, 1, vocab_size=VOCABULARY, seed=seed, **shape)

    def done(self, subject: Subject) -> FamilyResult | None:
        """The result of an earlier run that asked the same; None if it must run."""
        with contextlib.suppress(ActordbgError):
            result = FamilyResult.from_file(self._file(subject))
            if result.asked == self._asked(subject):
                return replace(result, known_as=subject.known_as, typed=subject.typed)
        return None

    def keep(self, subject: Subject, result: FamilyResult) -> FamilyResult:
        """Write down what became of a family, and what was asked of it."""
        result = replace(result, asked=self._asked(subject))
        atomic_write(self._file(subject), result.to_json().encode())
        return result

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block no other `families` works here; Conflict if one does."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise Conflict(
                f"another `actordbg families` works in {self.folder}", hint="wait for it, or name a new folder"
            ) from None
        finally:
            os.close(descriptor)

    def _file(self, subject: Subject) -> Path:
        return self.folder / "families" / f"{self.model(subject).name}.json"

    def _asked(self, subject: Subject) -> str:
        """A hash of all that decides a result."""
        base = {name: value for name, value in asdict(self.base).items() if name != "model"}
        return _hash([subject.config, base, self.axes, SHAPES, installed_versions()])


def open_folder(folder: Path) -> Path:
    """The folder of an earlier run, or a new or empty one; UsageError for one with anything else in it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder", hint="name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} - {"store", "models", "families"}:
        raise UsageError(
            f"{folder} is not empty, and not of `actordbg families`",
            hint="name a new folder: this command writes only where nothing is",
        )
    return folder.resolve()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
