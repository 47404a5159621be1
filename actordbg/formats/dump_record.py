"""DumpRecord: the single versioned contract between the process that captured a call and everything that reads it.

A dump file begins with this record as JSON (see `actordbg.formats.dumpfile`), so an indexer reads everything about a call from
a few hundred bytes and decompresses nothing. Rules of the contract:

* one integer version; a reader refuses an unknown version, with the remedy, and never guesses;
* nothing from the environment (variables, tokens of services) is part of it;
* default values are left out of the JSON, and a tensor is a short list, because the tensors of real dumps compress to 5 kB and a
  record is read a hundred thousand times;
* tensors are described by their *logical* dtype, shape and strides, as the actor received them; `stored` is the narrower,
  lossless dtype of the payload.

This module is imported in the training process: standard library only. Example::

    record = parse_record(text)                            # actordbg.formats.record_reading
    record.seq_len, record.tensors["sequences"].shape      # 1861, (2, 1861)
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

RECORD_VERSION = 1

SUFFIX = ".safetensors.zst"
MAGIC = struct.pack("<I", 0x184D2A5A)
"""First bytes of a dump file: the number of a zstd skippable frame."""
MAX_RECORD = 4 * 2**20
"""Largest record, in bytes of JSON, that a reader accepts."""
MAX_DIMS = 16  # of a tensor
MAX_DEPTH = 64  # levels of nested lists and objects in a record
MAX_VALUES = 2**16
"""Most commas and opening brackets of a record, so that few bytes cannot become many objects."""

SAFETENSORS_DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "I16": ("int16", 2), "I32": ("int32", 4),
    "I64": ("int64", 8), "U16": ("uint16", 2), "U32": ("uint32", 4), "U64": ("uint64", 8), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "F32": ("float32", 4), "F64": ("float64", 8), "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
"""safetensors' dtype codes: our name, and bytes per element."""

SIZES = dict(SAFETENSORS_DTYPES.values())
"""Bytes per element of the dtypes that can be stored."""

UNKNOWN_TYPE = "an argument of type"  # of `extra`: a replay leaves such an argument out, and checks that it may
OUTPUT_PREFIX = "output."
"""Name prefix of tensors that the call returned (`dump enable --with-outputs`)."""

FORWARD, LOSS = POINTS = ("forward", "loss")
"""Capture points: the forward of an Actor, and a loss."""

RNG_PREFIX = "rng."
"""Name prefix of tensors with the RNG state before the call (`dump enable --with-rng`): `rng.cpu`, `rng.cuda:0`."""

UINT24 = "uint24"
"""`stored` of token ids below 2**24: low 16 and high 8 bits as two tensors, which compress 8% better than int32."""

