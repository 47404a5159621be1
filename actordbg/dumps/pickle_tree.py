"""A pickle, alone or of a `torch.save` archive, as a tree of plain data, read by the inert machine: tensors are places in it.

A trainer's debug file holds dicts, lists, numbers, texts and tensors, millions of values. A tensor becomes `{TENSOR: [storage,
dtype, elements, offset, shape, strides]}`; its storage is the name of a member of the archive or, in a pickle alone, the place of
its first byte. A TensorDict becomes `{PACKED: [its leaves, the tensor of their bytes]}`, an object of a class in
`RECORDS` `{RECORD: [its class, its state]}`, bytes `{BYTES: [start, end, whether as text]}`: their place. A numpy array of
numbers becomes a tensor too; short bytes that protocol 2 wrote as a text stand in place of its storage, in a list. Other numpy
arrays and dtypes become `{LEFT_OUT: what}`: nothing is looked up. A mention of anything else, such as `os.system` or
another class of a trainer, refuses the file.

The storage of a tensor in a pickle alone is a blob that `torch.storage._load_from_bytes` would be given, in torch's pre-2020 file
format. It is read without torch, and its pickles go through the same inert machine, so a nested attack meets the same wall::

    pickle     0x1950a86a20f9469cfc6c                            magic number
    pickle     1001                                              protocol version
    pickle     {"protocol_version", "little_endian", "type_sizes"}
    pickle     persistent id ("storage", torch.LongStorage, key, "cpu", numel, None)
    pickle     [key]                                             storages that follow
    8 bytes    numel, little endian
    ...        numel * itemsize bytes of elements, to the end of the blob

Long lists of numbers are passed at once, and become `{NUMBERS: [[kind, start, end], ...]}`: the places of their opcodes, and
what is left over behind them. A text of more than MAX_TEXT bytes stays a place too. So a tree is small, however large its pickle.

Floats that JSON lacks become the texts that `float` reads: "nan", "inf", "-inf". Standard library only: it runs in the
decoding process.
"""

from __future__ import annotations

import mmap
import struct
from math import prod

from actordbg.dumps.pickle_machine import FLOATS, Machine, whole_numbers
from actordbg.dumps.pickle_notes import Name, Persistent, PickleCall, Run, Span, corrupt, unsafe

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
"""torch's storage classes that a file may mention: logical dtype and bytes per element."""
NUMPY_DTYPES = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "f2": "float16", "f4": "float32", "f8": "float64"
}  # fmt: skip
"""numpy's names of the dtypes of arrays that are read."""
TENSOR, LEFT_OUT, PACKED, RECORD, BYTES = "$tensor", "$left out", "$packed", "$record", "$bytes"
NUMBERS = "$numbers"
MOST_VALUES = 2**25
"""Values of a tree: bounded while it is walked, because values may contain each other many times through the memo."""
MOST_LEVELS = 16
_REBUILD = "torch._utils._rebuild_tensor_v2"
_LOAD = "torch.storage._load_from_bytes"
_STORAGES = frozenset(("torch", name) for name in DTYPES)
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
_PACKED = "tensordict._reductions._rebuild_tensordict_files_consolidated"
VERL = "verl.protocol.DataProto"
SKYRL = "skyrl.backends.skyrl_train.training_batch._rebuild_tensor_batch"
OPENRLHF = "openrlhf.trainer.ppo_utils.experience.Experience"
MOLT = "molt.trainer.algorithm.experience.Experience"
RECORDS = frozenset((VERL, SKYRL, OPENRLHF, MOLT))
"""What a trainer saves whole: classes whose state is read as data, and the function that takes SkyRL's. None is looked up."""
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric", "numpy.core.numeric")
_PLAIN = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "Size", "device")
NAMES = frozenset(
    [
        ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict"), ("_codecs", "encode"),
        ("torch.storage", "_load_from_bytes"),
        ("numpy", "ndarray"), ("numpy", "dtype"), *(("torch", name) for name in (*DTYPES, *_PLAIN)),
        ("tensordict._reductions", "_rebuild_tensordict_files_consolidated"),
        ("skyrl.backends.skyrl_train.training_batch", "TrainingInputBatch"),
        *((module, name) for module, _, name in (record.rpartition(".") for record in RECORDS)),
        *((module, name) for module in _NUMPY for name in ("_reconstruct", "scalar", "_frombuffer")),
    ]
)  # fmt: skip
"""Globals that such a file may mention."""


