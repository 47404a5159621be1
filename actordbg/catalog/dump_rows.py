"""Dumps' headers to rows of the catalog: the path that runs 100,000 times.

The full check of a record (`parse_record`) builds dataclasses in Python. Here msgspec parses the JSON straight into
the columns and checks their types and ranges on the way, in C. What it refuses goes through the full check, which
says what is wrong, or accepts it; so every row has been held to the same rules.

One dump at a time; `many_headers` reads many together, with the same checks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

from actordbg.base.errors import CorruptDump, StoreProblem
from actordbg.catalog.tables import DumpColumns, columns_of
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import (
    DEFAULTS,
    MAGIC,
    MAX_DEPTH,
    MAX_RECORD,
    OUTPUT_PREFIX,
    RECORD_VERSION,
    RNG_PREFIX,
    SUFFIX,
    DumpRecord,
    is_plain_name,
)
from actordbg.formats.record_reading import parse_record
from actordbg.formats.store_files import open_regular
from actordbg.trainers.trainer import TRAINER

_RECORD, _TABLE = columns_of(DumpRecord), columns_of(DumpColumns)
RECORD_FIELDS = tuple(name for name in _TABLE if name in _RECORD)
"""Columns of `dump` that are fields of the record, in this order; it begins with dump_id, run, rank and timestamp."""

CALL_FLAGS = tuple(name for name, one in _TABLE.items() if one.source == "arguments")
SEAM = tuple(name for name, one in _TABLE.items() if one.source == "actor")
VERSIONS = tuple(name for name, one in _TABLE.items() if one.source == "versions")
Columns = Sequence[Sequence[Any]]
"""Values of many rows: for each of DUMP_COLUMNS those of all rows."""
DUMP_COLUMNS = (*RECORD_FIELDS, "padding", *CALL_FLAGS, "with_outputs", "with_rng", *SEAM, *VERSIONS, "bytes", "pack")
"""Columns of the rows that `read_row` and `row_of` make, in this order."""

SOURCE = RECORD_FIELDS.index("source")
_HOME = (TRAINER.package, None, f"{TRAINER.actor_module}:Actor.forward")
"""The SEAM of a call that names none: one of the trainer that needs no adapter."""
_PACKAGES = tuple(name.removesuffix("_version") for name in VERSIONS)
FIRST_READ = 2048
"""Most records are shorter, and what follows is the payload, which nobody wants here."""
_INT64 = 2**63
MOST_QUICK = 16_384
"""Longest record of which parts are remembered."""
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z", re.ASCII)

_Count = Annotated[int, msgspec.Meta(ge=0, le=_INT64 - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Real = Annotated[float, msgspec.Meta(ge=-float(_INT64), lt=float(_INT64))]  # a whole number beyond is none that SQLite holds
_SIZES = ("batch_size", "seq_len")
_KINDS = {"int": _Count, "str": str, "bool": bool, "float": _Real}


def _kind(name: str) -> Any:
    """The type of a record's field, as msgspec checks it."""
    kind = _Size if name in _SIZES else _KINDS[_RECORD[name].kind]
    return kind | None if _RECORD[name].nullable else kind


def _column(name: str, kind: Any) -> tuple[Any, ...]:
    if name not in DEFAULTS:
        return name, kind
    default = DEFAULTS[name]
    return name, kind, msgspec.field(default_factory=dict) if default == {} else default


_OBJECTS = ("arguments", "actor", "versions")
"""Objects of a record of which some members have columns. Most dumps say the same in them, so what they say is remembered."""
_Columns = msgspec.defstruct(
    "_Columns",
    [
        *(_column(name, _kind(name)) for name in RECORD_FIELDS),
        _column("tensors", dict[str, msgspec.Raw]),
        *((name, msgspec.Raw, msgspec.Raw(b"{}")) for name in _OBJECTS),
        ("format_version", Literal[RECORD_VERSION]),
    ],
    kw_only=True,
    gc=False,
)
decode = msgspec.json.Decoder(_Columns).decode
values_of = msgspec.structs.astuple
FIELDS, BATCH_SIZE, SEQ_LEN, TOKENS = (
    len(RECORD_FIELDS),
    *(RECORD_FIELDS.index(one) for one in ("batch_size", "seq_len", "tokens")),
)


def _picker(names: Iterable[str], kind: type) -> Any:
    """What picks the members of these names out of an object's JSON, None where there is none. ValueError for another type."""
    members = msgspec.defstruct("_Members", [(name, kind | None, None) for name in names], gc=False)
    parse = msgspec.json.Decoder(members).decode
    return lru_cache(maxsize=64)(lambda text: values_of(parse(text)))


pick_flags, pick_seam, pick_versions = PICKS = _picker(CALL_FLAGS, bool), _picker(SEAM, str), _picker(_PACKAGES, str)


