"""An old actor-input pickle, read as data: where each tensor lies in the file, and the call's plain arguments.

The old recorder wrote `pickle.dump` of one dict per call, one file per rank and call::

    sequences        int64 [B, S]                 attention_mask   [B, S] or None
    action_mask      [B, A], A <= S, or None      packed_seq_lens  None or a list of integers
    return_output, allgather_logits, return_logprobs, return_entropy    booleans
    timestamp        "20250619_052608_430740"     rank, batch_size, seq_len   integers

`decode` runs the bytes through the inert `machine`, then recognizes exactly this dict: unknown keys, other types, other
shapes, tensors that reach outside their storage are refused. It allocates nothing for tensors; it returns offsets into
the bytes it was given, which is also all that a child process has to send back.

A tensor's storage is a blob that `torch.storage._load_from_bytes` would be given, in torch's pre-2020 file format. It is read
without torch, and its pickles go through the same inert machine, so a nested attack meets the same wall::

    pickle     0x1950a86a20f9469cfc6c                            magic number
    pickle     1001                                              protocol version
    pickle     {"protocol_version", "little_endian", "type_sizes"}
    pickle     persistent id ("storage", torch.LongStorage, key, "cpu", numel, None)
    pickle     [key]                                             storages that follow
    8 bytes    numel, little endian
    ...        numel * itemsize bytes of elements, to the end of the blob

The timestamp is the local time of a machine whose time zone nobody wrote down. It is taken as UTC, so that order and
distances are right and importing twice, anywhere, gives the same result.

Example::

    dump = decode(path.read_bytes())
    dump.tensors["sequences"]      # LegacyTensor(dtype="int64", shape=(4, 2048), strides=(2048, 1), start=350, ...)

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from math import prod

from actordbg.base.errors import CorruptDump
from actordbg.dumps.pickle_machine import Machine, Name, Persistent, PickleCall, Span, corrupt, unsafe

Scalar = bool | int | list[int] | None

FLAGS = ("return_output", "allgather_logits", "return_logprobs", "return_entropy")
TENSORS = ("sequences", "action_mask", "attention_mask")
KEYS = frozenset((*TENSORS, *FLAGS, "packed_seq_lens", "timestamp", "rank", "batch_size", "seq_len"))
REQUIRED = frozenset(("sequences", "timestamp", "rank"))
MAX_RANK = 2**20

_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_LOAD = ("torch.storage", "_load_from_bytes")
_ORDERED = ("collections", "OrderedDict")
_NAMES = frozenset((_REBUILD, _LOAD, _ORDERED))
_STAMP = re.compile(r"(\d{4})(\d\d)(\d\d)_(\d\d)(\d\d)(\d\d)_(\d{6})\Z", re.ASCII)

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001

DTYPES: dict[str, tuple[str, int]] = {
    "BoolStorage": ("bool", 1),
    "ByteStorage": ("uint8", 1),
    "CharStorage": ("int8", 1),
    "ShortStorage": ("int16", 2),
    "IntStorage": ("int32", 4),
    "LongStorage": ("int64", 8),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "FloatStorage": ("float32", 4),
    "DoubleStorage": ("float64", 8),
}
"""torch's storage classes that a dump may mention: logical dtype and bytes per element."""

_STORAGE_NAMES = frozenset(("torch", name) for name in DTYPES)


@dataclass(frozen=True)
class LegacyTensor:
    """A dense tensor inside the file: element type, `shape` and `strides` in elements.

    Its first element is at byte `start`; its storage ends at byte `stop` (exclusive).
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    stop: int

    @property
    def span(self) -> int:
        """Elements from the first to the last one touched, both included; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class LegacyDump:
    """What an old pickle holds. `timestamp` is ISO-8601 UTC as in a `DumpRecord`, `stamp` the text in the pickle."""

    tensors: dict[str, LegacyTensor]
    arguments: dict[str, Scalar]
    rank: int
    stamp: str
    timestamp: str

    @property
    def batch_size(self) -> int:
        """B of `sequences` [B, S]."""
        return self.tensors["sequences"].shape[0]

    @property
    def seq_len(self) -> int:
        """S of `sequences` [B, S], padding included."""
        return self.tensors["sequences"].shape[1]


_PROTOCOL = b"\x80"
"""What a pickle of protocol 2 or later begins with."""


