"""Reads files that recorded processes leave in a run's folder: hashes of weights, transfers of weights, turns of rollouts.

Such a file is the JSON of its dataclass (`RunFile`), and msgspec checks that every value has the type of its field.

Example: `read_weights(path).parameters["lm_head.weight"].sha256`
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.store_files import read_regular
from actordbg.formats.turn_record import Trajectory
from actordbg.formats.weight_hashes import RUN_FILE_FORMAT, RunFile, WeightRecord
from actordbg.formats.weight_syncs import WeightSync

F = TypeVar("F", bound=RunFile)


def read_run_file(kind: type[F], path: Path) -> F:
    """Read and check a published file. Raises OSError if unreadable, CorruptDump if invalid, NewerFormat for a later version."""
    try:
        data = json.loads(read_regular(path))
        if type(version := data["format"]) is not int:
            raise ValueError("its format is not a number")
        if version > RUN_FILE_FORMAT:
            hint = "upgrade actordbg"
            raise NewerFormat(f"{path} has format {version}, this actordbg reads {RUN_FILE_FORMAT}", hint=hint)
        return msgspec.convert(data, kind)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "run `actordbg fsck --repair` to move it away"
        raise CorruptDump(f"{path} is not {kind.what}: {error}", hint=hint) from None


read_weights = partial(read_run_file, WeightRecord)
read_sync = partial(read_run_file, WeightSync)
read_trajectory = partial(read_run_file, Trajectory)