def read_row(path: str, dump_id: str, run: str, rank: int | None) -> tuple[Any, ...]:
    """The row of the dump file at `path`, which by its place is called `dump_id` and belongs to `run` and `rank`.

    Raises CorruptDump or NewerFormat for a file that is not what it should be, a plain StoreProblem for a sound one in the
    wrong place, OSError if it cannot be read.
    """
    row = row_of(*_line(path))
    if row[0] != dump_id or row[1] != run or row[2] != rank:
        raise StoreProblem(
            f"its record belongs at dumps/{row[1]}/rank{row[2]:04d}/{row[0]}{SUFFIX}",
            hint="move it there, or import its original again",
        )
    return row


def row_of(text: bytes, size: int, pack: str | None = None) -> tuple[Any, ...]:
    """The row of a record's line of JSON; `size`: bytes that the dump takes, `pack`: where it lies if not in a file of its own.

    Raises CorruptDump or NewerFormat for a line that is not a sound record.
    """
    fields, tensors, flags, seam, versions = _quickly(text) or _checked(text)
    padding = fields[BATCH_SIZE] * fields[SEQ_LEN] - fields[TOKENS]
    return (*fields, padding, *flags, *kinds_in(tensors), *seam_of(seam, fields[SOURCE]), *versions, size, pack)


def seam_of(seam: tuple[Any, ...], source: str) -> tuple[Any, ...]:
    """The SEAM of a call that says this, or nothing, of it."""
    return _HOME if seam[0] is None and source != "create" else seam


def kinds_in(tensors: Iterable[str]) -> tuple[bool, bool]:
    """Whether there are outputs, and generator states, among tensors of these names."""
    return any(name.startswith(OUTPUT_PREFIX) for name in tensors), any(name.startswith(RNG_PREFIX) for name in tensors)


def _line(path: str) -> tuple[bytes, int]:
    """The record's line of JSON, its checksum compared, and the size of the file."""
    descriptor = open_regular(path)
    try:
        head = os.read(descriptor, FIRST_READ)
        length = int.from_bytes(head[4:8], "little")
        if len(head) < 8 or head[:4] != MAGIC:
            raise CorruptDump("not an actordbg dump (wrong magic)", hint=dumpfile.HINT)
        if length > MAX_RECORD:
            raise CorruptDump(f"its record claims {length} bytes, over the limit of {MAX_RECORD}", hint=dumpfile.HINT)
        while len(head) < 8 + length:
            more = os.read(descriptor, 8 + length - len(head))
            if not more:
                raise CorruptDump("ends inside its record", hint=dumpfile.HINT)
            head += more
        size = os.lseek(descriptor, 0, os.SEEK_END)
    finally:
        os.close(descriptor)
    if size <= 8 + length:
        raise CorruptDump("ends after its record: the payload is missing", hint=dumpfile.HINT)
    return dumpfile.record_line(head[8 : 8 + length], "header"), size


def countable(text: bytes) -> bool:
    """Whether msgspec checks this text as the full check does, or else something is refused.

    Records are written in ASCII: in anything else msgspec does not check the characters of the fields that it skips. It counts
    no levels of nesting either.
    """
    return text.isascii() and text.count(b"[") + text.count(b"{") <= MAX_DEPTH


_Picked = tuple[tuple[Any, ...], Iterable[str], Iterable[Any], tuple[Any, ...], Iterable[Any]]
"""The values of RECORD_FIELDS, names of tensors, values of CALL_FLAGS, SEAM and VERSIONS."""


def _quickly(text: bytes) -> _Picked | None:
    """The picked values, if msgspec finds every one of them sound; None means: ask the full check."""
    if not countable(text):
        return None
    try:
        found: Any = decode(text)
        datetime.fromisoformat(found.timestamp[:26])
        picks = PICKS if len(text) <= MOST_QUICK else (one.__wrapped__ for one in PICKS)
        flags, seam, versions = (pick(bytes(getattr(found, name))) for pick, name in zip(picks, _OBJECTS, strict=True))
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    if not (MOMENT.match(found.timestamp) and is_plain_name(found.dump_id) and plain_run(found.run)):
        return None
    return values_of(found)[:FIELDS], found.tensors, flags, seam, versions


plain_run = lru_cache(maxsize=64)(is_plain_name)


def _checked(text: bytes) -> _Picked:
    """The same values through the full check."""
    record = parse_record(text)
    values = tuple(getattr(record, name) for name in RECORD_FIELDS)
    if record.batch_size * record.seq_len >= _INT64:
        raise CorruptDump("the record has a number that does not fit into 64 bits", hint=dumpfile.HINT)
    flags = (record.arguments.get(name) for name in CALL_FLAGS)
    return (
        values,
        record.tensors,
        tuple(one if one is True or one is False else None for one in flags),
        _texts(record.actor, SEAM),
        _texts(record.versions, _PACKAGES),
    )


def _texts(source: dict[str, Any], names: Iterable[str]) -> tuple[str | None, ...]:
    found = (source.get(name) for name in names)
    return tuple(one if type(one) is str else None for one in found)