def decode(data: bytes) -> LegacyDump:
    """Read one old pickle without executing anything. Raises UnsafeInput or CorruptDump, and nothing else."""
    if data[:4] == b"PK\x03\x04":
        raise corrupt("written by torch.save, not by the old recorder's pickle.dump")
    machine = Machine(data, 0, len(data), _NAMES)
    try:
        content = machine.run()
    except CorruptDump:
        if data[:1] == _PROTOCOL or not data:
            raise
        raise corrupt("not a pickle: those of an actor dump begin with the byte 0x80") from None
    if machine.position != len(data):
        raise corrupt(f"{len(data) - machine.position} bytes after the end of the pickle")
    if type(content) is not dict:
        _refuse_call("the pickle", content)
        raise corrupt("the pickle is not the dict of an actor dump")
    _check_keys(content)
    tensors = {key: _tensor(key, content[key], data) for key in TENSORS if content.get(key) is not None}
    arguments = {key: checked_argument(key, content[key]) for key in (*FLAGS, "packed_seq_lens") if key in content}
    arguments.update({key: None for key in TENSORS if key in content and content[key] is None})
    stamp = content["timestamp"]
    timestamp = parse_stamp(stamp) if type(stamp) is str else None
    if timestamp is None:
        raise corrupt("its timestamp is not like 20250619_052608_430740")
    dump = LegacyDump(tensors, arguments, _rank(content["rank"]), stamp, timestamp)
    check_shapes(dump)
    for key, actual in (("batch_size", dump.batch_size), ("seq_len", dump.seq_len)):
        if key in content and (type(content[key]) is not int or content[key] != actual):
            raise corrupt(f"its {key} is not that of sequences ({actual})")
    return dump


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


def check_tensor(key: str, tensor: LegacyTensor, size: int) -> None:
    """Refuse a tensor that does not fit its storage, or the file of `size` bytes, or lies over itself."""
    shape, strides = tensor.shape, tensor.strides
    room = tensor.stop - tensor.start
    if len(shape) != len(strides) or min((*shape, *strides), default=0) < 0:
        raise corrupt(f"{key} has an impossible shape")
    inside = 0 <= tensor.start <= tensor.stop <= size
    if not inside or max(prod(shape), tensor.span) * tensor.itemsize > room:
        raise unsafe(f"{key} claims more elements than its storage holds")
    reach = 0
    for stride, count in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride <= reach:
            raise corrupt(f"{key} has strides that overlap")
        reach += stride * (count - 1)


def check_shapes(dump: LegacyDump) -> None:
    """Refuse tensors whose shapes do not belong together: [B, S], [B, S], [B, A] with A <= S."""
    sequences = dump.tensors.get("sequences")
    if sequences is None:
        raise corrupt("sequences is missing or None")
    if len(sequences.shape) != 2 or 0 in sequences.shape or sequences.dtype not in ("int64", "int32"):
        raise corrupt("sequences is not a matrix of integers [batch, length]")
    attention = dump.tensors.get("attention_mask", sequences)
    if attention.shape != sequences.shape:
        raise corrupt("attention_mask and sequences have different shapes")
    action = dump.tensors.get("action_mask", sequences)
    if len(action.shape) != 2 or action.shape[0] != dump.batch_size or action.shape[1] > dump.seq_len:
        raise corrupt("action_mask is not [batch, actions] with actions <= length")


def _check_keys(content: dict[str, object]) -> None:
    for key in content.keys() - set(TENSORS):
        _refuse_call(key, content[key])
    missing, unknown = sorted(REQUIRED - content.keys()), sorted(content.keys() - KEYS)
    if missing:
        raise corrupt(f"not an actor dump: it has no {', '.join(missing)}")
    if unknown:
        raise corrupt(f"not an actor dump: unexpected key {unknown[0][:80]!r}")


