"""Reads files that recorded processes write: counters, hashes of weights, transfers of weights, turns of rollouts.

msgspec checks that every value has the type of its field.

Example: `read_weights(path).parameters["lm_head.weight"].sha256`
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.dump_record import DumpRecord, is_plain_name
from actordbg.formats.record_reading import MOST_VALUES, parse_timestamp, strict_json
from actordbg.formats.ringfile import COUNTERS_FORMAT
from actordbg.formats.store_files import read_regular
from actordbg.formats.turn_record import Trajectory
from actordbg.formats.weight_hashes import RUN_FILE_FORMAT, WEIGHTS, RunFile, WeightRecord
from actordbg.formats.weight_syncs import WeightSync

RECORDED_WEIGHTS = "recorded_weights"
"""Key in a replay's resolved facts: whether the replay has the recorded weights."""
MET_WEIGHTS = "met_weights"
"""Key in a replay's resolved facts: which recorded weights the replay has. same: the steps whose weights it has. other: the step,
by file, of weights that it does not have. unknown: number of inputs for which neither is known."""
F = TypeVar("F", bound=RunFile)


def read_run_file(kind: type[F], path: Path) -> F:
    """Read and check a published file. Raises OSError if unreadable, CorruptDump if invalid, NewerFormat for a later version."""
    try:
        data = strict_json(read_regular(path), json.loads, MOST_VALUES)
        if type(version := data["format"]) is not int:
            raise ValueError("its format is not a number")
        if version > RUN_FILE_FORMAT:
            hint = "upgrade actordbg"
            raise NewerFormat(f"{path} has format {version}, this actordbg reads {RUN_FILE_FORMAT}", hint=hint)
        if not is_plain_name(data["run"]):
            raise ValueError("its run has no plain name")
        return msgspec.convert(data, kind)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "run `actordbg store fsck --repair` to move it away"
        raise CorruptDump(f"{path} is not {kind.what}: {error}", hint=hint) from None


read_weights = partial(read_run_file, WeightRecord)
read_sync = partial(read_run_file, WeightSync)
read_trajectory = partial(read_run_file, Trajectory)


def weights_of(root: Path, record: DumpRecord) -> Path | None:
    """Return the file of a store with the weights of this call; None if there is none."""
    files = weight_files(root / WEIGHTS / record.run, record.pid, record.instance)
    return max(((call, path) for call, path in files if call <= record.call_index), default=(0, None))[1]


def weight_files(folder: Path, pid: int | None, instance: str | None) -> list[tuple[int, Path]]:
    """Return the files of one instance in a run's folder, by the first call that has the weights, in order."""
    process = re.escape(instance or "-")
    named = re.compile(rf"[^.].*-{pid}-{process}-(\d{{6,12}})\.json")
    try:
        return sorted((int(match[1]), folder / name) for name in os.listdir(folder) if (match := named.fullmatch(name)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def met_weights(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return MET_WEIGHTS of a replay's resolved facts; {} if it is missing or malformed."""
    met: dict[str, Any] = resolved.get(MET_WEIGHTS) or {}
    sound = isinstance(met, dict) and isinstance(met.get("same"), list) and isinstance(met.get("other"), dict)
    return met if sound else {}


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _RingFacts(msgspec.Struct):
    path: str | None = None
    in_flight_s: float | None = None


class _Counters(msgspec.Struct):
    """The fields of a counters file that are shown or summed."""

    format: Literal[COUNTERS_FORMAT]  # type: ignore[valid-type]
    run: str
    rank: _Count
    host: str
    pid: _Count
    instance: str
    since: str
    calls: _Count
    captured: _Count
    bytes: _Count
    pending: _Count
    queue_bytes: _Count
    generation: _Count
    rotated: _Count
    rotated_bytes: _Count
    outputs_dropped: _Count
    dropped: dict[str, _Count]
    sampled_out: dict[str, _Count]
    triggered: dict[str, _Count]
    state: str
    heartbeat: str
    role: str | None = None
    last_error: str | None = None
    ring: _RingFacts | None = None


def read_counters(path: Path) -> dict[str, Any]:
    """Read and check a published counters file. Raises CorruptDump if it is invalid; callers then skip and count it."""
    try:
        data: dict[str, Any] = strict_json(read_regular(path))
        msgspec.convert(data, _Counters)
    except (OSError, ValueError) as error:
        hint = "the next update replaces it; else upgrade actordbg, or delete the file"
        raise CorruptDump(f"{path} has no counters of this version: {error}", hint=hint) from None
    parse_timestamp(data["heartbeat"])
    return data
