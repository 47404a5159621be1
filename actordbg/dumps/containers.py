"""What a file is, by its content, and what it holds as plain data: nothing in it is executed, and its name says nothing.

| Container | Read by | As |
|---|---|---|
| `torch.save` archive | `pickle_tree`, in the decoding process; tensors as numpy arrays | one value |
| npz, safetensors | numpy without pickles; our reader of safetensors headers | one dict of columns |
| parquet | pyarrow, where it is installed | one dict of columns for each batch of rows |
| a DataProto of verl | `pickle_tree`, which finds the archive in it; the archive as above | one dict of columns |
| JSON lines | strict JSON, a line at a time | one dict for each line |

Sizes that a file claims are checked before memory is taken for them. Any other file is named, with the way to get what
it holds: `OTHERS` is the table.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from actordbg.base.errors import ActordbgError, Unsupported
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.pickle_machine import corrupt, unsafe
from actordbg.dumps.pickle_tree import LEFT_OUT, PACKED, PROTO, TENSOR, VERL
from actordbg.formats.dump_record import MAX_RECORD, SAFETENSORS_DTYPES
from actordbg.formats.encoding import PlainTensor, array_dtype
from actordbg.formats.record_reading import strict_header, strict_json
from actordbg.store.payload import numbers_of

PICKLE, ARCHIVE, NPZ, SAFETENSORS, PARQUET, JSON_LINES = (
    "pickle", "torch.save archive", "npz", "safetensors", "parquet", "JSON lines",
)  # fmt: skip
DATA_PROTO = "DataProto"
UNKNOWN = "unknown"
HEAD = 2**16
"""Bytes of a file's beginning by which it is known."""
MOST_BYTES = 2**30
"""Largest sum of the arrays of a file that is read at once."""
MOST_SHARES = 16
"""How many times as large as their storages the different tensors of an archive may be, together."""
MOST_LINE = 2**26
"""Longest line of JSON, in bytes."""
MOST_DIRECTORY = 2**26
"""Largest table of contents of an archive, in bytes."""
MOST_DICT = 2**24
"""Most values of a line."""


@dataclass(frozen=True)
class Other:
    """A file that is recognized, and not read. mark: bytes in its beginning. what: whose it is. way: how to get what it holds."""

    mark: bytes
    what: str
    way: str
    at_start: bool = False


