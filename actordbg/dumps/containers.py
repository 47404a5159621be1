"""What a file is, by its content, and what it holds as plain data: nothing in it is executed, and its name says nothing.

| Container | Read by | As |
|---|---|---|
| `torch.save` archive | `pickle_tree`, in the decoding process; tensors as numpy arrays | one value |
| npz, safetensors | numpy without pickles; our reader of safetensors headers | one dict of columns |
| parquet | pyarrow, where it is installed | one dict of columns for each batch of rows |
| a pickle of verl's DataProto or SkyRL's batch | `pickle_tree`, which finds archives and bytes in it | one dict of columns |
| JSON lines | strict JSON, a line at a time | one dict for each line |
| a list in JSON | strict JSON | one dict for each object |
| a pickle of plain rows | `pickle_tree` | one value |

Sizes that a file claims are checked before memory is taken for them. Any other file is named, with the way to get what
it holds: `OTHERS` is the table.
"""

from __future__ import annotations

import json
import math
import re
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
from actordbg.dumps.archives import HEAD, MOST_BYTES, archive_value, open_zip, record_pickle
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.pickle_notes import corrupt, unsafe
from actordbg.formats.dump_record import MAX_RECORD, SAFETENSORS_DTYPES
from actordbg.formats.encoding import PlainTensor, array_dtype
from actordbg.formats.record_reading import strict_header, strict_json
from actordbg.store.payload import numbers_of

PICKLE, ARCHIVE, NPZ, SAFETENSORS, PARQUET, JSON_LINES = (
    "pickle", "torch.save archive", "npz", "safetensors", "parquet", "JSON lines",
)  # fmt: skip
RECORD_PICKLE, JSON_LIST = "pickle of a batch", "list in JSON"
UNKNOWN = "unknown"
MOST_LINE = 2**26
"""Longest line of JSON, in bytes."""
MOST_LIST = 2**27
"""Largest list in JSON, in bytes."""
MOST_COLUMNS = 1000
"""Most arrays of an npz."""
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
    Other(b"vllm_logp\tactor_logp", "Molt's log-probs of one row", "--train.rollout_dump_dir writes all rows, which are read"),
    Other(b"\xdc\x00\x10", "prime-rl's micro-batches (rollouts/step_N/rank_R.bin): msgpack without names",
          "prime-rl's `--enable-token-export` writes token_exports/, which is read"),
    Other(b".experience", "experiences of OpenRLHF or Molt by pickle.dump", "torch.save(experiences, 'rows.pt'), which is read"),
    Other(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", "of torch.save's format before 2020", "torch.save it again, as an archive",
          True),
    Other(b"pg_config", "torch's flight recorder of collectives", "`torchfrtrace` reads it: it holds no rows"),
    Other(b'"traceEvents"', "a trace of torch's profiler", "Perfetto shows it: it holds no rows"),
    Other(b'"dump_data_dir"', "a dump of msprobe: figures of operations", "`msprobe compare` reads it: it holds no rows"),
    Other(b'"log_history"', "transformers' trainer_state.json", "`actordbg lint FILE` judges it"),
    Other(b"\xff\xff\xff\xff", "Arrow of `datasets`", "load_from_disk('DIR').to_parquet('rows.parquet'), which is read", True),
    Other(b"ARROW1", "an Arrow file (feather)", "pandas.read_feather('FILE').to_parquet('rows.parquet'), which is read", True),
    Other(b"pandas.core", "a DataFrame by to_pickle", "frame.to_parquet('rows.parquet'), which is read"),
    Other(b"\x93NUMPY", "one array without a name", "np.savez('rows.npz', input_ids=...), which is read", True),
    Other(b',"[', "a CSV of rows, whose lists are texts", "frame.to_json('rows.jsonl', orient='records', lines=True)"),
    Other(b"\x1f\x8b", "compressed with gzip", "decompress it first", True),
    Other(b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first", True),
)  # fmt: skip
"""Files that the door knows and does not read."""
TEXTS = (
    ({"input", "output", "step"}, "verl's rollout_data_dir: texts, without token ids",
     "--column tokenizer=MODEL encodes them anew; `actordbg run --adapter verl` records the ids"),
    ({"prompt", "completion", "step"}, "TRL's completions: texts, without token ids",
     "--column tokenizer=MODEL encodes them anew; `actordbg run --adapter trl` records the ids"),
    ({"value", "meta"}, "SGLang's dumper: the output of one module, without the rows",
     "`python -m sglang.srt.debug_utils.comparator` holds two such folders against each other"),
    ({"log_probs", "old_log_probs", "advantages"}, "log-probs without token ids, as miles' policy_loss_debug writes them",
     "--save-debug-train-data writes both"),
    ({"chosen_ids", "rejected_ids"}, "pairs of preferences, two answers a row", "--column ids=chosen_ids reads one of them"),
    ({"chosen_input_ids", "rejected_input_ids"}, "pairs of preferences, two answers a row",
     "--column ids=chosen_input_ids reads one of them"),
    ({"chosen", "rejected"}, "preferences: texts, without token ids", "`actordbg run` records a training's calls"),
    ({"resps", "filtered_resps"}, "samples of lm-eval: texts, without token ids", "an engine's own answers have ids"),
    ({"conversations"}, "conversations: texts, without token ids", "`actordbg turns --template MODEL` judges a template"),
    ({"messages"}, "conversations: texts, without token ids", "`actordbg turns --template MODEL` judges a chat template"),
)  # fmt: skip
"""Names of columns of files without a row's token ids."""


