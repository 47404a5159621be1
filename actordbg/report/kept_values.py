"""Log-probs and masks that a replay kept, and token ids of a dump, as lists of numbers without torch.

A page shows a few dumps, and must not need the training environment. So the header of a safetensors file is read and then only
the bytes of what is wanted: gradients in the same file are never touched. What cannot be read is None: a page without a picture
is better than none.
"""

from __future__ import annotations

import array
import json
import math
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from actordbg.base.errors import ActordbgError
from actordbg.formats import payload_check
from actordbg.formats.dump_record import TensorSpec
from actordbg.formats.dumpfile import Entry
from actordbg.formats.journal import TENSORS
from actordbg.formats.store_files import open_regular
from actordbg.store.layout import Store
from actordbg.store.places import read_payload

MOST_HEADER, MOST_VALUES = 2**26, 2**24
Rows = list[list[float]]
_CODES = {"F64": "d", "F32": "f", "I64": "q", "I32": "i", "U8": "B", "BOOL": "B", "BF16": "H", "F16": "e"}
_STORED = {"bool": "B", "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "int32": "i", "int64": "q"}


@dataclass(frozen=True)
class KeptRows:
    """One dump of one replay, row by row: log-probs in nats, and whether the mask selects each."""

    log_probs: Rows
    mask: Rows


@dataclass(frozen=True)
class TokenRows:
    """The tokens of a dump, row by row [B, S]: ids, whether they are real, and whether they are actions [B, A]."""

    ids: Rows
    real: Rows | None
    actions: Rows | None


def kept_rows(store: Store, replay_id: str, dump_id: str) -> KeptRows | None:
    """What a replay kept of a dump; None if that is gone, or unlike what it should be."""
    path = store.replays / replay_id / TENSORS / f"{dump_id}.safetensors"
    try:
        with open(open_regular(path), "rb") as file:
            found = _read(file, ("log_probs", "mask"))
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None
    log_probs, mask = found
    alike = [len(row) for row in log_probs] == [len(row) for row in mask]
    return KeptRows(log_probs, mask) if alike else None


def _read(file: BinaryIO, names: Sequence[str]) -> list[Rows]:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MOST_HEADER:
        raise ValueError("its header is too large")
    header = json.loads(file.read(length))
    return [_rows(file, header[name], 8 + length) for name in names]


def _rows(file: BinaryIO, said: dict[str, Any], start: int) -> Rows:
    begin, end = said["data_offsets"]
    rows, columns = said["shape"]
    if not 0 <= begin <= end <= begin + 8 * MOST_VALUES:
        raise ValueError("its tensors are too large")
    file.seek(start + begin)
    return _split(_numbers(file.read(end - begin), _CODES[said["dtype"]], said["dtype"] == "BF16"), rows, columns)


def _numbers(data: bytes, code: str, bf16: bool = False) -> list[float]:
    """Little-endian numbers; bfloat16 is the upper half of a float32."""
    if bf16:
        data, code = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)), "f"
    if code == "e":
        return [value for (value,) in struct.iter_unpack("<e", data)]
    values = array.array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return list(values)


def _split(values: Sequence[float], rows: int, columns: int) -> Rows:
    if len(values) != rows * columns:
        raise ValueError("its shape is not its size")
    return [list(values[at * columns : (at + 1) * columns]) for at in range(rows)]


def token_rows(store: Store, path: str) -> TokenRows | None:
    """The tokens of the dump at this path below the store; None if it is gone or damaged."""
    try:
        record, payload = read_payload(store.root / path, hash_too=False)
        entries = payload_check.check(record, payload, path)
        read = _reader(payload, entries)
        found = {name: read(name, record.tensors[name]) for name in record.tensors if name in _WANTED}
    except (ActordbgError, OSError, ValueError, KeyError):
        return None
    ids = found.get("sequences")
    return None if ids is None else TokenRows(ids, found.get("attention_mask"), found.get("action_mask"))


_WANTED = ("sequences", "attention_mask", "action_mask")


def _reader(payload: bytes, entries: dict[str, Entry]) -> Callable[[str, TensorSpec], Rows]:
    def part(key: str) -> list[float]:
        entry = entries[key]
        code = _STORED[entry.dtype]
        count = math.prod(entry.shape)
        return _numbers(payload[entry.offset : entry.offset + count * array.array(code).itemsize], code)

    def read(name: str, spec: TensorSpec) -> Rows:
        parts = [part(key) for key, _ in spec.parts(name)]
        values = parts[0] if len(parts) == 1 else [low + 2**16 * high for low, high in zip(*parts, strict=True)]
        rows, columns = spec.shape
        return _split(values, rows, columns)

    return read
