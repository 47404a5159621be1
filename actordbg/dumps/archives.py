"""Archives of `torch.save` and pickles of a trainer's batch as plain data: tensors as numpy arrays, records as what they hold.

Trees come from the decoding process (`pickle_tree`); here its places are looked up in the file, and checked against it.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from actordbg.base.errors import Unsupported
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.pickle_machine import corrupt, unsafe
from actordbg.dumps.pickle_tree import BYTES, KINDS, NUMBERS, PACKED, RECORD, SKYRL, TENSOR, VERL
from actordbg.formats.encoding import PlainTensor, array_dtype
from actordbg.store.payload import numbers_of

HEAD = 2**16
"""Bytes of a file's beginning by which it is known."""
MOST_BYTES = 2**30
"""Largest sum of the arrays of a file that is read at once."""
MOST_SHARES = 16
"""How many times as large as their storages the different tensors of an archive may be, together."""
MOST_DIRECTORY = 2**26
"""Largest table of contents of an archive, in bytes."""


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
    """Return what a pickle of a record in `pickle_tree.RECORDS` holds."""
    if file.seek(0, os.SEEK_END) > trees.limits.file_bytes:
        raise Unsupported(
            f"it is a batch of more than {trees.limits.file_bytes} bytes",
            hint="save a part of its rows: data[:256].save_to_disk('rows.pkl'), batch[:256].save('rows.pkl')",
        )
    file.seek(0)
    return _Revived(trees, file.read()).whole()


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
        if entries[name].file_size > trees.limits.file_bytes:
            raise Unsupported(f"its pickle has more than {trees.limits.file_bytes} bytes", hint="save fewer rows in a file")
        data = archive.read(name)
        return _Revived(trees, data, archive, folder, entries).whole()


class _Revived:
    """Replaces the places of tensors in a tree by what is `made` of them, and records by what they hold. data: the pickle.

    left: bytes of storages that may still be read. room: bytes that arrays may still take: many tensors may lie in one storage.
    """

    def __init__(
        self,
        trees: LegacyReader,
        data: bytes,
        archive: zipfile.ZipFile | None = None,
        folder: str = "",
        entries: Mapping[str, zipfile.ZipInfo] = MappingProxyType({}),
        made: Callable[[PlainTensor], Any] = numbers_of,
    ) -> None:
        self.made = made
        self.trees, self.data, self.archive, self.folder, self.entries = trees, data, archive, folder, entries
        self.left = MOST_BYTES
        self.room = min(MOST_BYTES, MOST_SHARES * max(len(data), sum(info.file_size for info in entries.values())))
        self.storages: dict[str, bytes] = {}
        self.arrays: dict[str, Any] = {}

    def whole(self) -> Any:
        """Return the pickle's value with arrays. Raises ValueError for a place that lies elsewhere."""
        tree, self.numbers = self.trees.tree(self.data)
        self.counted = len(self.numbers)
        return self.value(tree)

    def value(self, value: Any) -> Any:
        """Return a part of the tree with arrays."""
        if isinstance(value, dict):
            if value.keys() == {NUMBERS}:
                place = repr(value)
                if place not in self.arrays:
                    runs = [self._run(*run) for run in value[NUMBERS]]
                    self.arrays[place] = np.concatenate(runs) if len(runs) > 1 else runs[0]
                return self.arrays[place]
            if value.keys() == {TENSOR}:
                place = repr(value[TENSOR])
                if place not in self.arrays:
                    self.arrays[place] = self._array(value[TENSOR])
                return self.arrays[place]
            if value.keys() == {BYTES}:
                return np.frombuffer(self._bytes(value), np.uint8)
            if value.keys() == {PACKED}:
                return self._leaves(*value[PACKED])
            if value.keys() == {RECORD}:
                return self._record(*value[RECORD])
            return {key: self.value(part) for key, part in value.items()}
        if isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
            return [self.value(part) for part in value]
        return value

    def _run(self, kind: str, start: int, count: int) -> Any:
        self.counted -= count * KINDS[kind]  # each place is one array
        if min(start, count, self.counted) < 0:
            raise ValueError(kind)
        return np.frombuffer(self.numbers, f"<{kind}", count, start)

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
        data = self.data[start:end]
        return data.decode().encode("latin-1") if as_text else data

    def _array(self, described: Any) -> Any:
        key, dtype, elements, offset, shape, strides = described
        kind = array_dtype(dtype)
        in_pickle = type(key) is int
        source, start = (self.data, key) if not in_pickle or key >= 0 else (self.numbers, -1 - key)
        data = memoryview(source)[start : start + elements * kind.itemsize] if in_pickle else self._storage(str(key))
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (offset + span) * kind.itemsize > len(data) or math.prod(shape) * kind.itemsize > max(len(data), 2**20):
            raise unsafe("a tensor claims more elements than its storage holds")
        values = np.ndarray(shape, kind, data, offset * kind.itemsize, [step * kind.itemsize for step in strides])
        return self._numbers(dtype, values, tuple(strides))

    def _numbers(self, dtype: str, values: Any, strides: tuple[int, ...] = ()) -> Any:
        width = 4 if dtype.startswith(("bfloat", "float8")) else values.itemsize  # these become float32
        self.room -= values.size * width
        if self.room < 0:
            raise unsafe("its tensors share their storages too often: they would take many times the file's size")
        return self.made(PlainTensor(dtype, values, strides))

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

    def _storage(self, key: str) -> bytes:
        if key not in self.storages:
            info = self.entries[f"{self.folder}data/{key}"]
            self.left -= info.file_size
            if self.left < 0:
                raise unsafe(f"its tensors have more than {MOST_BYTES} bytes")
            assert self.archive is not None
            self.storages[key] = self.archive.read(info)
        return self.storages[key]
