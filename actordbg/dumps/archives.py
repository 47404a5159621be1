"""Archives of `torch.save` and pickles of a trainer's batch as plain data: tensors as numpy arrays, records as what they hold.

Trees come from the decoding process (`pickle_tree`); here its places are looked up in the file, and checked against it.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from actordbg.base.errors import Unsupported
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.pickle_machine import FLOATS, SMALL, whole_numbers
from actordbg.dumps.pickle_notes import corrupt, unsafe
from actordbg.dumps.pickle_tree import BYTES, NUMBERS, PACKED, RECORD, SKYRL, TENSOR, VERL
from actordbg.formats.encoding import PlainTensor, array_dtype
from actordbg.store.payload import numbers_of

HEAD = 2**16
"""Bytes of a file's beginning by which it is known."""
MOST_BYTES = 2**30
"""Largest sum of the arrays of a file that is read at once."""
MOST_PICKLE = 2**33
"""Largest pickle."""
MOST_SHARES = 16
"""How many times as large as their storages the different tensors of an archive may be, together; and numbers as their pickle."""
MOST_DIRECTORY = 2**26
"""Largest table of contents of an archive, in bytes."""
MAPPED = 2**26
"""Bytes of a part of a file above which it is not read at once, but slice by slice."""
MOST_KEPT = 256
"""Arrays that are kept to be shared by the rows that follow."""


class FilePart:
    """A part of a file, of which slices are read."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self.file, self.start, self.size = file, start, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> bytes:
        first, last, _ = place.indices(self.size)
        self.file.seek(self.start + first)
        return self.file.read(max(0, last - first))

    @property
    def in_file(self) -> bool:
        """Return whether it lies in a file, which can be mapped."""
        return not isinstance(self.file, io.BytesIO)


class Parts(Sequence[Any]):
    """A list whose parts are made when they are taken: a file's rows, one after another."""

    def __init__(self, trees: list[Any], made: Callable[[Any], Any]) -> None:
        self.trees, self.made = trees, made

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, place: Any) -> Any:
        return Parts(self.trees[place], self.made) if isinstance(place, slice) else self.made(self.trees[place])


LISTS = (list, Parts)


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Open an archive whose table of contents is not larger than one needs."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - HEAD - 22))
    tail = file.read()
    end, end64 = tail.rfind(b"PK\5\6"), tail.rfind(b"PK\6\6")
    if end < 0:
        raise corrupt("truncated: the archive has no table of contents")
    size = int.from_bytes(tail[end + 12 : end + 16], "little")
    size = int.from_bytes(tail[end64 + 40 : end64 + 48], "little") if size == 2**32 - 1 and end64 >= 0 else size
    if size > MOST_DIRECTORY:
        raise unsafe(f"the archive's table of contents claims {size} bytes")
    return zipfile.ZipFile(file)


def record_pickle(trees: LegacyReader, file: BinaryIO) -> Any:
    """Return what a pickle of rows, or of a record in `pickle_tree.RECORDS`, holds."""
    size = file.seek(0, os.SEEK_END)
    return _Revived(trees, FilePart(file, 0, size)).whole()


def pickle_value(trees: LegacyReader, data: bytes) -> Any:
    """Return the value of a pickle of the old recorder, with a `PlainTensor` over the file's bytes for each tensor."""
    try:
        return _Revived(trees, data, made=lambda tensor: tensor).whole()
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise corrupt(f"damaged: {error!s:.200}") from None


