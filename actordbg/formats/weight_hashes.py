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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.dump_record import DumpRecord, kinds_of
from actordbg.formats.store_files import read_regular

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
WEIGHTS_FORMAT = 1
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


@dataclass(frozen=True)
class WeightRecord:
    """The parameters of a model at a step, as one rank held them. call_index: the first recorded call with these weights."""

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

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps({"format": WEIGHTS_FORMAT, **asdict(self)}, separators=(",", ":"))


def read_weights(path: Path) -> WeightRecord:
    """Read and check a published file. Raises OSError if unreadable, CorruptDump if invalid, NewerFormat for a later version."""
    try:
        data = json.loads(read_regular(path))
        if type(version := data.pop("format")) is not int:
            raise ValueError("its format is not a number")
        if version > WEIGHTS_FORMAT:
            raise NewerFormat(
                f"hashes of weights have format {version}, this actordbg reads {WEIGHTS_FORMAT}", hint="upgrade actordbg"
            )
        for name, parameter in data["parameters"].items():
            part = parameter["part"] or [0, 0]
            if not all(type(size) is int and 0 <= size < 2**62 for size in (*parameter["shape"], *part)) or len(part) != 2:
                raise ValueError("a shape is invalid")
            parameter |= {"shape": tuple(parameter["shape"]), "part": parameter["part"] and tuple(parameter["part"])}
            if parameter["sha256"] is not None and not _HEX.match(parameter["sha256"]):
                raise ValueError("a hash is invalid")
            data["parameters"][name] = typed_record(ParameterHash, parameter)
        return typed_record(WeightRecord, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDump(
            f"{path} is not a file of weight hashes: {error}", hint="run `actordbg store fsck --repair` to move it away"
        ) from None


def typed_record(record: type[T], data: dict[str, Any]) -> T:
    """Build a dataclass from a file's values. Raises ValueError for a value of another type than its annotation."""
    if wrong := [name for name, kinds in kinds_of(record).items() if name in data and type(data[name]) not in kinds]:
        raise ValueError(f"{wrong[0]} has the wrong type")
    return record(**data)


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
