"""A transfer of the weights from the trainer to its rollout engines: a file per transfer and sending rank (`run --hash-weights`).

    store/syncs/<run>/<rank>-<host>-<pid>-<number>.json

For each parameter it has the SHA-256 of the bytes that the trainer had and sent, and of those that each engine was given to load,
as they arrived: engines fuse parameters (q, k and v) only then. Reading imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.store_files import read_regular
from actordbg.formats.weight_hashes import typed_record

SYNCS_FORMAT = 1
SYNCS = "syncs"
"""The folder in a store."""


@dataclass(frozen=True)
class EngineAnswer:
    """What an engine did with a parameter. sha256: of what it was given to load; None if nothing reached its loader.

    loaded: the number of its own parameters that it changed, if it says so. recorded: whether the engine's process was recorded.
    """

    recorded: bool = False
    sha256: str | None = None
    loaded: int | None = None


@dataclass(frozen=True)
class SentParameter:
    """A trainable parameter in a transfer. had: hash of the trainer's bytes at the send; None if it was not sent, or if hashing
    failed: only a parameter without answers was never sent.

    sent: hash of what went out, where the transport shows it. answers: of each engine.
    """

    dtype: str
    shape: tuple[int, ...]
    had: str | None = None
    sent: str | None = None
    answers: tuple[EngineAnswer, ...] = ()


@dataclass(frozen=True)
class WeightSync:
    """A transfer. number: of this process, from 0. step: the optimizer steps before it, if known. engines: their number."""

    run: str
    rank: int
    host: str
    pid: int
    number: int
    step: int | None
    timestamp: str
    seconds: float
    engines: int
    parameters: dict[str, SentParameter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.rank:04d}-{self.host}-{self.pid}-{self.number:06d}.json"

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"format": SYNCS_FORMAT, **asdict(self)}, separators=(",", ":"))


def read_sync(path: Path) -> WeightSync:
    """Read and check a published file. Raises OSError if unreadable, CorruptDump if invalid, NewerFormat for a later version."""
    try:
        data = json.loads(read_regular(path))
        if type(version := data.pop("format")) is not int:
            raise ValueError("its format is not a number")
        if version > SYNCS_FORMAT:
            hint = "upgrade actordbg"
            raise NewerFormat(f"transfers of weights have format {version}, this actordbg reads {SYNCS_FORMAT}", hint=hint)
        data["parameters"] = {name: _parameter(each) for name, each in data["parameters"].items()}
        return typed_record(WeightSync, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "run `actordbg store fsck --repair` to move it away"
        raise CorruptDump(f"{path} is not a transfer of weights: {error}", hint=hint) from None


def _parameter(data: dict[str, Any]) -> SentParameter:
    data = {**data, "shape": tuple(data["shape"]), "answers": tuple(typed_record(EngineAnswer, each) for each in data["answers"])}
    if not all(type(size) is int and 0 <= size < 2**62 for size in data["shape"]):
        raise ValueError("a shape is invalid")
    return typed_record(SentParameter, data)