def tree(data: bytes | mmap.mmap, start: int = 0) -> object:
    """Return the value of the pickle in `data[start:]` as dicts, lists, numbers, texts and None.

    Raises UnsafeInput or CorruptDump, and nothing else.
    """
    machine = Machine(data, start, len(data), NAMES, RECORDS)
    value = machine.run()
    if machine.position != len(data):
        raise corrupt(f"{len(data) - machine.position} bytes after the end of the pickle")
    return _Walk(data).plain(value, 0)


class _Walk:
    """Copies a value of the machine as plain data. left: how many more values it may have."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data, self.left = data, MOST_VALUES

    def plain(self, value: object, level: int) -> object:
        """Return a copy without notes, in which nothing is shared."""
        kind = type(value)
        if kind is float:
            return value if value - value == 0 else str(value)  # type: ignore[operator]
        if value is None or kind in (bool, int, str):
            return value
        if level > MOST_LEVELS:
            raise unsafe(f"values are nested deeper than {MOST_LEVELS} levels")
        if isinstance(value, dict):
            self._count(len(value))
            return {key: self.plain(part, level + 1) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            self._count(len(value))
            others = [part for part in value if type(part) is not Run]
            of_numbers = all(type(part) in (int, float) for part in others)
            if of_numbers and len(others) < len(value):
                return {NUMBERS: [part.place if type(part) is Run else self.plain(part, level) for part in value]}
            return [part for each in value for part in self._parts(each, level + 1)]
        if isinstance(value, Span):
            return {BYTES: [value.start, value.end, False]}
        return self._call(value, level) if isinstance(value, PickleCall) else {LEFT_OUT: _words(value)}

    def _call(self, call: PickleCall, level: int) -> object:
        function, arguments = str(call.function), call.arguments
        if function == _REBUILD:
            return {TENSOR: _tensor(call, self.data)}
        if function == _LOAD:
            raise unsafe(f"asks to call {function}, which does not belong there")
        if function == _PACKED:
            return {PACKED: [self.plain(part, level + 1) for part in _packed(call)]}
        if function in RECORDS:
            return {RECORD: [function, self.plain(arguments[-1] if arguments else None, level + 1)]}
        if function == "_codecs.encode" and isinstance(span := arguments[0] if arguments else None, Span):
            return {BYTES: [span.start, span.end, True]}
        state = arguments[0] if len(arguments) == 1 else None
        if call.function.name == "_reconstruct" and type(state) is tuple and len(state) == 5:
            return self._numpy(*state[1:])
        if call.function.name == "scalar" and len(arguments) == 2:
            return self._numpy((), arguments[0], False, arguments[1])
        return {LEFT_OUT: _words(call)}

    def _numpy(self, shape: object, dtype: object, by_columns: object, data: object) -> object:
        """Describe a numpy array as a tensor; one of bytes is the place of its bytes."""
        named = dtype.arguments[0] if isinstance(dtype, PickleCall) and dtype.arguments else None
        if named == "u1" and isinstance(data, Span):
            return self.plain(data, 0)
        kind = NUMPY_DTYPES.get(str(named))
        encoded = data.arguments[0] if isinstance(data, PickleCall) and data.arguments else None  # protocol 2: bytes as a text
        if isinstance(encoded, Span):
            storage: object = [encoded.start, encoded.end]
        else:
            storage = data.start if isinstance(data, Span) else [encoded if type(encoded) is str else ""]
        if not kind or by_columns or type(shape) is not tuple or not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            return {LEFT_OUT: _words(dtype)}
        strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
        return {TENSOR: [storage, kind, prod(shape), 0, list(shape), strides]}

    def _parts(self, value: object, level: int) -> list[object]:
        """Return a part of a list; those that were appended at once, beside others, one by one."""
        if not isinstance(value, Run):
            return [self.plain(value, level)]
        opcodes = self.data[value.start : value.end]
        numbers = [number for _, number in struct.iter_unpack(">cd", opcodes)] if value.kind == FLOATS else whole_numbers(opcodes)
        self._count(len(numbers))
        return [self.plain(number, level) for number in numbers]

    def _count(self, values: int) -> None:
        self.left -= values + 1
        if self.left < 0:
            raise unsafe(f"more than {MOST_VALUES} values")


def _words(value: object) -> str:
    return str(value.function if isinstance(value, PickleCall) else value if isinstance(value, Name) else "an object")


def _packed(call: PickleCall) -> tuple[object, object]:
    """Return the leaves of a TensorDict, and the tensor of bytes that has all of them."""
    about, storage = call.arguments if len(call.arguments) == 2 else (None, None)
    if not isinstance(about, dict) or not isinstance(about.get("leaves"), dict):
        raise corrupt("a TensorDict is not described as tensordict describes it")
    return about["leaves"], storage


def _tensor(call: PickleCall, data: bytes | mmap.mmap) -> list[object]:
    """Describe a tensor of `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`."""
    if len(call.arguments) not in (6, 7):
        raise corrupt(f"a tensor is rebuilt with {len(call.arguments)} arguments")
    storage, offset, shape, strides, *_ = call.arguments
    blob = storage.arguments[0] if isinstance(storage, PickleCall) and len(storage.arguments) == 1 else None
    if isinstance(blob, Span) and str(storage.function) == _LOAD:  # type: ignore[attr-defined]
        key, dtype, elements = _in_blob(data, blob)
    else:
        identity = storage.identity if isinstance(storage, Persistent) else None
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise unsafe("a tensor holds something that is not a storage")
        _, kind, key, _, elements = identity
        dtype = DTYPES[kind.name][0] if isinstance(kind, Name) and (kind.module, kind.name) in _STORAGES else ""
        dtype = dtype if type(key) is str and key.isalnum() else ""
    sizes = [*shape, *strides, offset, elements] if type(shape) is tuple and type(strides) is tuple else [None]
    plain = all(type(size) is int and 0 <= size < 2**48 for size in sizes)
    if not dtype or not plain or len(shape) != len(strides) or len(shape) > 8:  # type: ignore[arg-type]
        raise corrupt("a tensor is not described as torch describes it")
    return [key, dtype, elements, offset, list(shape), list(strides)]  # type: ignore[call-overload]


def _in_blob(data: bytes | mmap.mmap, blob: Span) -> tuple[int, str, int]:
    """Return the first byte, dtype and elements of the storage in `data[blob.start:blob.end]`."""
    machine = Machine(data, blob.start, blob.end, _STORAGES)
    magic, version, system, identity, keys = (machine.run() for _ in range(5))
    if type(magic) is not int or magic != _MAGIC_NUMBER:
        raise unsafe("the storage blob does not begin with torch's magic number")
    if type(version) is not int or version != _PROTOCOL_VERSION:
        raise corrupt("the storage blob's protocol version is not 1001")
    if type(system) is not dict or system.get("little_endian") is not True:
        raise corrupt("the storage blob was not written on a little-endian machine")
    named = identity.identity if isinstance(identity, Persistent) else None
    if type(named) is not tuple or len(named) != 6 or named[0] != "storage":
        raise unsafe("the storage blob holds something that is not a storage")
    _, kind, key, _, elements, view = named
    if not isinstance(kind, Name) or type(key) is not str or type(elements) is not int or view is not None:
        raise corrupt("the storage is not described as torch describes it")
    if keys != [key]:
        raise corrupt("the storage header announces storages other than its own")
    dtype, itemsize = DTYPES[kind.name]
    stored, present = machine.number(8, signed=True), blob.end - machine.position
    if elements < 0 or stored != elements:
        raise unsafe(f"a storage announces {elements} elements, then {stored}")
    if elements * itemsize > max(present, 2**31):
        raise unsafe(f"a storage claims {elements * itemsize} bytes, {present} are there")
    if elements * itemsize != present:
        raise corrupt(f"truncated: a storage of {elements * itemsize} bytes, {present} are there")
    return machine.position, dtype, elements
