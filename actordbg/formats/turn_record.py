"""A rollout's token ids, turn by turn, as the engine got and sampled them (`run --turns`): a file per trajectory.

    store/turns/<run>/<host>-<pid>-<number>.json

`trained` has the ids that the rollout handed to the trainer for all turns together, and the ranges in them that count as actions.
Reading imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.store_files import read_regular
from actordbg.formats.weight_hashes import typed_record

TURNS_FORMAT = 1
TURNS = "turns"
"""The folder in a store."""


@dataclass(frozen=True)
class SampledTurn:
    """A request to the engine. given, sampled: token ids. text: what the engine said that it sampled."""

    given: tuple[int, ...]
    sampled: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True)
class Trajectory:
    """The turns of a conversation, and what the trainer got of it. bos, eos: ids of the tokenizer; None if it has none."""

    run: str
    host: str
    pid: int
    number: int
    timestamp: str
    bos: int | None
    eos: int | None
    turns: tuple[SampledTurn, ...]
    trained: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.host}-{self.pid}-{self.number:06d}.json"

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"format": TURNS_FORMAT, **asdict(self)}, separators=(",", ":"))


def read_trajectory(path: Path) -> Trajectory:
    """Read and check a published file. Raises OSError if unreadable, CorruptDump if invalid, NewerFormat for a later version."""
    try:
        data = json.loads(read_regular(path))
        if type(version := data.pop("format")) is not int:
            raise ValueError("its format is not a number")
        if version > TURNS_FORMAT:
            hint = "upgrade actordbg"
            raise NewerFormat(f"recorded turns have format {version}, this actordbg reads {TURNS_FORMAT}", hint=hint)
        turns = [
            typed_record(SampledTurn, {**each, **{k: _ids(each[k]) for k in ("given", "sampled")}}) for each in data["turns"]
        ]
        ranges = tuple(_ids(each) for each in data["ranges"])
        if any(len(each) != 2 for each in ranges):
            raise ValueError("a range is invalid")
        return typed_record(Trajectory, {**data, "turns": tuple(turns), "trained": _ids(data["trained"]), "ranges": ranges})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "run `actordbg store fsck --repair` to move it away"
        raise CorruptDump(f"{path} has no recorded turns: {error}", hint=hint) from None


def _ids(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise ValueError("a token id is invalid")
    return tuple(values)