def _rank(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_RANK:
        raise corrupt("its rank is invalid")
    return value


def checked_argument(key: str, value: object) -> Scalar:
    """Refuse a plain argument of a type that the recorder never wrote."""
    if value is None or (key in FLAGS and type(value) is bool):
        return value
    if key == "packed_seq_lens" and type(value) is list and all(_is_size(n) for n in value):
        return list(value)
    raise corrupt(f"its {key} has a type that the recorder never wrote")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _tensor(key: str, value: object, data: bytes) -> LegacyTensor:
    """Build a tensor from `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`."""
    arguments = _arguments(key, value, _REBUILD, 6)
    storage, offset, shape, strides, requires_grad, hooks = arguments
    if type(requires_grad) is not bool or _arguments(key, hooks, _ORDERED, 0) != ():
        raise unsafe(f"{key} carries hooks")
    if type(offset) is not int or not _is_size(offset):
        raise corrupt(f"{key} has an impossible offset")
    (blob,) = _arguments(key, storage, _LOAD, 1)
    if type(blob) is not Span:
        raise corrupt(f"{key} has no storage")
    (dtype, itemsize), start, numel = _storage(data, blob)
    first, stop = start + offset * itemsize, start + numel * itemsize
    tensor = LegacyTensor(dtype, itemsize, _dimensions(key, shape), _dimensions(key, strides), first, stop)
    check_tensor(key, tensor, len(data))
    return tensor


def _arguments(key: str, value: object, name: tuple[str, str], count: int) -> tuple[object, ...]:
    """Return the arguments of a call, which must be of `name` and have `count` arguments."""
    if type(value) is not PickleCall or (value.function.module, value.function.name) != name:
        _refuse_call(key, value)
        raise corrupt(f"{key} is a {type(value).__name__}, not a tensor")
    if len(value.arguments) != count:
        raise corrupt(f"{key} is rebuilt with {len(value.arguments)} arguments")
    return value.arguments


def _refuse_call(key: str, value: object) -> None:
    """Refuse any of the three known functions where a genuine dump does not have it."""
    if type(value) is PickleCall:
        raise unsafe(f"{key[:80]} asks to call {value.function}, which does not belong there")
    if type(value) in (Name, Persistent):
        raise unsafe(f"{key[:80]} refers to something outside the file")


def _dimensions(key: str, value: object) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > 8 or not all(_is_size(n) for n in value):
        raise corrupt(f"{key} has an impossible shape")
    return value


def _storage(data: bytes, blob: Span) -> tuple[tuple[str, int], int, int]:
    """Return ((dtype, itemsize), first byte, elements) of the storage in `data[blob.start:blob.end]`. Raises UnsafeInput or
    CorruptDump.
    """
    position = _expect_header(data, blob)
    identity, position = _pickle(data, position, blob.end)
    kind, key, numel = _identity(identity)
    keys, position = _pickle(data, position, blob.end)
    if type(keys) is not list or len(keys) != 1 or keys[0] != key or type(keys[0]) is not str:
        raise corrupt("the storage header announces storages other than its own")
    _check_storage_size(data, position, blob.end, numel, DTYPES[kind][1])
    return DTYPES[kind], position + 8, numel


def _pickle(data: bytes, position: int, end: int) -> tuple[object, int]:
    machine = Machine(data, position, end, _STORAGE_NAMES)
    value = machine.run()
    return value, machine.position


def _expect_header(data: bytes, blob: Span) -> int:
    magic, position = _pickle(data, blob.start, blob.end)
    if type(magic) is not int or magic != _MAGIC_NUMBER:
        raise unsafe("the storage blob does not begin with torch's magic number")
    version, position = _pickle(data, position, blob.end)
    if type(version) is not int or version != _PROTOCOL_VERSION:
        raise corrupt("the storage blob's protocol version is not 1001")
    system, position = _pickle(data, position, blob.end)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise corrupt("the storage blob was not written on a little-endian machine")
    return position


def _identity(value: object) -> tuple[str, str, int]:
    """Return class name, key and numel from the persistent id of a storage."""
    identity = value.identity if type(value) is Persistent else None
    if type(identity) is not tuple or len(identity) != 6 or type(identity[0]) is not str or identity[0] != "storage":
        raise unsafe("the storage blob holds something that is not a storage")
    _, kind, key, location, numel, view = identity
    if type(kind) is not Name or type(key) is not str or type(location) is not str or type(numel) is not int:
        raise corrupt("the storage is not described as torch describes it")
    if view is not None:
        raise corrupt("the storage is a view of another storage")
    return kind.name, key, numel


def _check_storage_size(data: bytes, position: int, end: int, numel: int, itemsize: int) -> None:
    stored = int.from_bytes(data[position : min(position + 8, end)], "little", signed=True)
    present = end - position - 8
    if numel < 0 or stored != numel:
        raise unsafe(f"a storage announces {numel} elements, then {stored}")
    if numel * itemsize > present:
        if numel * itemsize > 2**31:
            raise unsafe(f"a storage claims {numel * itemsize} bytes, {present} are there")
        raise corrupt(f"truncated: a storage of {numel * itemsize} bytes, {present} are there")
    if numel * itemsize != present:
        raise corrupt(f"{present - numel * itemsize} extra bytes after a storage")
