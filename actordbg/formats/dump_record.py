"""DumpRecord: the one versioned contract between the process that captured a call and everything that reads it.

A dump file begins with this record as JSON (see `actordbg.formats.dumpfile`), so an indexer learns everything about a call from
a few hundred bytes and decompresses nothing. The payload's own safetensors metadata holds one sentence (dump id, run, rank,
record version), so a payload that was taken out of its file still says where it came from; the whole record there would make
the dumps 7 % larger.

Rules that keep the contract honest:

* one integer version; a reader refuses a version it does not know, with the remedy, and never guesses;
* nothing from the environment (variables, tokens of services) is part of it;
* what has its default value is left out of the JSON, and a tensor is a short list, because the real dumps' tensors compress
  to 5 kB and a record is read a hundred thousand times;
* tensors are described by their *logical* dtype, shape and strides, i.e. what the actor received; `stored` says in
  which narrower dtype the payload keeps them, without loss.

This module is imported in the training process: standard library only.

Example::

    record = DumpRecord.from_json(text)
    record.seq_len, record.tensors["sequences"].shape      # 1861, (2, 1861)
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

from actordbg.base import strictjson
from actordbg.base.errors import CorruptDump, NewerFormat

RECORD_VERSION = 1

MAX_DIMS = 16
"""Most dimensions of a tensor."""

OUTPUT_PREFIX = "output."
"""Tensors whose name begins so are what the call returned (`dump enable --with-outputs`), not what it received."""

RNG_PREFIX = "rng."
"""Tensors whose name begins so are generator states before the call (`dump enable --with-rng`): `rng.cpu`, `rng.cuda:0`."""

IN_FLIGHT, RECENT = "in_flight", "recent"
"""`recovered` of a dump that came out of a dead process's ring: it was running, or it was one of the last calls."""

