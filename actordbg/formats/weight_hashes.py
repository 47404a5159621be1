"""Hashes of the weights that a call met: one file for a model at a step, of each rank, on request (`run --hash-weights`).

    store/weights/<run>/<rank>-<host>-<pid>-<instance>-<call>.json

The file says of each parameter its whole shape, its dtype, and the SHA-256 of the bytes that this rank held of it. A shard that
is a run of elements of the flattened parameter (FSDP2 over dimension 0, a ZeRO-3 partition) says which: so a replay can hash
the same of its own, however it is divided itself. It holds from its call on until the next file of the same instance.

torch is imported where a tensor is hashed, never by a reader.
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
"""The folder of a store."""
RECORDED_WEIGHTS = "recorded_weights"
"""Under which name a replay's resolved facts say whether it has those weights."""
MET_WEIGHTS = "met_weights"
"""Beside it, which recorded weights the replay has. same: the steps of those. other: by file, the step of each that it has not.
unknown: of how many inputs neither is known."""
_PIECE = 2**24
"""Elements that are brought to the host at a time."""
_HEX = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class ParameterHash:
    """One parameter. part: (first element, elements) of the flattened whole that were hashed, None for all of them.

    sha256 is None where nothing was hashed; `why_not` says why.
    """

    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, int] | None = None
    sha256: str | None = None
    why_not: str = ""


@dataclass(frozen=True)
class WeightRecord:
    """The parameters of one model at one step, as one rank had them. call_index: the first recorded call that met them."""

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
        """The file's name."""
        return f"{self.rank:04d}-{self.host}-{self.pid}-{self.instance}-{self.call_index:06d}.json"

    def to_json(self) -> str:
        """As the file has it."""
        return json.dumps({"format": WEIGHTS_FORMAT, **asdict(self)}, separators=(",", ":"))


def read_weights(path: Path) -> WeightRecord:
    """A published file, checked. OSError where it cannot be read, CorruptDump if it is none, NewerFormat of a later version."""
    try:
        data = json.loads(read_regular(path))
        if type(version := data.pop("format")) is not int:
            raise ValueError("its format is not a number")
        if version > WEIGHTS_FORMAT:
            raise NewerFormat(
                f"hashes of weights have format {version}, this actordbg reads {WEIGHTS_FORMAT}", hint="upgrade actordbg"
            )
        for name, one in data["parameters"].items():
            part = one["part"] or [0, 0]
            if not all(type(size) is int and 0 <= size < 2**62 for size in (*one["shape"], *part)) or len(part) != 2:
                raise ValueError("a shape is none")
            one |= {"shape": tuple(one["shape"]), "part": one["part"] and tuple(one["part"])}
            if one["sha256"] is not None and not _HEX.match(one["sha256"]):
                raise ValueError("a hash is none")
            data["parameters"][name] = _typed(ParameterHash, one)
        return _typed(WeightRecord, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDump(f"{path} holds no hashes of weights: {error}", hint="`actordbg fsck --repair` moves it away") from None


def _typed(record: type[T], data: dict[str, Any]) -> T:
    if wrong := [name for name, kinds in kinds_of(record).items() if name in data and type(data[name]) not in kinds]:
        raise ValueError(f"{wrong[0]} is of another type")
    return record(**data)


def weights_of(root: Path, record: DumpRecord) -> Path | None:
    """The file of a store that says which weights this call met; None if there is none."""
    folder = root / WEIGHTS / record.run
    named = re.compile(rf"[^.].*-{record.pid}-{re.escape(record.instance or '-')}-(\d{{6,12}})\.json")
    try:
        found = [(int(match[1]), name) for name in os.listdir(folder) if (match := named.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return None
    held = [one for one in found if one[0] <= record.call_index]
    return folder / max(held)[1] if held else None


def met_weights(resolved: dict[str, Any]) -> dict[str, Any]:
    """What a replay's resolved facts say under MET_WEIGHTS; {} where nothing was recorded, or nothing sound is there."""
    met: dict[str, Any] = resolved.get(MET_WEIGHTS) or {}
    sound = isinstance(met, dict) and isinstance(met.get("same"), list) and isinstance(met.get("other"), dict)
    return met if sound else {}


def sha256_of(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's elements in order, as they are stored. Brought to the host in pieces."""
    import torch

    digest = hashlib.sha256()
    for piece in tensor.detach().reshape(-1).split(_PIECE):  # type: ignore[no-untyped-call]
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
