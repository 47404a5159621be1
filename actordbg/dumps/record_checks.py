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
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
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
        passed |= {one.dump_id for one in results if one.status == PASSED}
        yield from _results(path, results, spec.replay_id, inputs)
    kept = store.files(f"replays/{folder.name}/{TENSORS}", _TENSORS, {})
    yield from _tensors(store, folder, [store.root / path for path in kept], inputs, deep)
    if spec.config.keep_tensors:
        for dump_id in sorted(passed & inputs):
            path = folder / TENSORS / f"{dump_id}{_TENSORS}"
            if not os.path.lexists(path):
                yield Finding(path, "missing-tensors")


def _results(path: Path, results: list[ResultRecord], replay_id: str, inputs: set[str]) -> Iterator[Finding]:
    for one in results:
        if one.replay_id != replay_id:
            yield Finding(path, "foreign-result", f"it has a result of replay {one.replay_id!r:.80}")
            return
        if one.dump_id not in inputs:
            yield Finding(path, "foreign-result", f"it has a result of {one.dump_id!r:.80}, which is no input")
            return


def _tensors(store: Store, folder: Path, paths: list[Path], inputs: set[str], deep: bool) -> Iterator[Finding]:
    for path in paths:
        if path.name.removesuffix(_TENSORS) not in inputs:
            yield Finding(path, "stray-tensors")
        if not deep:
            continue
        try:
            payload_entries(read_regular(known_regular(path, DEFAULT_CAP), DEFAULT_CAP), path.name)
        except (OSError, StoreProblem) as error:
            yield unusable(path, "damaged-tensors", error)


def records(store: Store) -> Iterator[Finding]:
    """Every record of the store: it can be read, is the one that its name says, and its replays are there."""
    for folder, kind in RECORDS.items():
        for path in (store.root / one for one in store.files(folder, ".json", {})):
            try:
                record = kind.from_json(read_regular(path))
            except (OSError, StoreProblem) as error:
                yield unusable(path, "damaged-record", error)
            else:
                yield from _references(store, path, folder, record)


def _references(store: Store, path: Path, folder: str, record: Any) -> Iterator[Finding]:
    own = getattr(record, ID[folder])
    if f"{own}.json" != path.name:
        yield Finding(path, "damaged-record", f"it is that of {own!s:.80}")
        return
    named = {
        "comparisons": lambda: [record.a.replay_id, record.b.replay_id],
        "noise": lambda: [record.replay_id],
        "memory": lambda: [record.replay_id],
        "matrices": lambda: [cell.replay_id for cell in record.cells],
    }[folder]()
    gone = [name for name in named if name and not (store.replays / str(name)).is_dir()]
    if gone:
        yield Finding(path, "missing-replay", f"replay {gone[0]!s:.80} is gone")


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
        except (OSError, ValueError, RecursionError) as error:
            yield Finding(folder, "damaged-model", f"config.json cannot be read: {error}")
