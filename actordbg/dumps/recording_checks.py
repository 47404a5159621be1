"""Checks of what recording and patching leave beside dumps: switches, counters, rings, events, backups, built models."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actordbg.base.errors import StoreProblem
from actordbg.capture.control import Control
from actordbg.dumps.finding import Finding, unusable
from actordbg.formats.recording_reading import read_counters, read_ring
from actordbg.formats.ringfile import place, ring_paths
from actordbg.formats.store_files import read_regular
from actordbg.formats.weight_hashes import WEIGHTS, read_weights
from actordbg.install.patching import Event
from actordbg.store.layout import Store


def switches(store: Store) -> Iterator[Finding]:
    """The dump switch, and those of jobs with a name."""
    paths = [store.root / one for one in store.files("controls", ".json", {})]
    for path in [store.control_path, *paths]:
        yield from _read(path, "damaged-control", lambda path: Control.from_json(read_regular(path)))


def counters(store: Store) -> Iterator[Finding]:
    """What recording processes counted."""
    for run in store.folder_names("counters", {}):
        for path in store.files(f"counters/{run}", ".json", {}):
            yield from _read(store.root / path, "damaged-counters", read_counters)


def weights(store: Store) -> Iterator[Finding]:
    """Hashes of the weights that recorded calls met."""
    for run in store.folder_names(WEIGHTS, {}):
        for path in store.files(f"{WEIGHTS}/{run}", ".json", {}):
            yield from _read(store.root / path, "damaged-weights", read_weights)


def events(store: Store) -> Iterator[Finding]:
    """What was recorded of patches."""
    for path in store.files("events", ".json", {}):
        yield from _read(store.root / path, "damaged-event", lambda path: Event(**json.loads(read_regular(path))))


def _read(path: Path, kind: str, read: Callable[[Path], Any]) -> Iterator[Finding]:
    """What is said of a file that `read` reads."""
    try:
        read(path)
    except FileNotFoundError:
        return
    except (OSError, StoreProblem, ValueError, TypeError, RecursionError) as error:
        yield unusable(path, kind, error)


def backups(store: Store) -> Iterator[Finding]:
    """Originals of patched files: each folder is named by the SHA-256 of what is in it."""
    for name in store.folder_names("backups", {}):
        try:
            found = hashlib.sha256(read_regular(store.backups / name / "actor.py")).hexdigest()
        except OSError as error:
            yield Finding(store.backups / name, "damaged-backup", f"its actor.py cannot be read: {error.strerror}")
            continue
        if found != name:
            yield Finding(store.backups / name, "damaged-backup", f"the SHA-256 of its actor.py begins with {found[:16]}")


def rings(store: Store) -> Iterator[Finding]:
    """Rings of this machine: damaged ones, and those of dead processes that hold calls."""
    for path in (path for folder in {place(store), store.root / "rings"} for path in ring_paths(folder)):
        try:
            ring = read_ring(path)
        except (StoreProblem, OSError) as error:
            yield unusable(path, "damaged-ring", error)
            continue
        if ring.damaged:
            yield Finding(path, "damaged-ring", "; ".join(ring.damaged)[:200])
        if ring.slots and not ring.alive:
            yield Finding(path, "calls-in-ring", f"{len(ring.slots)} calls")


def models(store: Store) -> Iterator[Finding]:
    """Models that actordbg built: configuration and weights are there."""
    for name in store.folder_names("models", {}):
        folder = store.models / name
        try:
            json.loads(read_regular(folder / "config.json"))
            if not any(one.endswith(".safetensors") for one in os.listdir(folder)):
                yield Finding(folder, "damaged-model", "it has no weights")
        except (OSError, ValueError) as error:
            yield Finding(folder, "damaged-model", f"config.json cannot be read: {error}")
