"""Turns headers of dumps into columns of the catalog: the code that runs 100,000 times.

The full check of a record (`parse_record`) builds dataclasses in Python. Here msgspec parses the JSON of many records straight
into the columns and checks their types and ranges on the way, in C; every other check is one step over all records, since
Python's overhead per file exceeds the cost of the checks. If any record is irregular, the whole batch is rejected, and each
record goes through the full check (`row_of`), which accepts it or says what is wrong. So the same rules apply to every row.

All files are opened before the first is read, and the kernel is told to read them in parallel.

Example::

    columns = read_columns("/shared/store/dumps/ppo/rank0000/", names, "ppo", 0)
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import chain
from typing import Annotated, Any, Literal

import msgspec

from actordbg.base.errors import StoreProblem
from actordbg.catalog import tables
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import (
    DEFAULTS,
    MAGIC,
    MAX_DEPTH,
    OUTPUT_PREFIX,
    RECORD_VERSION,
    RNG_PREFIX,
    SUFFIX,
    DumpRecord,
    is_plain_name,
)
from actordbg.formats.record_reading import damaged, is_moment, parse_record
from actordbg.formats.store_files import open_regular
from actordbg.trainers.trainer import TRAINER

_COUNT = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NUMBER = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_KINDS: dict[str, Any] = {"str": str, "int": _COUNT, "bool": bool, "float": float | _NUMBER}


def _field(name: str, annotation: str) -> tuple[Any, ...]:
    """Describe a plain field of the record to msgspec, which checks it as `record_reading` does."""
    kind = _KINDS[annotation.partition(" ")[0]]
    if name not in DEFAULTS:
        return name, kind
    return name, kind | None if DEFAULTS[name] is None else kind, DEFAULTS[name]


_PLAIN = {field.name: _field(field.name, str(field.type)) for field in fields(DumpRecord) if field.name in tables.DUMP_COLUMNS}
FIELDS = tuple(_PLAIN)
"""Columns of `dump` that are fields of the record, in this order."""
VERSIONS = tuple(name for name in tables.DUMP_COLUMNS if name.endswith("_version"))
_MEMBERS: dict[str, tuple[type, tuple[str, ...]]] = {
    "arguments": (bool, ("return_output", "return_logprobs", "return_entropy", "allgather_logits")),
    "actor": (str, ("trainer", "adapter", "function")),
    "versions": (str, tuple(name.removesuffix("_version") for name in VERSIONS)),
}
"""Objects of a record with members that are columns: the type and names of these members."""
_FLAGS, _ACTOR, _ = (names for _, names in _MEMBERS.values())
DUMP_COLUMNS = (*FIELDS, "padding", *_FLAGS, *_ACTOR, *VERSIONS, "with_outputs", "with_rng", "bytes", "pack")
"""Columns of the rows that this module makes, in this order."""
Columns = Sequence[Sequence[Any]]
"""Values of many rows: for each of DUMP_COLUMNS, the values of all rows."""

_AT_HOME = (TRAINER.package, None, f"{TRAINER.actor_module}:Actor.forward")
"""The actor of a record without `actor`: that of the trainer that needs no adapter."""
AT_ONCE = 256
"""Dumps that are read together: all of them are read again if one is irregular."""
FIRST_READ = 2048
"""Bytes of the first read: most records are shorter, and the payload behind them is not needed."""
_LONGEST = 16_384
"""Bytes of the longest record on the fast path, which caches the objects of records."""
_HEAD = struct.Struct("<4sI").unpack_from
_CHECK = 9
"""Bytes after a record's line: a newline and the checksum."""
_INT64 = 2**63

_Quick: Any = msgspec.defstruct(
    "_Quick",
    [
        *_PLAIN.values(),
        ("tensors", dict[str, msgspec.Raw], msgspec.field(default_factory=dict)),
        *((name, msgspec.Raw, msgspec.Raw(b"{}")) for name in _MEMBERS),
        ("format_version", Literal[RECORD_VERSION]),
    ],
    kw_only=True,
    gc=False,
)
_decode = msgspec.json.Decoder(_Quick).decode


def _picker(kind: type, names: Iterable[str]) -> Any:
    """Return a cached parser of an object's JSON into its members `names`, None if absent; ValueError for other types."""
    members = msgspec.defstruct("_Members", [(name, kind | None, None) for name in names], gc=False)
    parse = msgspec.json.Decoder(members).decode
    return lru_cache(maxsize=64)(lambda text: msgspec.structs.astuple(parse(text)))


_PICKERS = {name: _picker(*members) for name, members in _MEMBERS.items()}
"""By object of a record. Most dumps have equal objects, so the results are cached."""
_plain_run = lru_cache(maxsize=64)(is_plain_name)


def columns_of(lines: Sequence[bytes], sizes: Sequence[int], pack: str | None = None) -> Columns:
    """Return the columns of records from their JSON lines. sizes: bytes of each dump. pack: the pack that holds them, if any.

    ValueError or RecursionError if any record may be invalid: `row_of` checks each in full.
    """
    if not lines or not all(map(_is_countable, lines)):
        raise ValueError("msgspec does not check this record in full")
    records = [_decode(line) for line in lines]
    fields = dict(zip(FIELDS, zip(*map(msgspec.structs.astuple, records), strict=True), strict=False))
    named = all(map(is_plain_name, fields["dump_id"])) and all(map(_plain_run, fields["run"]))
    if not named or not all(map(is_moment, fields["timestamp"])):
        raise ValueError("invalid name or time")
    positions = [rows * length for rows, length in zip(fields["batch_size"], fields["seq_len"], strict=True)]
    if max(positions) >= _INT64:
        raise ValueError("a number beyond 64 bits")
    padding = [count - tokens for count, tokens in zip(positions, fields["tokens"], strict=True)]
    flags, actors, versions = ([pick(bytes(getattr(record, name))) for record in records] for name, pick in _PICKERS.items())
    actors = list(map(_actor, actors, fields["source"]))
    names = {*chain.from_iterable(record.tensors for record in records)}
    recorded = [_recorded(record.tensors) for record in records] if any(_recorded(names)) else [(False, False)] * len(records)
    more = (zip(*values, strict=True) for values in (flags, actors, versions, recorded))
    return [*fields.values(), padding, *chain.from_iterable(more), sizes, [pack] * len(sizes)]


