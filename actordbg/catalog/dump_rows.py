"""Turns headers of dumps into columns of the catalog: the code that runs 100,000 times.

The full check of a record (`parse_record`) builds dataclasses in Python. Here msgspec parses the JSON of many records straight
into the columns and checks their types and ranges on the way, in C; every other check is one step over all records, since
Python's overhead per file exceeds the cost of the checks. If any record is irregular, the whole batch is rejected, and each
record goes through the full check (`columns_of_one`), which accepts it or says what is wrong. So the same rules apply to all.

All files are opened before the first is read, and the kernel is told to read them in parallel.

Example::

    columns = read_columns("/shared/store/dumps/ppo/rank0000/", names, "ppo", 0)
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import mul, sub
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import astuple

from actordbg.base.errors import StoreProblem
from actordbg.catalog import tables
from actordbg.catalog.columns import COMPUTED, Column, DumpRow
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import (
    DEFAULTS,
    MAGIC,
    MAX_DEPTH,
    OUTPUT_PREFIX,
    RECORD_VERSION,
    RNG_PREFIX,
    SUFFIX,
    is_plain_name,
)
from actordbg.formats.record_reading import damaged, is_moment, parse_record
from actordbg.formats.store_files import open_regular
from actordbg.trainers.trainer import TRAINER

_COUNT = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_NUMBER = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_KINDS: dict[type, Any] = {str: str, int: _COUNT, bool: bool, float: float | _NUMBER}


def _field(name: str, column: Column) -> tuple[Any, ...]:
    """Describe a plain field of the record to msgspec, which checks it as `record_reading` does."""
    kind = _KINDS[column.type]
    if name not in DEFAULTS:
        return name, kind
    return name, kind | None if DEFAULTS[name] is None else kind, DEFAULTS[name]


_TAKEN = {name: column for name, column in DumpRow.columns.items() if name in tables.DUMP_COLUMNS and column.of != COMPUTED}
_OBJECTS = {
    of: {name: column.type for name, column in _TAKEN.items() if column.of == of}
    for of in dict.fromkeys(column.of for column in _TAKEN.values() if column.of)
}
"""Objects of a record with members that are columns: these columns, and their types."""
Columns = Mapping[str, Sequence[Any]]
"""Values of many dumps by column, for each of `tables.DUMP_COLUMNS`."""

_ACTOR = tuple(_OBJECTS["actor"])
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


def _members(of: str) -> Any:
    """Return the type of an object's members that are columns, None if absent."""
    members = [(_member(name), kind | None, None) for name, kind in _OBJECTS[of].items()]
    return msgspec.defstruct(of, members, gc=False, frozen=True)


def _member(name: str) -> str:
    """Return the member that a column shows: `torch` for `torch_version`."""
    return name.removesuffix("_version")


_Quick: Any = msgspec.defstruct(
    "_Quick",
    [
        *(_field(name, column) for name, column in _TAKEN.items() if not column.of),
        *((of, kind := _members(of), kind()) for of in _OBJECTS),
        ("tensors", dict[str, msgspec.Raw], msgspec.field(default_factory=dict)),
        ("format_version", Literal[RECORD_VERSION]),
    ],
    kw_only=True,
    gc=False,
)
_decode = msgspec.json.Decoder(_Quick).decode
_plain_run = lru_cache(maxsize=64)(is_plain_name)


def columns_of(lines: Sequence[bytes], sizes: Sequence[int], pack: str | None = None) -> Columns:
    """Return the columns of records from their JSON lines. sizes: bytes of each dump. pack: the pack that holds them, if any.

    ValueError or RecursionError if any record may be invalid: `columns_of_one` checks each in full.
    """
    if not lines or not all(map(_is_countable, lines)):
        raise ValueError("msgspec does not check this record in full")
    return _columns(list(map(_decode, lines)), sizes, pack)


def columns_of_one(line: bytes, size: int, pack: str | None = None) -> Columns:
    """Return the columns of one record. Raises CorruptDump or NewerFormat for an invalid line."""
    with contextlib.suppress(ValueError, RecursionError):
        return columns_of([line], [size], pack)
    record = parse_record(line)
    for of, columns in _OBJECTS.items():  # a member of another type counts as absent
        kinds, members = {_member(name): kind for name, kind in columns.items()}, getattr(record, of)
        for name in [name for name, value in members.items() if type(value) is not kinds.get(name)]:
            del members[name]
    try:
        return _columns([_decode(record.to_json())], [size], pack)
    except ValueError:
        raise damaged("the record has a number that does not fit into 64 bits") from None


def joined(blocks: Sequence[Columns]) -> Columns:
    """Return several blocks of columns as one; {} for none."""
    return {name: [*chain.from_iterable(block[name] for block in blocks)] for name in blocks[0]} if blocks else {}


def _columns(records: Sequence[Any], sizes: Sequence[int], pack: str | None) -> Columns:
    """Return the columns of parsed records; ValueError if a name, a time or a number is invalid."""
    columns = dict(zip(_Quick.__struct_fields__, zip(*map(astuple, records), strict=True), strict=True))
    for of, names in _OBJECTS.items():
        columns |= zip(names, zip(*map(astuple, columns.pop(of)), strict=True), strict=True)
    named = all(map(is_plain_name, columns["dump_id"])) and all(map(_plain_run, columns["run"]))
    if not named or not all(map(is_moment, columns["timestamp"])):
        raise ValueError("invalid name or time")
    positions = list(map(mul, columns["batch_size"], columns["seq_len"]))
    if max(positions) >= _INT64:
        raise ValueError("a number beyond 64 bits")
    actors = map(_actor, columns["source"], *(columns[name] for name in _ACTOR))
    columns |= zip(_ACTOR, zip(*actors, strict=True), strict=True)
    outputs, states = zip(*map(_recorded, map(tuple, columns.pop("tensors"))), strict=True)
    del columns["format_version"]
    return columns | {
        "padding": list(map(sub, positions, columns["tokens"])),
        "with_outputs": outputs,
        "with_rng": states,
        "bytes": sizes,
        "pack": [pack] * len(records),
    }


@lru_cache(maxsize=256)
def _actor(source: str, *actor: str | None) -> tuple[str | None, ...]:
    """Return trainer, adapter and function of a call; a captured or imported record without a trainer gets the default."""
    return _AT_HOME if actor[0] is None and source != "create" else actor


@lru_cache(maxsize=256)
def _recorded(tensors: tuple[str, ...]) -> tuple[bool, bool]:
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
    place = list(columns["dump_id"]) == list(names) and {*columns["run"]} == {run} and {*columns["rank"]} == {rank}
    return columns if place else None


def read_one(path: str, dump_id: str, run: str, rank: int | None) -> Columns:
    """Read the columns of the dump file at `path`, whose place says `dump_id`, `run` and `rank`.

    Raises CorruptDump or NewerFormat for an invalid file, a plain StoreProblem for a valid file in the wrong place, OSError if
    it cannot be read.
    """
    line, rest = dumpfile.read_line(path)
    if not rest:
        raise damaged("ends after its record: the payload is missing")
    columns = columns_of_one(line, 8 + len(line) + _CHECK + rest)
    place = tuple(columns[name][0] for name in ("dump_id", "run", "rank"))
    if place != (dump_id, run, rank):
        raise StoreProblem(
            f"its record belongs at dumps/{place[1]}/rank{place[2]:04d}/{place[0]}{SUFFIX}",
            hint="move it there, or import the original again",
        )
    return columns


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
