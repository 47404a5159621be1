"""Hashes of the weights at a recorded call: a file per model, step and rank, on request (`run --hash-weights`).

    store/weights/<run>/<rank>-<host>-<pid>-<instance>-<call>.json

For each parameter, the file has its whole shape, its dtype, and the SHA-256 of the bytes that this rank held. For a shard that
is a run of elements of the flattened parameter (FSDP2 over dimension 0, a ZeRO-3 partition), it also has the range of elements,
so that a replay can hash the same elements of its own weights, however they are sharded. The file holds from its call until the
next file of the same instance.

Only hashing imports torch, never reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from actordbg.formats.dump_record import DumpRecord

if TYPE_CHECKING:
    import torch

RUN_FILE_FORMAT = 1
"""Format of a `RunFile`."""
WEIGHTS = "weights"
"""The folder in a store."""
RECORDED_WEIGHTS = "recorded_weights"
"""Key in a replay's resolved facts: whether the replay has the recorded weights."""
MET_WEIGHTS = "met_weights"
"""Key in a replay's resolved facts: which recorded weights the replay has. same: the steps whose weights it has. other: the step,
by file, of weights that it does not have. unknown: number of inputs for which neither is known."""
_PIECE = 2**24
"""Elements that are copied to the host at a time."""
_HEX = re.compile(r"[0-9a-f]{64}\Z")


def check_sizes(sizes: Iterable[int], most: int = 2**62) -> None:
    """Raise ValueError for sizes or token ids that cannot be."""
    if not all(0 <= size < most for size in sizes):
        raise ValueError("a number is out of range")


@dataclass(frozen=True)
class RunFile:
    """A JSON file that a recorded process leaves in a run's folder; `records.run_files` reads it. what: the file, in words."""

    what: ClassVar[str]

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"format": RUN_FILE_FORMAT, **asdict(self)}, separators=(",", ":"))


@dataclass(frozen=True)
class ParameterHash:
    """The hash of a parameter. part: (first, count) of the hashed elements of the flattened parameter, None for all.

    sha256: None if nothing was hashed; `why_not` says why.
    """

    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, int] | None = None
    sha256: str | None = None
    why_not: str = ""

    def __post_init__(self) -> None:
        check_sizes((*self.shape, *(self.part or ())))
        if self.sha256 is not None and not _HEX.match(self.sha256):
            raise ValueError("a hash is invalid")


@dataclass(frozen=True)
class WeightRecord(RunFile):
    """The parameters of a model at a step, as one rank held them. call_index: the first recorded call with these weights."""

    what = "a file of weight hashes"
    run: str
    rank: int
    host: str
    pid: int
    instance: str
    call_index: int
    step: int | None
    timestamp: str
    seconds: float
    nbytes: int
    parameters: dict[str, ParameterHash] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the file's name."""
        return f"{self.rank:04d}-{self.host}-{self.pid}-{self.instance}-{self.call_index:06d}.json"


def weights_of(root: Path, record: DumpRecord) -> Path | None:
    """Return the file of a store with the weights of this call; None if there is none."""
    folder = root / WEIGHTS / record.run
    named = re.compile(rf"[^.].*-{record.pid}-{re.escape(record.instance or '-')}-(\d{{6,12}})\.json")
    try:
        candidates = [(int(match[1]), name) for name in os.listdir(folder) if (match := named.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return None
    held = [candidate for candidate in candidates if candidate[0] <= record.call_index]
    return folder / max(held)[1] if held else None


def met_weights(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return MET_WEIGHTS of a replay's resolved facts; {} if it is missing or malformed."""
    met: dict[str, Any] = resolved.get(MET_WEIGHTS) or {}
    sound = isinstance(met, dict) and isinstance(met.get("same"), list) and isinstance(met.get("other"), dict)
    return met if sound else {}


def sha256_of(tensor: torch.Tensor) -> str:
    """Hash a tensor's elements in order, as they are stored, copying them to the host in pieces. Returns the SHA-256 in hex."""
    import torch

    digest = hashlib.sha256()
    for piece in tensor.detach().reshape(-1).split(_PIECE):  # type: ignore[no-untyped-call]
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