OTHERS = (
    Other(b"SQLite format 3\0", "an SQLite database", "trackio's metrics: `actordbg lint FILE` judges them", True),
    Other(b":W&B", "an offline run of W&B: a log without rows", "`wandb sync`, export it as CSV: `actordbg lint FILE`", True),
    Other(b"brain.Event:", "TensorBoard's events", "`actordbg lint FILE` judges them"),
    Other(b"\xdc\x00\x10", "prime-rl's micro-batches (rollouts/step_N/rank_R.bin): msgpack without names",
          "prime-rl's `--enable-token-export` writes token_exports/, which is read"),
    Other(b"_rebuild_tensor_batch", "a training input of SkyRL: a pickle of its TensorBatch",
          "`actordbg run --adapter skyrl` records these rows; or torch.save(dict(batch), 'rows.pt')"),
    Other(b"openrlhf.trainer", "experiences of OpenRLHF: a pickle of its classes",
          "`actordbg run --calls forward,loss` records these rows; or torch.save([vars(e) for e in experiences], 'rows.pt')"),
    Other(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", "of torch.save's format before 2020", "torch.save it again, as an archive",
          True),
    Other(b"pg_config", "torch's flight recorder of collectives", "`torchfrtrace` reads it: it holds no rows"),
    Other(b'"traceEvents"', "a trace of torch's profiler", "Perfetto shows it: it holds no rows"),
    Other(b'"dump_data_dir"', "a dump of msprobe: figures of operations", "`msprobe compare` reads it: it holds no rows"),
    Other(b'"log_history"', "transformers' trainer_state.json", "`actordbg lint FILE` judges it"),
    Other(b"\x1f\x8b", "compressed with gzip", "decompress it first", True),
    Other(b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first", True),
)  # fmt: skip
"""Files that the door knows and does not read."""
TEXTS = (
    ({"input", "output", "step"}, "verl's rollout_data_dir: texts, without token ids",
     "`actordbg run --adapter verl` records the ids"),
    ({"prompt", "completion", "step"}, "TRL's completions: texts, without token ids",
     "`actordbg run --adapter trl` records the ids"),
    ({"messages"}, "conversations: texts, without token ids", "`actordbg turns --template MODEL` judges a chat template"),
)  # fmt: skip
"""Names of columns of files that have texts only."""


def container_of(path: Path) -> str:
    """Return what kind of container a file is, by its first bytes; UNKNOWN for others. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head[:4] == b"PK\x03\x04":
        return NPZ if b".npy" in head[30:300] else ARCHIVE
    if head[:4] == b"PAR1":
        return PARQUET
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return DATA_PROTO if b"verl.protocol" in head[:64] else PICKLE
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MAX_RECORD:
        return SAFETENSORS
    first, newline, _ = head.lstrip().partition(b"\n")
    is_line = not newline or first.rstrip().endswith(b"}")  # else an object over several lines
    return JSON_LINES if first[:1] == b"{" and is_line else UNKNOWN


def other_at(path: Path) -> Unsupported | None:
    """Return the error that says what a file is that is not read, and how to get what it holds; None if that is not known."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    for other in OTHERS:
        if head.startswith(other.mark) if other.at_start else other.mark in head:
            return Unsupported(f"it is {other.what}", hint=other.way)
    return None


def text_error(names: object) -> Unsupported | None:
    """Return the error for rows with these columns, if they are known to have texts only."""
    known = {*names} if isinstance(names, (Mapping, list, set)) else set()
    for marks, what, way in TEXTS:
        if marks <= known:
            return Unsupported(f"it is {what}", hint=way)
    return None


def contents(path: Path, kind: str, trees: LegacyReader) -> Iterator[Any]:
    """Yield what a container holds, as the module's table says. Raises CorruptDump, UnsafeInput, Unsupported, OSError."""
    try:
        if kind == JSON_LINES:
            with path.open("rb") as file:
                yield from _lines(file, path)
        elif kind == PARQUET:
            yield from _parquet(path)
        elif kind == SAFETENSORS:
            yield _safetensors(path)
        else:
            reads: dict[str, Callable[[BinaryIO], Any]]
            reads = {NPZ: _npz, ARCHIVE: partial(_archive, trees), DATA_PROTO: partial(_data_proto, trees)}
            with path.open("rb") as file:
                yield reads[kind](file)
    except ActordbgError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        struct.error,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise corrupt(f"damaged: {error!s:.200}") from None


def _lines(file: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines; NaN and infinities are read as Python writes them. Raises ValueError, UnsafeInput."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise unsafe(f"line {number} has more than {MOST_LINE} bytes")
        if not line.strip():
            continue
        if not line.endswith(b"\n") and number > 1 and not line.rstrip().endswith(b"}"):
            raise corrupt(f"truncated: line {number} has no end")
        try:
            value = strict_json(line, _decoded, most=MOST_DICT)
        except ValueError as error:
            raise corrupt(f"line {number} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise corrupt(f"line {number} is not an object")
        yield value


def _decoded(text: str) -> Any:
    """Parse JSON; what only Python reads (NaN, infinities, halves of surrogates) takes longer."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def _zip(file: BinaryIO) -> zipfile.ZipFile:
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


def _data_proto(trees: LegacyReader, file: BinaryIO) -> Any:
    """Return the columns of verl's `DataProto.save_to_disk`, a pickle with a `torch.save` archive in it, and its step's number.

    Its arrays of objects (`non_tensor_batch`: uid, data_source, prompts) are left out.
    """
    if file.seek(0, os.SEEK_END) > trees.limits.file_bytes:
        raise Unsupported(
            f"it is a DataProto of more than {trees.limits.file_bytes} bytes",
            hint="save a part of its rows: data[:256].save_to_disk('rows.pkl')",
        )
    file.seek(0)
    data = file.read()
    tree = _require_read(trees.tree(data))
    start, end = tree[PROTO]
    columns = _archive(trees, io.BytesIO(data[start:end]))
    if not isinstance(columns, dict):
        raise corrupt("its batch is not a TensorDict")
    about = tree["meta_info"]
    return columns | {"global_steps": about.get("global_steps") if isinstance(about, dict) else None}


def _require_read(tree: Any) -> Any:
    """Return a tree, unless it is that of a DataProto whose bytes are not in their place."""
    if tree == {LEFT_OUT: VERL}:
        raise Unsupported(
            "it is a DataProto of verl in a form that is not read",
            hint="data.save_to_disk('rows.pkl') without VERL_DATAPROTO_SERIALIZATION_METHOD, with tensordict 0.5 or later",
        )
    return tree


def _archive(trees: LegacyReader, file: BinaryIO) -> Any:
    """Return the value of a `torch.save` archive, with numpy arrays for its tensors."""
    with _zip(file) as archive:
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
            raise unsafe(f"its pickle has more than {trees.limits.file_bytes} bytes")
        tree = _require_read(trees.tree(archive.read(name)))
        return _Revived(archive, folder, entries).value(tree)


class _Revived:
    """Replaces the places of tensors in a tree by arrays.

    left: bytes of storages that may still be read. room: bytes that arrays may still take: many tensors may lie in one storage.
    """

    def __init__(self, archive: zipfile.ZipFile, folder: str, entries: Mapping[str, zipfile.ZipInfo]) -> None:
        self.archive, self.folder, self.entries, self.left = archive, folder, entries, MOST_BYTES
        self.room = min(MOST_BYTES, MOST_SHARES * sum(info.file_size for info in entries.values()))
        self.storages: dict[str, bytes] = {}
        self.arrays: dict[str, Any] = {}

    def value(self, value: Any) -> Any:
        """Return the value with arrays."""
        if isinstance(value, dict):
            if value.keys() == {TENSOR}:
                place = repr(value[TENSOR])
                if place not in self.arrays:
                    self.arrays[place] = self._array(value[TENSOR])
                return self.arrays[place]
            if value.keys() == {PACKED}:
                return self._leaves(*value[PACKED])
            return {key: self.value(part) for key, part in value.items()}
        if isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value):
            return [self.value(part) for part in value]
        return value

    def _array(self, described: Any) -> Any:
        key, dtype, _, offset, shape, strides = described
        kind = array_dtype(dtype)
        data = self._storage(str(key))
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (offset + span) * kind.itemsize > len(data) or math.prod(shape) * kind.itemsize > max(len(data), 2**20):
            raise unsafe("a tensor claims more elements than its storage holds")
        values = np.ndarray(shape, kind, data, offset * kind.itemsize, [step * kind.itemsize for step in strides])
        return self._numbers(dtype, values)

    def _numbers(self, dtype: str, values: Any) -> Any:
        width = 4 if dtype.startswith(("bfloat", "float8")) else values.itemsize  # these become float32
        self.room -= values.size * width
        if self.room < 0:
            raise unsafe("its tensors share their storages too often: they would take many times the file's size")
        return numbers_of(PlainTensor(dtype, values, ()))

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
            self.storages[key] = self.archive.read(info)
        return self.storages[key]


def _npz(file: BinaryIO) -> dict[str, Any]:
    """Return the arrays of an npz; those of Python objects are left out."""
    columns, total = {}, 0
    with _zip(file) as archive:
        members = archive.infolist()
        for info in members:
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(member)
            total += math.prod(shape) * dtype.itemsize
            if total > MOST_BYTES or math.prod(shape) * dtype.itemsize > info.file_size:
                raise unsafe(f"{info.filename:.80} claims {list(shape)} values of {dtype}")
            if dtype.hasobject or dtype.kind not in "biuf":
                continue
            with archive.open(info) as member:
                columns[info.filename.removesuffix(".npy")] = np.lib.format.read_array(member, allow_pickle=False)
    if not columns:
        raise Unsupported(
            "it has no arrays of numbers; those of Python objects are not read", hint="save rows as arrays of numbers"
        )
    return columns


def _safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file, as numbers; they are views of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = strict_header(file.read(begin - 8))
    if sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()) > MOST_BYTES:
        raise unsafe(f"its tensors have more than {MOST_BYTES} bytes")
    columns = {}
    for name, entry in header.items():
        dtype, width = SAFETENSORS_DTYPES[entry["dtype"]]
        (first, last), shape = entry["data_offsets"], entry["shape"]
        if math.prod(shape) * width != last - first or not 0 <= first <= last <= size - begin:
            raise unsafe(f"{name:.80} claims more bytes than the file has")
        values = np.memmap(path, array_dtype(dtype), "r", begin + first, tuple(shape)) if last > first else np.empty(shape)
        columns[name] = numbers_of(PlainTensor(dtype, np.asarray(values), ()))
    return columns


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield batches of rows as columns of lists."""
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError:
        raise Unsupported("it is parquet, and pyarrow is not installed here", hint="pip install pyarrow") from None
    try:
        table = ParquetFile(path, buffer_size=2**20)
        groups = (table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups))
        if max(groups, default=0) > MOST_BYTES:
            raise unsafe(f"a row group has more than {MOST_BYTES} bytes")
        for batch in table.iter_batches(batch_size=256):
            yield {name: _column(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    except ArrowException as error:
        raise corrupt(f"damaged: {error!s:.200}") from None


def _column(column: Any) -> Any:
    """Return a column of parquet: of lists of numbers an array for each row, NaN for null; else Python's values."""
    from pyarrow import types

    kind = column.type
    listed = (types.is_list(kind) or types.is_large_list(kind)) and not column.null_count
    if not listed or not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return column.to_pylist()
    ends = column.offsets.to_numpy()
    return np.split(column.flatten().to_numpy(zero_copy_only=False), ends[1:-1] - ends[0])