def row_of(line: bytes, size: int, pack: str | None = None) -> tuple[Any, ...]:
    """Return the row of one record, in the order of DUMP_COLUMNS. Raises CorruptDump or NewerFormat for an invalid line."""
    with contextlib.suppress(ValueError, RecursionError):
        return tuple(value for (value,) in columns_of([line], [size], pack))
    record = parse_record(line)
    if record.batch_size * record.seq_len >= _INT64:
        raise damaged("the record has a number that does not fit into 64 bits")
    flags, actor, versions = (
        tuple(value if type(value := getattr(record, name).get(member)) is kind else None for member in members)
        for name, (kind, members) in _MEMBERS.items()
    )
    padding = record.batch_size * record.seq_len - record.tokens
    plain = (getattr(record, name) for name in FIELDS)
    return (*plain, padding, *flags, *_actor(actor, record.source), *versions, *_recorded(record.tensors), size, pack)


def _actor(actor: tuple[Any, ...], source: str) -> tuple[Any, ...]:
    """Return trainer, adapter and function of a call; a captured or imported record without a trainer gets the default."""
    return _AT_HOME if actor[0] is None and source != "create" else actor


def _recorded(tensors: Iterable[str]) -> tuple[bool, bool]:
    """Check whether tensors of these names include outputs, and RNG states."""
    return any(name.startswith(OUTPUT_PREFIX) for name in tensors), any(name.startswith(RNG_PREFIX) for name in tensors)


def _is_countable(line: bytes) -> bool:
    """Check whether msgspec validates this line as strictly as the full check.

    Records are written in ASCII: outside it, msgspec does not check the characters of the fields that it skips. Nor does it
    limit the depth of nesting.
    """
    return len(line) <= _LONGEST and line.isascii() and line.count(b"[") + line.count(b"{") <= MAX_DEPTH


def read_columns(prefix: str, names: Sequence[str], run: str, rank: int | None) -> Columns | None:
    """Read the headers of the dumps `names` in one folder as columns.

    prefix: the folder's path with a trailing slash. Returns None if any header is unreadable, invalid, in a wrong place or
    unusually long; the caller then reads them one by one.
    """
    try:
        columns = columns_of(*_lines(prefix, names))
    except (OSError, ValueError, RecursionError, struct.error):  # msgspec's errors are ValueErrors
        return None
    ids, runs, ranks = (columns[DUMP_COLUMNS.index(name)] for name in ("dump_id", "run", "rank"))
    return columns if list(ids) == list(names) and {*runs} == {run} and {*ranks} == {rank} else None


def read_row(path: str, dump_id: str, run: str, rank: int | None) -> tuple[Any, ...]:
    """Read the row of the dump file at `path`, whose place says `dump_id`, `run` and `rank`.

    Raises CorruptDump or NewerFormat for an invalid file, a plain StoreProblem for a valid file in the wrong place, OSError if
    it cannot be read.
    """
    line, rest = dumpfile.read_line(path)
    if not rest:
        raise damaged("ends after its record: the payload is missing")
    row = row_of(line, 8 + len(line) + _CHECK + rest)
    record = dict(zip(DUMP_COLUMNS, row, strict=True))
    if (record["dump_id"], record["run"], record["rank"]) != (dump_id, run, rank):
        raise StoreProblem(
            f"its record belongs at dumps/{record['run']}/rank{record['rank']:04d}/{record['dump_id']}{SUFFIX}",
            hint="move it there, or import the original again",
        )
    return row


def _lines(prefix: str, names: Sequence[str]) -> tuple[list[bytes], list[int]]:
    """Read record lines, verify their checksums, and return file sizes. ValueError or struct.error if one is irregular."""
    descriptors: list[int] = []
    try:
        for name in names:
            descriptors.append(open_regular(f"{prefix}{name}{SUFFIX}"))
        for descriptor in descriptors if hasattr(os, "posix_fadvise") else ():
            os.posix_fadvise(descriptor, 0, FIRST_READ, os.POSIX_FADV_WILLNEED)
        heads = [os.read(descriptor, FIRST_READ) for descriptor in descriptors]
        lines, checks = zip(*map(_parts, descriptors, heads), strict=True)
        sizes = [os.lseek(descriptor, 0, os.SEEK_END) for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    sums = struct.pack(f">{len(lines)}I", *map(zlib.crc32, lines)).hex("\n", 4)
    whole = all(size > 8 + len(line) + _CHECK for size, line in zip(sizes, lines, strict=True))
    if not whole or b"".join(checks) != b"\n" + sums.encode():
        raise ValueError(prefix)
    return list(lines), sizes


def _parts(descriptor: int, head: bytes) -> tuple[bytes, bytes]:
    """Return a record's line and checksum from the first bytes of its file; read on if the record is longer."""
    magic, length = _HEAD(head)
    end = 8 + length
    if magic != MAGIC or not _CHECK < length <= _LONGEST:
        raise ValueError("not a dump, or an unusually long record")
    if len(head) < end:
        head += os.read(descriptor, end - len(head))
    return head[8 : end - _CHECK], head[end - _CHECK : end]
