"""The legacy storage blob: what `torch.storage._load_from_bytes` would be given, read without torch.

A storage that is pickled on its own is written by torch's pre-2020 file format: five pickles one after another, then
the raw elements::

    pickle     0x1950a86a20f9469cfc6c                            magic number
    pickle     1001                                              protocol version
    pickle     {"protocol_version", "little_endian", "type_sizes"}
    pickle     persistent id ("storage", torch.LongStorage, key, "cpu", numel, None)
    pickle     [key]                                             storages that follow
    8 bytes    numel, little endian
    ...        numel * itemsize bytes of elements, to the end of the blob

Every one of these pickles goes through the same inert machine as the file around it, so a nested attack meets the same
wall. The elements are not copied: a `Storage` says where they lie in the file. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from actordbg.base.errors import CorruptDump, UnsafeInput
from actordbg.legacy.pickle_machine import CORRUPT_HINT, UNSAFE_HINT, Machine, Name, Persistent, Span

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

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

_NAMES = frozenset(("torch", name) for name in DTYPES)


@dataclass(frozen=True)
class Storage:
    """`numel` elements of `dtype`, `itemsize` bytes each, that begin at byte `start` of the file."""

    dtype: str
    itemsize: int
    start: int
    numel: int


def parse_storage(data: bytes, blob: Span) -> Storage:
    """The storage inside `data[blob.start:blob.end]`. Raises UnsafeInput or CorruptDump."""
    position = _expect_header(data, blob)
    identity, position = _pickle(data, position, blob.end)
    kind, key, numel = _identity(identity)
    keys, position = _pickle(data, position, blob.end)
    if type(keys) is not list or len(keys) != 1 or keys[0] != key or type(keys[0]) is not str:
        raise CorruptDump("the storage header announces other storages than its own", hint=CORRUPT_HINT)
    dtype, itemsize = DTYPES[kind]
    _check_size(data, position, blob.end, numel, itemsize)
    return Storage(dtype, itemsize, position + 8, numel)


def _pickle(data: bytes, position: int, end: int) -> tuple[object, int]:
    machine = Machine(data, position, end, _NAMES)
    value = machine.run()
    return value, machine.position


def _expect_header(data: bytes, blob: Span) -> int:
    magic, position = _pickle(data, blob.start, blob.end)
    if type(magic) is not int or magic != MAGIC_NUMBER:
        raise UnsafeInput("the storage blob does not begin with torch's magic number", hint=UNSAFE_HINT)
    version, position = _pickle(data, position, blob.end)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise CorruptDump("the storage blob has another protocol version than 1001", hint=CORRUPT_HINT)
    system, position = _pickle(data, position, blob.end)
    if type(system) is not dict or system.get("little_endian") is not True:
        raise CorruptDump("the storage blob was not written on a little-endian machine", hint=CORRUPT_HINT)
    return position


def _identity(value: object) -> tuple[str, str, int]:
    """Class name, key and numel from the persistent id of a storage."""
    identity = value.identity if type(value) is Persistent else None
    if type(identity) is not tuple or len(identity) != 6 or type(identity[0]) is not str or identity[0] != "storage":
        raise UnsafeInput("the storage blob holds something that is not a storage", hint=UNSAFE_HINT)
    _, kind, key, location, numel, view = identity
    if type(kind) is not Name or type(key) is not str or type(location) is not str or type(numel) is not int:
        raise CorruptDump("the storage is not described as torch describes it", hint=CORRUPT_HINT)
    if view is not None:
        raise CorruptDump("the storage is a view of another one", hint=CORRUPT_HINT)
    return kind.name, key, numel


def _check_size(data: bytes, position: int, end: int, numel: int, itemsize: int) -> None:
    stored = int.from_bytes(data[position : min(position + 8, end)], "little", signed=True)
    present = end - position - 8
    if numel < 0 or stored != numel:
        raise UnsafeInput(f"a storage announces {numel} elements, then {stored}", hint=UNSAFE_HINT)
    if numel * itemsize > present:
        if numel * itemsize > 2**31:
            raise UnsafeInput(f"a storage claims {numel * itemsize} bytes, {present} are there", hint=UNSAFE_HINT)
        raise CorruptDump(f"truncated: a storage of {numel * itemsize} bytes, {present} are there", hint=CORRUPT_HINT)
    if numel * itemsize != present:
        raise CorruptDump(f"{present - numel * itemsize} bytes too many behind a storage", hint=CORRUPT_HINT)