def archive_value(trees: LegacyReader, file: BinaryIO) -> Any:
    """Return the value of a `torch.save` archive, with numpy arrays for its tensors."""
    with open_zip(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        name = next((name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1), "")
        if not name:
            raise Unsupported("it is a zip archive without rows", hint="unpack it, and name what is in it")
        folder = name.removesuffix("data.pkl")
        packed = [info for info in entries.values() if info.compress_type or info.file_size != info.compress_size]
        if packed:
            raise unsafe(f"{packed[0].filename:.80} is compressed, which torch.save never does")
        if archive.read(entries[f"{folder}byteorder"])[:6] != b"little" if f"{folder}byteorder" in entries else False:
            raise corrupt("it was not written on a little-endian machine")
        claimed = sum(info.file_size for info in archive.infolist())
        if claimed > file.seek(0, os.SEEK_END):
            raise unsafe("its members overlap: they claim more bytes than the file has")
        if damaged := archive.testzip():
            raise corrupt(f"damaged: {damaged:.80} is not what its checksum says")
        members = {name: _member(file, info) for name, info in entries.items()}
        return _Revived(trees, members[name], folder, members).whole()


def _member(file: BinaryIO, info: zipfile.ZipInfo) -> FilePart:
    """Return where a member lies that is not compressed."""
    file.seek(info.header_offset + 26)
    lengths = struct.unpack("<HH", file.read(4))
    return FilePart(file, info.header_offset + 30 + sum(lengths), info.file_size)


class _Revived:
    """Replaces the places of tensors in a tree by what is `made` of them, and records by what they hold.

    left: bytes that storages, and arrays, may still take at once. room, counted: bytes that arrays, and numbers, may still have
    in all: many tensors may lie in one storage.
    """

    def __init__(
        self,
        trees: LegacyReader,
        pickled: bytes | FilePart,
        folder: str = "",
        members: Mapping[str, FilePart] = MappingProxyType({}),
        made: Callable[[PlainTensor], Any] = numbers_of,
    ) -> None:
        self.made = made
        self.trees, self.pickled, self.folder, self.members = trees, pickled, folder, members
        self.room = MOST_SHARES * max(len(pickled), sum(map(len, members.values())))
        self.counted = MOST_SHARES * len(pickled)
        self._forget()

    def _forget(self) -> None:
        self.left = {"storages": MOST_BYTES, "tensors": MOST_BYTES}
        self.storages: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}

    def whole(self) -> Any:
        """Return the pickle's value with arrays. Raises ValueError for a place that lies elsewhere."""
        pickled = self.pickled
        if len(pickled) > MOST_PICKLE:
            raise Unsupported(f"its pickle has more than {MOST_PICKLE} bytes", hint="save fewer rows in a file")
        self.data: Any
        if isinstance(pickled, bytes) or len(pickled) < MAPPED or not pickled.in_file:
            pickled = bytes(pickled[:])
            self.data = memoryview(pickled)
            return self.value(self.trees.tree(pickled))
        end = pickled.start + pickled.size
        self.data = FilePart(pickled.file, 0, end)
        return self.value(self.trees.tree_in(pickled.file, pickled.start, end))

    def part(self, tree: Any) -> Any:
        """Return a part of a list. What the parts before it had is forgotten, unless it is little: it may be shared."""
        taken = MOST_BYTES - min(self.left.values())
        if len(self.arrays) > MOST_KEPT or taken > MAPPED:
            self._forget()
        return self.value(tree)

    def value(self, value: Any) -> Any:
        """Return a part of the tree with arrays."""
        if isinstance(value, dict):
            if value.keys() == {NUMBERS}:
                return self._kept(value[NUMBERS], self._runs)
            if value.keys() == {TENSOR}:
                return self._kept(value[TENSOR], self._array)
            if value.keys() == {BYTES}:
                return np.frombuffer(self._bytes(value), np.uint8)
            if value.keys() == {PACKED}:
                return self._leaves(*value[PACKED])
            if value.keys() == {RECORD}:
                return self._record(*value[RECORD])
            return {key: self.value(part) for key, part in value.items()}
        if isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
            return Parts(value, self.part)
        return value

    def _kept(self, described: Any, made: Callable[[Any], Any]) -> Any:
        place = repr(described)
        if place not in self.arrays:
            self.arrays[place] = made(described)
        return self.arrays[place]

    def _runs(self, runs: Any) -> Any:
        parts = [self._run(*run) if isinstance(run, list) else _left_over(run) for run in runs]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _run(self, kind: str, start: int, end: int) -> Any:
        self.counted -= end - start
        if not 0 <= start <= end <= len(self.data) or self.counted < 0:
            raise ValueError(kind)
        opcodes = self.data[start:end]
        if kind == SMALL:
            return np.frombuffer(opcodes, np.uint8)[1::2]
        if kind == FLOATS:
            values = np.frombuffer(opcodes, _FLOAT)["value"]
            return values.astype("<f8")
        return np.array(whole_numbers(opcodes), np.int32)

    def _record(self, kind: str, state: Any) -> dict[str, Any]:
        """Return the columns of a record, beside the name of its class. Arrays of objects (verl's `non_tensor_batch`) are left
        out.
        """
        if kind == VERL:
            batch, _, about = state
            packed = isinstance(batch, dict)
            columns = self._inner(batch) if packed else {name: self._given(*each) for name, each in batch[2].items()}
        elif kind == SKYRL:
            about, columns = state["metadata"], {}
            for name, each in state["batch_dict"].items():
                if each and each["format"] in ("numpy", "torch"):  # else a list of images
                    of_numpy = each["format"] == "numpy"
                    place = each["data"]
                    columns[name] = self._given(each["dtype"], each["shape"], place) if of_numpy else self._inner(place)
        else:
            columns, about = self.value(state), {}
        if not isinstance(columns, dict):
            raise corrupt(f"{kind} holds no columns")
        return columns | {kind: about}

    def _given(self, dtype: str, shape: Sequence[int], place: Any) -> Any:
        """Return an array whose bytes lie in the pickle."""
        return self._numbers(dtype, np.frombuffer(self._bytes(place), array_dtype(dtype)).reshape(shape))

    def _inner(self, place: Any) -> Any:
        """Return the value of an archive in the pickle."""
        return archive_value(self.trees, io.BytesIO(self._bytes(place)))

    def _bytes(self, place: Any) -> bytes:
        if BYTES not in place:
            raise Unsupported(
                "its numbers are texts: torch.save of a batch that keeps bytes",
                hint="save the batch itself: data.save_to_disk('rows.pkl'), batch.save('rows.pkl')",
            )
        start, end, as_text = place[BYTES]
        data = bytes(self.data[start:end])
        return data.decode().encode("latin-1") if as_text else data

    def _array(self, described: Any) -> Any:
        key, dtype, elements, offset, shape, strides = described
        kind = array_dtype(dtype)
        if type(key) is int:
            data = self.data[key : key + elements * kind.itemsize]
        elif isinstance(key, list):  # protocol 2 writes bytes as a text
            data = key[0].encode("latin-1") if len(key) == 1 else self._bytes({BYTES: [*key, True]})
        else:
            data = self._storage(str(key))
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (offset + span) * kind.itemsize > len(data) or math.prod(shape) * kind.itemsize > max(len(data), 2**20):
            raise unsafe("a tensor claims more elements than its storage holds")
        values = np.ndarray(shape, kind, data, offset * kind.itemsize, [step * kind.itemsize for step in strides])
        return self._numbers(dtype, values, tuple(strides))

    def _numbers(self, dtype: str, values: Any, strides: tuple[int, ...] = ()) -> Any:
        width = 4 if dtype.startswith(("bfloat", "float8")) else values.itemsize  # these become float32
        self._take("tensors", values.size * width)
        self.room -= values.size * width
        if self.room < 0:
            raise unsafe("its tensors share their storages too often: they would take many times the file's size")
        return self.made(PlainTensor(dtype, values, strides))

    def _take(self, what: str, size: int) -> None:
        self.left[what] -= size
        if self.left[what] < 0:
            raise unsafe(f"its {what} have more than {MOST_BYTES} bytes")

    def _leaves(self, leaves: Any, storage: Any) -> dict[str, Any]:
        """Return the tensors of a TensorDict, which lie one behind another in a tensor of bytes."""
        data = memoryview(self.value(storage))
        columns = {}
        for name, (dtype, shape, start, end, padding) in leaves.items():
            dtype = dtype.removeprefix("torch.")
            kind = array_dtype(dtype)
            size = math.prod(shape) * kind.itemsize
            if not 0 <= start <= start + size == end - padding <= len(data):
                raise unsafe(f"{name:.80} claims other bytes than it has")
            values = np.frombuffer(data[start : start + size], kind).reshape(shape)
            columns[name] = self._numbers(dtype, values)
        return columns

    def _storage(self, key: str) -> Any:
        if key not in self.storages:
            member = self.members[f"{self.folder}data/{key}"]
            if len(member) < MAPPED or not member.in_file:
                self._take("storages", len(member))
                self.storages[key] = member[:]
            else:
                self.storages[key] = np.memmap(member.file, np.uint8, "r", member.start, (member.size,)).data
        return self.storages[key]


def _left_over(number: Any) -> Any:
    """Return a number behind the runs of its list as an array; a text stands for a number that JSON lacks."""
    return np.array([float(number) if type(number) is str else number])


_FLOAT = np.dtype([("opcode", "u1"), ("value", ">f8")])