def container_of(path: Path) -> str:
    """Return what kind of container a file is, by its first bytes; UNKNOWN for others. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head[:4] == b"PK\x03\x04":
        return NPZ if b".npy" in head[30:300] else ARCHIVE
    if head[:4] == b"PAR1":
        return PARQUET
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return RECORD_PICKLE if b"verl.protocol" in head[:64] or b"skyrl.backends" in head[:64] else PICKLE
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MAX_RECORD:
        return SAFETENSORS
    if re.match(rb"\s*\[\s*{[^\]]*\[", head):
        return JSON_LIST
    first, newline, _ = head.lstrip().partition(b"\n")
    is_line = not newline or first.rstrip().endswith(b"}")  # else an object over several lines
    return JSON_LINES if first[:1] == b"{" and is_line else UNKNOWN


def other_at(path: Path) -> Unsupported | None:
    """Return the error that says what a file is that is not read, and how to get what it holds; None if that is not known."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    for other in OTHERS if head[:2] != b"PK" else ():
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


def contents(path: Path, kind: str, trees: LegacyReader, lines: BinaryIO | None = None) -> Iterator[Any]:
    """Yield what a container holds, as the module's table says. Raises CorruptDump, UnsafeInput, Unsupported, OSError.

    lines: of JSON lines, those to read instead of all.
    """
    try:
        if kind == JSON_LINES:
            with lines or path.open("rb") as file:
                yield from _lines(file)
        elif kind == JSON_LIST:
            yield from _list(path)
        elif kind == PARQUET:
            yield from _parquet(path)
        elif kind == SAFETENSORS:
            yield _safetensors(path)
        else:
            reads: dict[str, Callable[[BinaryIO], Any]]
            reads = {NPZ: _npz, ARCHIVE: partial(archive_value, trees), RECORD_PICKLE: partial(record_pickle, trees)}
            reads[PICKLE] = reads[RECORD_PICKLE]
            with path.open("rb") as file:
                yield reads[kind](file)
    except ActordbgError:
        raise
    except (
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        TypeError,
        EOFError,
        struct.error,
        zipfile.BadZipFile,
        RuntimeError,
    ) as error:
        raise corrupt(f"damaged: {error!s:.200}") from None


def _lines(file: BinaryIO) -> Iterator[dict[str, Any]]:
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


def _list(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list in JSON, which is read whole. Raises ValueError, Unsupported."""
    if path.stat().st_size > MOST_LIST:
        raise Unsupported(f"it is a list in JSON of more than {MOST_LIST} bytes", hint="write JSON lines: an object a line")
    values = strict_json(path.read_bytes(), _decoded, most=MOST_DICT)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise corrupt("it is not a list of objects")
    yield from values


def _decoded(text: str) -> Any:
    """Parse JSON; what only Python reads (NaN, infinities, halves of surrogates) takes longer."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


def _npz(file: BinaryIO) -> dict[str, Any]:
    """Return the arrays of an npz; those of Python objects are left out."""
    columns, total = {}, 0
    with open_zip(file) as archive:
        members = archive.infolist()
        if len(members) > MOST_COLUMNS:
            raise unsafe(f"more than {MOST_COLUMNS} arrays")
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
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
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