SURROGATE = re.compile("[\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a dump: logical `dtype` ("int64"), `shape` and `strides` (in elements) as captured; `stored`: dtype on disk."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: str

    def parts(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return (key, dtype) of each safetensors entry that holds this tensor: two for "uint24" (16 low bits, 8 high bits)."""
        if self.stored == UINT24:
            return (f"{name}.lo", "uint16"), (f"{name}.hi", "uint8")
        return ((name, self.stored),)

    def to_list(self) -> list[Any]:
        """Return `[dtype, stored, shape]`, plus the strides if they are not those of a contiguous tensor."""
        short = [self.dtype, self.stored, list(self.shape)]
        return short if self.strides == contiguous_strides(self.shape) else [*short, list(self.strides)]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape, as torch counts them."""
    if len(shape) == 2:  # fast path: most shapes are, and this runs for every tensor of a dump
        return shape[1] or 1, 1
    return tuple([math.prod(filter(None, shape[dim + 1 :])) for dim in range(len(shape))])


@dataclass(frozen=True)
class DumpRecord:
    """Everything known about one recorded call except the values of its tensors. `point`: one of POINTS.

    `seq_len` is S of `sequences` [B, S] (padding included), `tokens` the sum of `attention_mask` (B*S without a mask),
    `action_len` A of `action_mask` [B, A] or None. `arguments` holds the call's plain arguments by name, `extra` the reasons, by
    name, why arguments could not be stored; then `replayable` is False, unless all are of an unknown type and
    the returned log-probs are there. `step` is the DeepSpeed engine's `global_steps` at the call, None without an engine.

    `triggered` names the trigger that kept the dump (nan, exception, oom, slow, logprobs; before: it came before such a call),
    `trigger_facts` why it fired. `pinned` dumps survive rotation. `recovered`: see `dumps.recover`. `rng` holds the SHA-256 of
    the RNG state after the call by device, if it was recorded.
    """

    dump_id: str
    run: str
    rank: int
    timestamp: str
    batch_size: int
    seq_len: int
    tokens: int
    source: str = "capture"
    point: str = FORWARD
    format_version: int = RECORD_VERSION
    world_size: int | None = None
    local_rank: int | None = None
    host: str = ""
    pid: int = 0
    call_index: int = 0
    monotonic_ns: int = 0
    action_len: int | None = None
    role: str | None = None
    instance: str | None = None
    step: int | None = None
    training: bool | None = None
    grad_enabled: bool | None = None
    autocast_dtype: str | None = None
    packing_samples: bool | None = None
    temperature: float | None = None
    model_name: str | None = None
    model_dtype: str | None = None
    replayable: bool = True
    pinned: bool = False
    triggered: str | None = None
    recovered: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    process_groups: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, str] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    trigger_facts: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    payload_sha256: str = ""

    @property
    def padding(self) -> int:
        """Return the number of padded positions, B*S - tokens."""
        return self.batch_size * self.seq_len - self.tokens

    def to_json(self) -> str:
        """Return the record as a line of JSON with sorted keys, without defaults. ValueError for non-finite floats."""
        data = {name: value for name, value in vars(self).items() if name not in DEFAULTS or value != DEFAULTS[name]}
        data["format_version"] = self.format_version
        data["tensors"] = {name: spec.to_list() for name, spec in self.tensors.items()}
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


DEFAULTS: dict[str, Any] = {
    f.name: f.default_factory() if f.default_factory is not MISSING else f.default
    for f in fields(DumpRecord)
    if f.default is not MISSING or f.default_factory is not MISSING
}
"""Values of fields that the JSON leaves out."""


def kinds_of(record: type) -> dict[str, frozenset[type]]:
    """Return the types that each field's annotation of a dataclass allows; float also allows int."""
    names = {f.name: {*re.findall(r"\w+", re.sub(r"\[.*\]", "", str(f.type)))} for f in fields(record)}
    known: dict[str, tuple[type, ...]] = {kind.__name__: (kind,) for kind in (str, int, bool, dict, tuple)}
    known |= {"float": (float, int), "None": (type(None),)}
    return {name: frozenset(kind for word in words for kind in known.get(word, ())) for name, words in names.items()}


@functools.cache
def storable(layout: Any, dtype: Any) -> bool:
    """Check whether tensors like this can be stored: dense, and of a dtype that safetensors knows."""
    return str(layout) == "torch.strided" and dtype_name(dtype) in SIZES


def dtype_name(dtype: Any) -> str:
    """Return "int64" for `torch.int64`."""
    return str(dtype).removeprefix("torch.")


def format_timestamp(moment: datetime) -> str:
    """Format an aware datetime for a record: UTC, microseconds, `Z`."""
    return moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def now_timestamp() -> str:
    """Return the current time, formatted for a record."""
    return format_timestamp(datetime.now(timezone.utc))


def timestamp_of(time_ns: int) -> str:
    """Format nanoseconds since the epoch for a record."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return format_timestamp(datetime.fromtimestamp(seconds, timezone.utc).replace(microsecond=rest // 1000))


def make_dump_id(timestamp: str, call_index: int, pid: int, rand: str) -> str:
    """Make an id like `20250619T052608.430740Z-000012-4711-9f3a2c1b`: sorts by time, unique across ranks, hosts and processes."""
    compact = timestamp.replace("-", "").replace(":", "")
    return f"{compact}-{call_index:06d}-{pid}-{rand}"


def is_plain_name(text: str) -> bool:
    """Check whether `text` may name a run or a dump: at most 128 letters, digits and `._+-`, not beginning with a sign."""
    return bool(_NAME.match(text))


def label(record: DumpRecord) -> str:
    """Return the text by which a payload identifies its dump. The whole record would make real dumps 7% larger."""
    return f"dump {record.dump_id} of run {record.run}, rank {record.rank}, record version {record.format_version}"


def reach_of(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the distance from a tensor's first to its last element, in elements; None if elements may share memory.

    Expanded dimensions (stride 0) count as one element: `_check_expanded` verifies them. Some rare layouts in which no elements
    share memory also give None.
    """
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1 and stride):
        if stride <= reach:
            return None
        reach += stride * (size - 1)
    return reach
