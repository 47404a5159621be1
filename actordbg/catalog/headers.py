"""One dump file's header to one row of the catalog: the path that runs 100,000 times.

The full check of a record (`DumpRecord.from_json`) builds dataclasses and takes several times as long as parsing its
JSON. Here the columns are picked from the parsed JSON, and the *types* of the picked values are looked up in a set of
combinations that the full check has accepted before. A combination not seen yet, or a value out of range, goes through
the full check, which accepts it or says what is wrong. So every row has been held to the same rules, and a store's
hundred thousand records go through the full check about five times.
"""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from operator import itemgetter
from typing import Any

from actordbg import dumpfile
from actordbg.errors import CorruptDump
from actordbg.record import (
    DEFAULTS,
    OUTPUT_PREFIX,
    RECORD_VERSION,
    DumpRecord,
    format_timestamp,
    is_plain_name,
    parse_timestamp,
)

RECORD_FIELDS = (
    "dump_id", "run", "rank", "timestamp", "batch_size", "seq_len", "tokens", "source", "action_len", "role", "step",
    "world_size", "local_rank", "host", "pid", "call_index", "instance", "training", "grad_enabled", "packing_samples",
    "autocast_dtype", "temperature", "model_name", "model_dtype", "replayable",
)  # fmt: skip
"""Columns of `dump` that are fields of the record, in this order."""

CALL_FLAGS = ("return_output", "return_logprobs", "return_entropy", "allgather_logits")
VERSIONS = ("openrlhf", "torch", "transformers", "deepspeed")
DUMP_COLUMNS = (
    *RECORD_FIELDS, "padding", *CALL_FLAGS, "with_outputs", *(f"{name}_version" for name in VERSIONS), "bytes",
)  # fmt: skip
"""Columns of the rows that `read_row` makes, in this order."""

_FIRST_READ = 8192
_INT64 = 2**63
_OUTPUT_KEY = f'"{OUTPUT_PREFIX}'.encode()
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z")
_parse = json.JSONDecoder().raw_decode
_pick = itemgetter(*RECORD_FIELDS, "tensors", "arguments", "versions", "format_version")
_accepted: set[tuple[type, ...]] = set()


def read_row(path: str, dump_id: str, run: str, rank: int | None) -> tuple[Any, ...]:
    """The row of the dump file at `path`, which by its place is called `dump_id` and belongs to `run` and `rank`.

    Raises CorruptDump or NewerFormat for a file that is not what it should be, OSError if it cannot be read.
    """
    header, size = _header(path)
    text = dumpfile.record_line(header, "header")
    values = _quickly(text)
    if values is None:
        values = _checked(text)
    *columns, tensors, arguments, versions, _ = values
    if columns[0] != dump_id or columns[1] != run or columns[2] != rank:
        raise CorruptDump(
            f"its record belongs at dumps/{columns[1]}/rank{columns[2]:04d}/{columns[0]}{dumpfile.SUFFIX}"
        )
    columns.append(columns[4] * columns[5] - columns[6])
    for name in CALL_FLAGS:
        value = arguments.get(name)
        columns.append(value if value is True or value is False else None)
    columns.append(_OUTPUT_KEY in text and any(name.startswith(OUTPUT_PREFIX) for name in tensors))
    for name in VERSIONS:
        value = versions.get(name)
        columns.append(value if type(value) is str else None)
    columns.append(size)
    return tuple(columns)


def _header(path: str) -> tuple[bytes, int]:
    """The record's bytes with their checksum, and the size of the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = os.read(descriptor, _FIRST_READ)
        length = int.from_bytes(head[4:8], "little")
        if len(head) < 8 or head[:4] != dumpfile.MAGIC:
            raise CorruptDump("not an actordbg dump (wrong magic)")
        if length > dumpfile.MAX_RECORD:
            raise CorruptDump(f"its record claims {length} bytes, over the limit of {dumpfile.MAX_RECORD}")
        while len(head) < 8 + length:
            more = os.read(descriptor, 8 + length - len(head))
            if not more:
                raise CorruptDump("ends inside its record")
            head += more
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size <= 8 + length:
        raise CorruptDump("ends after its record: the payload is missing")
    return head[8 : 8 + length], size


def _quickly(text: bytes) -> tuple[Any, ...] | None:
    """The picked values, if their types are known to be good and every value is in range; None means: ask the full check."""
    if b"\\u" in text:  # may hold half a surrogate pair, which SQLite cannot store
        return None
    try:
        string = text.decode()
        data, end = _parse(string)
        v = _pick(DEFAULTS | data)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if end != len(string) or v[-1] != RECORD_VERSION or tuple(map(type, v)) not in _accepted:
        return None
    if not (0 <= v[2] < _INT64 and 0 <= v[4] < 2**31 and 0 <= v[5] < 2**31 and 0 <= v[6] < _INT64 and _fits(v)):
        return None
    try:
        datetime.fromisoformat(v[3][:26])
    except ValueError:
        return None
    return v if _MOMENT.match(v[3]) and is_plain_name(v[0]) and is_plain_name(v[1]) else None


def _fits(v: tuple[Any, ...]) -> bool:
    """Whether the optional integers (and a temperature written as one) fit into SQLite's 64 bits."""
    for value in (v[8], v[10], v[11], v[12], v[14], v[15], v[21]):
        if value is not None and not -_INT64 <= value < _INT64:
            return False
    return True


def _checked(text: bytes) -> tuple[Any, ...]:
    """The same values through the full check; remembers their types as good."""
    record = DumpRecord.from_json(text)
    values = tuple(getattr(record, name) for name in RECORD_FIELDS)
    values = (*values[:3], format_timestamp(parse_timestamp(record.timestamp)), *values[4:])
    if not _fits(values) or record.batch_size * record.seq_len >= _INT64:
        raise CorruptDump("the record has a number that does not fit into 64 bits")
    if not _encodable((*values, *record.versions.values())):
        raise CorruptDump("the record has a text that is not Unicode")
    values = (*values, record.tensors, record.arguments, record.versions, record.format_version)
    _accepted.add(tuple(map(type, values)))
    return values


def _encodable(values: tuple[Any, ...]) -> bool:
    try:
        "".join([value for value in values if isinstance(value, str)]).encode()
    except UnicodeEncodeError:
        return False
    return True
