"""An old actor-input pickle: the call that the old recorder wrote, from its tree (`pickle_tree`), checked.

The old recorder wrote `pickle.dump` of one dict per call, one file per rank and call::

    sequences        int64 [B, S]                 attention_mask   [B, S] or None
    action_mask      [B, A], A <= S, or None      packed_seq_lens  None or a list of integers
    return_output, allgather_logits, return_logprobs, return_entropy    booleans
    timestamp        "20250619_052608_430740"     rank, batch_size, seq_len   integers

`old_call` recognizes exactly this dict: unknown keys, other types and other shapes are refused. Its tensors are views of the
file's bytes, with dtype and strides as pickled.

The timestamp is the local time of a machine whose time zone nobody wrote down. It is taken as UTC, so that order and
distances are right and importing twice, anywhere, gives the same result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from actordbg.dumps.pickle_notes import corrupt
from actordbg.formats.encoding import PlainTensor

Scalar = bool | int | list[int] | None

FLAGS = ("return_output", "allgather_logits", "return_logprobs", "return_entropy")
TENSORS = ("sequences", "action_mask", "attention_mask")
KEYS = frozenset((*TENSORS, *FLAGS, "packed_seq_lens", "timestamp", "rank", "batch_size", "seq_len"))
REQUIRED = frozenset(("sequences", "timestamp", "rank"))
MAX_RANK = 2**20
_STAMP = re.compile(r"(\d{4})(\d\d)(\d\d)_(\d\d)(\d\d)(\d\d)_(\d{6})\Z", re.ASCII)


@dataclass(frozen=True)
class OldCall:
    """A call of an old pickle. `timestamp`: ISO-8601 UTC as in a `DumpRecord`."""

    tensors: dict[str, PlainTensor]
    arguments: dict[str, Scalar]
    rank: int
    timestamp: str


def old_call(content: Any) -> OldCall:
    """Return the call that a pickle holds. content: its value, with a `PlainTensor` for each tensor. Raises CorruptDump."""
    if type(content) is not dict:
        raise corrupt("the pickle is not the dict of an actor dump")
    missing, unknown = sorted(REQUIRED - content.keys()), sorted(content.keys() - KEYS)
    if missing:
        raise corrupt(f"not an actor dump: it has no {', '.join(missing)}")
    if unknown:
        raise corrupt(f"not an actor dump: unexpected key {unknown[0][:80]!r}")
    given = {key: content[key] for key in TENSORS if content.get(key) is not None}
    for key, tensor in given.items():
        if not isinstance(tensor, PlainTensor):
            raise corrupt(f"{key} is not a tensor")
        if tensor.dtype == "bool" and tensor.values.view(np.uint8).max(initial=0) > 1:
            raise corrupt(f"{key} is boolean and holds something other than 0 and 1")
    arguments = {key: _argument(key, content[key]) for key in (*FLAGS, "packed_seq_lens") if key in content}
    arguments |= {key: None for key in TENSORS if key in content and content[key] is None}
    stamp, rank = content["timestamp"], content["rank"]
    timestamp = parse_stamp(stamp) if type(stamp) is str else None
    if timestamp is None:
        raise corrupt("its timestamp is not like 20250619_052608_430740")
    if type(rank) is not int or not 0 <= rank < MAX_RANK:
        raise corrupt("its rank is invalid")
    _check_shapes(given)
    for key, actual in zip(("batch_size", "seq_len"), given["sequences"].values.shape, strict=True):
        if key in content and (type(content[key]) is not int or content[key] != actual):
            raise corrupt(f"its {key} is not that of sequences ({actual})")
    return OldCall(given, arguments, rank, timestamp)


def parse_stamp(text: str) -> str | None:
    """Convert 20250619_052608_430740 to 2025-06-19T05:26:08.430740Z (UTC: see above); None if the text is not such a time."""
    match = _STAMP.match(text)
    if match is None:
        return None
    try:
        moment = datetime(*(int(part) for part in match.groups()))  # type: ignore[arg-type]
    except ValueError:
        return None
    return moment.isoformat(timespec="microseconds") + "Z"


def _check_shapes(tensors: dict[str, PlainTensor]) -> None:
    """Refuse tensors whose shapes do not belong together: [B, S], [B, S], [B, A] with A <= S."""
    sequences = tensors.get("sequences")
    if sequences is None:
        raise corrupt("sequences is missing or None")
    shape = sequences.values.shape
    if len(shape) != 2 or 0 in shape or sequences.dtype not in ("int64", "int32"):
        raise corrupt("sequences is not a matrix of integers [batch, length]")
    if tensors.get("attention_mask", sequences).values.shape != shape:
        raise corrupt("attention_mask and sequences have different shapes")
    action = tensors.get("action_mask", sequences).values.shape
    if len(action) != 2 or action[0] != shape[0] or action[1] > shape[1]:
        raise corrupt("action_mask is not [batch, actions] with actions <= length")


def _argument(key: str, value: Any) -> Scalar:
    """Refuse a plain argument of a type that the recorder never wrote."""
    if value is None or (key in FLAGS and type(value) is bool):
        return value
    sizes = value.tolist() if isinstance(value, np.ndarray) else value
    if key == "packed_seq_lens" and type(sizes) is list and all(type(size) is int and 0 <= size < 2**48 for size in sizes):
        return sizes
    raise corrupt(f"its {key} has a type that the recorder never wrote")
