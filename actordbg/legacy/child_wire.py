"""What the decoding child sends back: one JSON object per file, checked again by the parent.

The tensors do not travel: the parent has the file's bytes and the child answers with places in them. So even a child
that was somehow taken over could only lie about offsets, and `answer_to_dump` checks every one against the file's size.

Framing: a request is 8 bytes of length (little endian) and the file's bytes; an answer is 4 bytes of length and JSON,
`{"ok": {...}}` or `{"error": code, "message": text}`. Standard library only.
"""

from __future__ import annotations

import json
from typing import Any

from actordbg.base.errors import ActordbgError, CorruptDump, UnsafeInput
from actordbg.legacy.decode import (
    FLAGS,
    MAX_RANK,
    TENSORS,
    LegacyDump,
    LegacyTensor,
    Scalar,
    check_shapes,
    check_tensor,
    parse_stamp,
)
from actordbg.legacy.pickle_storage import DTYPES
from actordbg.legacy.pickle_values import CORRUPT_HINT, UNSAFE_HINT

MAX_ANSWER = 4 * 2**20
_SIZES = dict(DTYPES.values())
_FIELDS = ("dtype", "shape", "strides", "start", "stop")
_HINTS = {UnsafeInput.code: (UnsafeInput, UNSAFE_HINT), CorruptDump.code: (CorruptDump, CORRUPT_HINT)}


def dump_to_answer(dump: LegacyDump) -> bytes:
    """A decoded dump as JSON. Plain dicts by hand: `dataclasses.asdict` calls `id`, which the child's audit hook forbids."""
    tensors = {name: dict(zip(_FIELDS, _values(tensor), strict=True)) for name, tensor in dump.tensors.items()}
    data = {"tensors": tensors, "arguments": dump.arguments, "rank": dump.rank, "stamp": dump.stamp}
    return json.dumps({"ok": data}).encode()


def _values(tensor: LegacyTensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.strides, tensor.start, tensor.stop


def error_to_answer(error: ActordbgError) -> bytes:
    """A refusal as JSON."""
    return json.dumps({"error": error.code, "message": error.message[:500]}).encode()


def answer_to_dump(answer: bytes, size: int) -> LegacyDump:
    """The dump that an answer about a file of `size` bytes describes, everything checked again.

    Raises the error that the child reported, or UnsafeInput if the answer itself is not one that a sound child gives.
    """
    try:
        data = json.loads(answer)
        if "error" in data:
            kind, hint = _HINTS[data["error"]]
            raise kind(str(data["message"]), hint=hint)
        return _dump(data["ok"], size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnsafeInput("the decoding process gave an answer that makes no sense", hint=UNSAFE_HINT) from None


def _dump(data: dict[str, Any], size: int) -> LegacyDump:
    tensors = {key: _tensor(key, data["tensors"][key], size) for key in TENSORS if key in data["tensors"]}
    arguments = {str(key): _scalar(key, value) for key, value in data["arguments"].items()}
    timestamp = parse_stamp(data["stamp"])
    if type(data["rank"]) is not int or not 0 <= data["rank"] < MAX_RANK or timestamp is None:
        raise ValueError(data["rank"])
    dump = LegacyDump(tensors, arguments, data["rank"], data["stamp"], timestamp)
    check_shapes(dump)
    return dump


def _tensor(key: str, data: dict[str, Any], size: int) -> LegacyTensor:
    numbers = (*data["shape"], *data["strides"], data["start"], data["stop"])
    if not all(type(n) is int for n in numbers):
        raise ValueError(key)
    tensor = LegacyTensor(
        str(data["dtype"]),
        _SIZES[data["dtype"]],
        tuple(data["shape"]),
        tuple(data["strides"]),
        data["start"],
        data["stop"],
    )
    check_tensor(key, tensor, size)
    return tensor


def _scalar(key: str, value: Any) -> Scalar:
    if key not in (*FLAGS, *TENSORS, "packed_seq_lens"):
        raise ValueError(key)
    if value is None or type(value) is bool:
        return value
    if type(value) is not list or not all(type(n) is int for n in value):
        raise TypeError(key)
    return value