UINT24 = "uint24"
"""`stored` of token ids below 2**24: low 16 and high 8 bits as two tensors, which compress 8 % better than int32."""

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\Z")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a dump: logical `dtype` ("int64"), `shape` and `strides` (in elements) as captured; `stored`: on disk."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stored: str

    def parts(self, name: str) -> tuple[tuple[str, str], ...]:
        """(key, dtype) of every safetensors entry that holds this tensor: two for "uint24" (16 low bits, 8 high bits)."""
        if self.stored == UINT24:
            return (f"{name}.lo", "uint16"), (f"{name}.hi", "uint8")
        return ((name, self.stored),)

    def to_list(self) -> list[Any]:
        """`[dtype, stored, shape]`, and the strides behind it if they are not those of a contiguous tensor."""
        short = [self.dtype, self.stored, list(self.shape)]
        return short if self.strides == contiguous_strides(self.shape) else [*short, list(self.strides)]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape, as torch counts them."""
    strides, reach = [], 1
    for size in reversed(shape):
        strides.append(reach)
        reach *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class DumpRecord:
    """Everything known about one `Actor.forward` call except the values of its tensors.

    `seq_len` is S of `sequences` [B, S] (padding included), `tokens` the sum of `attention_mask` (B*S without one),
    `action_len` A of `action_mask` [B, A] or None. `arguments` holds the call's plain arguments by name, `extra` the
    names of arguments that could not be stored with the reason, in which case `replayable` is False. `step` is the
    DeepSpeed engine's `global_steps` at the call, where there was one.

    `triggered` names the trigger that kept the dump (nan, exception, oom, slow, logprobs; before: it came before such a call),
    `trigger_facts` says what it saw. `pinned` dumps survive rotation. `recovered`: see IN_FLIGHT, RECENT. `rng` holds by
    device the SHA-256 of the generator's state after the call, where the states were recorded.
    """

    dump_id: str
    run: str
    rank: int
    timestamp: str
    batch_size: int
    seq_len: int
    tokens: int
    source: str = "capture"
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
    def input_names(self) -> tuple[str, ...]:
        """Names of the tensors that the call received."""
        return tuple(name for name in self.tensors if not name.startswith((OUTPUT_PREFIX, RNG_PREFIX)))

    @property
    def padding(self) -> int:
        """Number of padded positions, B*S - tokens."""
        return self.batch_size * self.seq_len - self.tokens

    def to_json(self) -> str:
        """The record as one line of JSON with sorted keys, defaults left out; non-finite floats are refused with ValueError."""
        data = {name: value for name, value in vars(self).items() if name not in DEFAULTS or value != DEFAULTS[name]}
        data["format_version"] = self.format_version
        data["tensors"] = {name: spec.to_list() for name, spec in self.tensors.items()}
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def with_payload(self, tensors: dict[str, TensorSpec], payload_sha256: str) -> DumpRecord:
        """A copy that describes a payload: its tensors and the SHA-256 of its bytes."""
        return replace(self, tensors=tensors, payload_sha256=payload_sha256)

    @classmethod
    def from_json(cls, text: str | bytes) -> DumpRecord:
        """Parse and check a record.

        Raises NewerFormat for a version this program does not know and CorruptDump for anything that is not a record.
        """
        try:
            data = strictjson.loads(text.encode() if isinstance(text, str) else text)
        except ValueError as error:
            raise CorruptDump(f"the record is not JSON: {error}", hint=_VERIFY_HINT) from None
        if not isinstance(data, dict):
            raise CorruptDump("the record is not a JSON object", hint=_VERIFY_HINT)
        version = data.get("format_version")
        if type(version) is not int or not 0 <= version < 2**31:
            raise CorruptDump("the record has no format version", hint=_VERIFY_HINT)
        if version != RECORD_VERSION:
            raise NewerFormat(
                f"the record has format version {version}, this actordbg reads version {RECORD_VERSION}",
                hint="upgrade actordbg in this environment: pip install --upgrade actordbg",
            )
        return _checked(cls, data)


_MAX_SIZE, _PLAIN = 2**48, {int}
_VERIFY_HINT = "run `actordbg dump verify` to find every damaged file"

DEFAULTS: dict[str, Any] = {
    f.name: f.default_factory() if f.default_factory is not MISSING else f.default
    for f in fields(DumpRecord)
    if f.default is not MISSING or f.default_factory is not MISSING
}
"""What a field is when the JSON leaves it out."""
_REQUIRED = {f.name for f in fields(DumpRecord) if f.name not in DEFAULTS}
_OBJECTS = tuple(name for name, value in DEFAULTS.items() if value == {})
_COUNT, _TEXT, _FLAG, _OBJECT = (int,), (str,), (bool,), (dict,)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "batch_size", "seq_len", "tokens", "format_version"), _COUNT),
    **dict.fromkeys(("world_size", "local_rank", "call_index", "monotonic_ns", "pid", "action_len", "step"), _COUNT),
    **dict.fromkeys(("dump_id", "run", "timestamp", "source", "payload_sha256", "host", "role", "instance"), _TEXT),
    **dict.fromkeys(("autocast_dtype", "model_name", "model_dtype", "triggered", "recovered"), _TEXT),
    **dict.fromkeys(("training", "grad_enabled", "packing_samples", "replayable", "pinned"), _FLAG),
    **dict.fromkeys(("arguments", "tensors", "process_groups", "extra", "actor", "origin", "versions"), _OBJECT),
    **dict.fromkeys(("trigger_facts", "rng"), _OBJECT),
    "temperature": (int, float),
}
_NONE_ALLOWED = frozenset(name for name, value in DEFAULTS.items() if value is None)


def _checked(cls: type[DumpRecord], data: dict[str, Any]) -> DumpRecord:
    values = dict(DEFAULTS)
    for name, value in data.items():
        kinds = _KINDS.get(name)
        if kinds is None:
            continue
        if type(value) not in kinds and not (value is None and name in _NONE_ALLOWED):
            raise CorruptDump(f"the record's {name} has the wrong type: {value!r:.80}", hint=_VERIFY_HINT)
        if type(value) is int and not (0 if kinds is _COUNT else -(2**63)) <= value < 2**63:
            raise CorruptDump(f"the record's {name} is out of range: {value!r:.80}", hint=_VERIFY_HINT)
        values[name] = value
    missing = _REQUIRED - values.keys()
    if missing:
        raise CorruptDump(f"the record has no {min(missing)}", hint=_VERIFY_HINT)
    for name in ("dump_id", "run"):
        if not _NAME.match(values[name]):
            raise CorruptDump(f"the record's {name} is not a plain name: {values[name]!r:.80}", hint=_VERIFY_HINT)
    parse_timestamp(values["timestamp"])
    for name in _OBJECTS:
        if name not in data:
            values[name] = {}
    values["tensors"] = {name: _spec(name, spec) for name, spec in values["tensors"].items()}
    record = object.__new__(cls)  # 42 fields: the frozen __init__ takes longer than everything above
    vars(record).update(values)
    return record


def _spec(name: str, data: Any) -> TensorSpec:
    if name == "__metadata__":  # safetensors keeps it for itself
        raise CorruptDump(f"the record has a tensor named {name}", hint=_VERIFY_HINT)
    if type(data) is not list or len(data) not in (3, 4) or type(data[0]) is not str or type(data[1]) is not str:
        raise CorruptDump(f"tensor {name!r:.80} of the record is not described", hint=_VERIFY_HINT)
    dtype, stored, shape, *rest = data
    strides = rest[0] if rest else []
    if not _are_sizes(shape) or not _are_sizes(strides) or (rest and len(strides) != len(shape)):
        raise CorruptDump(f"tensor {name!r:.80} of the record has an impossible shape", hint=_VERIFY_HINT)
    shape = tuple(shape)
    if math.prod(filter(None, shape)) >= _MAX_SIZE:
        raise CorruptDump(f"tensor {name!r:.80} of the record has too many elements", hint=_VERIFY_HINT)
    return TensorSpec(dtype, shape, tuple(strides) if rest else contiguous_strides(shape), stored)


def _are_sizes(values: Any) -> bool:
    """Whether this is a shape, or strides: few plain integers that torch can count with."""
    if type(values) is not list or len(values) > MAX_DIMS or not {*map(type, values)} <= _PLAIN:
        return False
    return not values or (min(values) >= 0 and max(values) < _MAX_SIZE)


def parse_timestamp(text: str) -> datetime:
    """An ISO-8601 UTC timestamp of a record ("2025-06-19T05:26:08.430740Z") as an aware datetime; CorruptDump otherwise."""
    try:
        if _MOMENT.match(text):
            return datetime.fromisoformat(text[:26]).replace(tzinfo=timezone.utc)
    except ValueError:
        pass
    raise CorruptDump(f"{text!r:.60} is not a timestamp like 2025-06-19T05:26:08.430740Z", hint=_VERIFY_HINT)


def format_timestamp(moment: datetime) -> str:
    """An aware datetime as the record spells it: UTC, microseconds, `Z`."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def now_timestamp() -> str:
    """The present moment as the record spells it."""
    return format_timestamp(datetime.now(timezone.utc))


def make_dump_id(timestamp: str, call_index: int, pid: int, rand: str) -> str:
    """`20250619T052608.430740Z-000012-4711-9f3a2c1b`: sorts by time, unique across ranks, hosts and processes."""
    compact = timestamp.replace("-", "").replace(":", "")
    return f"{compact}-{call_index:06d}-{pid}-{rand}"


def is_plain_name(text: str) -> bool:
    """Whether `text` may name a run or a dump: letters, digits and `._+-`, at most 128, not beginning with a sign."""
    return bool(_NAME.match(text))
