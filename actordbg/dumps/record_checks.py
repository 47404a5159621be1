"""Checks of replays and of what was made from them (comparisons, noise floors, matrices, memory), and of what recording and
patching leave beside dumps: switches, counters, rings, events, backups, built models.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.capture.control import Control
from actordbg.catalog.record_rows import ID, RECORDS
from actordbg.dumps.finding import Finding, unusable
from actordbg.formats.dumpfile import DEFAULT_CAP, payload_entries
from actordbg.formats.recording_reading import read_counters, read_ring
from actordbg.formats.ringfile import place, ring_paths
from actordbg.formats.store_files import read_regular
from actordbg.formats.weight_hashes import WEIGHTS, read_weights
from actordbg.install.patching import Event
from actordbg.records.journal import SPEC, TENSORS, read_chunk, result_of
from actordbg.records.replay_record import PASSED, ReplaySpec
from actordbg.store.layout import Store, known_regular

_TENSORS = ".safetensors"


def replays(store: Store, deep: bool) -> Iterator[Finding]:
    """Every replay: its spec, its journals, and that results and kept tensors are of its inputs."""
    for name in store.folder_names("replays", {}):
        folder = store.replays / name
        try:
            spec = ReplaySpec.from_file(folder / SPEC)
        except StoreProblem as error:
            yield unusable(folder / SPEC if isinstance(error, NewerFormat) else folder, "damaged-spec", error)
            continue
        if spec.replay_id != name:
            yield Finding(folder, "damaged-spec", f"its spec.json is that of {spec.replay_id!r:.80}")
            continue
        yield from _replay(store, folder, spec, deep)


def _replay(store: Store, folder: Path, spec: ReplaySpec, deep: bool) -> Iterator[Finding]:
    inputs, passed = {item.dump_id for item in spec.inputs}, set()
    for path in (store.root / one for one in store.files(f"replays/{folder.name}", ".jsonl", {})):
        try:
            chunk = read_chunk(path)
        except OSError as error:
            yield unusable(path, "damaged-journal", error)
            continue
        if chunk.skipped:
            yield Finding(path, "damaged-journal", f"{chunk.skipped} lines cannot be read")
        if chunk.offset < chunk.size:
            yield Finding(path, "torn-journal", f"{chunk.size - chunk.offset} bytes behind its last whole line")
        results = [result_of(event) for event in chunk.events if event["event"] == "end"]
        passed |= {result.dump_id for result in results if result.status == PASSED}
        for result in results:
            if result.replay_id != spec.replay_id:
                yield Finding(path, "foreign-result", f"it has a result of replay {result.replay_id!r:.80}")
                break
            if result.dump_id not in inputs:
                yield Finding(path, "foreign-result", f"it has a result of {result.dump_id!r:.80}, which is no input")
                break
    for path in (store.root / name for name in store.files(f"replays/{folder.name}/{TENSORS}", _TENSORS, {})):
        if path.name.removesuffix(_TENSORS) not in inputs:
            yield Finding(path, "stray-tensors")
        if deep:
            try:
                payload_entries(read_regular(known_regular(path, DEFAULT_CAP), DEFAULT_CAP), path.name)
            except (OSError, StoreProblem) as error:
                yield unusable(path, "damaged-tensors", error)
    if spec.config.keep_tensors:
        for dump_id in sorted(passed & inputs):
            path = folder / TENSORS / f"{dump_id}{_TENSORS}"
            if not os.path.lexists(path):
                yield Finding(path, "missing-tensors")


def records(store: Store, deep: bool) -> Iterator[Finding]:
    """Every record of the store: it can be read, is the one that its name says, and its replays are there."""
    for folder, kind in RECORDS.items():
        for path in (store.root / one for one in store.files(folder, ".json", {})):
            try:
                record: Any = kind.from_json(read_regular(path))
            except (OSError, StoreProblem) as error:
                yield unusable(path, "damaged-record", error)
                continue
            own: str = getattr(record, ID[folder])
            if f"{own}.json" != path.name:
                yield Finding(path, "damaged-record", f"it is that of {own!s:.80}")
                continue
            parts = (record.a, record.b) if folder == "comparisons" else record.cells if folder == "matrices" else (record,)
            gone = [part.replay_id for part in parts if part.replay_id and not (store.replays / str(part.replay_id)).is_dir()]
            if gone:
                yield Finding(path, "missing-replay", f"replay {gone[0]!s:.80} is gone")


def files_check(
    folder: str, kind: str, read: Callable[[Path], Any], *, by_run: bool = False, beside: str = ""
) -> Callable[[Store, bool], Iterator[Finding]]:
    """Make a check that reads every JSON file of a folder, or of its folders for each run, and one file `beside` it."""

    def look(store: Store, deep: bool) -> Iterator[Finding]:
        folders = [f"{folder}/{run}" for run in store.folder_names(folder, {})] if by_run else [folder]
        for path in (*([beside] if beside else ()), *(path for name in folders for path in store.files(name, ".json", {}))):
            try:
                read(store.root / path)
            except FileNotFoundError:
                continue
            except (OSError, StoreProblem, ValueError, TypeError, RecursionError) as error:
                yield unusable(store.root / path, kind, error)

    return look


switches = files_check("controls", "damaged-control", lambda path: Control.from_json(read_regular(path)), beside="control.json")
counters = files_check("counters", "damaged-counters", read_counters, by_run=True)
weights = files_check(WEIGHTS, "damaged-weights", read_weights, by_run=True)
events = files_check("events", "damaged-event", lambda path: Event(**json.loads(read_regular(path))))


def backups(store: Store, deep: bool) -> Iterator[Finding]:
    """Originals of patched files: each folder is named by the SHA-256 of what is in it."""
    for name in store.folder_names("backups", {}):
        try:
            found = hashlib.sha256(read_regular(store.backups / name / "actor.py")).hexdigest()
        except OSError as error:
            yield Finding(store.backups / name, "damaged-backup", f"its actor.py cannot be read: {error.strerror}")
            continue
        if found != name:
            yield Finding(store.backups / name, "damaged-backup", f"the SHA-256 of its actor.py begins with {found[:16]}")


def rings(store: Store, deep: bool) -> Iterator[Finding]:
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


def models(store: Store, deep: bool) -> Iterator[Finding]:
    """Models that actordbg built: configuration and weights are there."""
    for name in store.folder_names("models", {}):
        folder = store.models / name
        try:
            json.loads(read_regular(folder / "config.json"))
            if not any(one.endswith(".safetensors") for one in os.listdir(folder)):
                yield Finding(folder, "damaged-model", "it has no weights")
        except (OSError, ValueError, RecursionError) as error:
            yield Finding(folder, "damaged-model", f"config.json cannot be read: {error}")
