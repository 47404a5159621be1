"""Many dumps' headers to columns of the catalog: what an index does with a folder.

The same checks as `dump_rows` makes of one dump, each as one step over all of them: Python between the steps of a single file
takes longer than the steps. Where one dump is odd, there is no answer for any of them; `dump_rows.read_row` says of each what it
is. So the columns are those of its rows, which a test holds, also of 2,000 damaged files.

All files are opened before the first one is read. If the first ones come slowly, the disk is told of the others, and brings
them side by side instead of one after the other.

Example::

    columns = read_columns("/shared/store/dumps/ppo/rank0000/", names, "ppo", 0)
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from time import perf_counter
from typing import Any

from actordbg.catalog import dump_rows as one_row
from actordbg.catalog.dump_rows import FIRST_READ, MOMENT, Columns
from actordbg.formats.dump_record import MAGIC, OUTPUT_PREFIX, RNG_PREFIX, SUFFIX, is_plain_name
from actordbg.formats.store_files import open_regular

AT_ONCE = 256
"""Dumps that are read together: the more, the more are read again where one is odd."""
_TRIED, _COLD_S = 8, 30e-6
"""So many files are read first. One that is in memory takes 2 us; where they take longer on average, a disk is waited for."""
_HEAD = struct.Struct("<4sI").unpack_from
_CHECK = 9
"""Bytes behind a record's line: a newline and the checksum."""


def read_columns(prefix: str, names: Sequence[str], run: str, rank: int | None) -> Columns | None:
    """The columns of what `read_row` says of the dumps `names` in one folder, whose path `prefix` is with a slash behind.

    None where one of them cannot be read, is not sound, is in a wrong place, or is longer than most.
    """
    try:
        lines, sizes = _lines(prefix, names)
        found: list[Any] = [one_row.decode(line) for line in lines]
        picked = [_picked(one) for one in found]
        fields = list(zip(*map(one_row.values_of, found), strict=True))[: one_row.FIELDS]
        for moment in fields[3]:
            datetime.fromisoformat(moment[:26])
    except (OSError, ValueError, RecursionError, struct.error):  # msgspec's errors are ValueErrors
        return None
    return _joined(fields, picked, found, sizes) if _in_place(fields, names, run, rank) else None


def _picked(found: Any) -> tuple[tuple[Any, ...], ...]:
    """The values of CALL_FLAGS, SEAM and VERSIONS."""
    flags, seam, versions = bytes(found.arguments), bytes(found.actor), bytes(found.versions)
    return one_row.pick_flags(flags), one_row.pick_seam(seam), one_row.pick_versions(versions)


def _in_place(fields: Columns, names: Sequence[str], run: str, rank: int | None) -> bool:
    """Whether all are named as their files are, belong to this run and rank, and have times that can be sorted."""
    ids, runs, ranks, moments = fields[:4]
    if list(ids) != list(names) or {*runs} != {run} or {*ranks} != {rank} or not is_plain_name(run):
        return False
    return all(map(is_plain_name, ids)) and all(map(MOMENT.match, moments))


def _joined(fields: Columns, picked: Sequence[Any], found: Sequence[Any], sizes: Sequence[int]) -> Columns:
    """The columns in the order of DUMP_COLUMNS."""
    shapes = zip(fields[one_row.BATCH_SIZE], fields[one_row.SEQ_LEN], fields[one_row.TOKENS], strict=True)
    padding = [rows * length - tokens for rows, length, tokens in shapes]
    names = {*chain.from_iterable(one.tensors for one in found)}
    special = any(name.startswith((OUTPUT_PREFIX, RNG_PREFIX)) for name in names)
    kinds = [one_row.kinds_in(one.tensors) for one in found] if special else [(False, False)] * len(found)
    flags, seams, versions = zip(*picked, strict=True)
    homes = map(one_row.seam_of, seams, fields[one_row.SOURCE])
    more = (zip(*values, strict=True) for values in (flags, kinds, homes, versions))
    return [*fields, padding, *chain.from_iterable(more), sizes, [None] * len(sizes)]


def _lines(prefix: str, names: Sequence[str]) -> tuple[list[bytes], list[int]]:
    """The records' lines, their checksums compared, and the sizes of the files. ValueError or struct.error where one is odd."""
    descriptors: list[int] = []
    try:
        for name in names:
            descriptors.append(open_regular(f"{prefix}{name}{SUFFIX}"))
        lines, checks = _parts(descriptors, _heads(descriptors))
        sizes = [os.lseek(one, 0, os.SEEK_END) for one in descriptors]
    finally:
        for one in descriptors:
            os.close(one)
    sums = struct.pack(f">{len(lines)}I", *map(zlib.crc32, lines)).hex("\n", 4)
    if b"".join(checks) != b"\n" + sums.encode() or not all(map(one_row.countable, lines)):
        raise ValueError(prefix)
    if any(size <= 8 + len(line) + _CHECK for size, line in zip(sizes, lines, strict=True)):
        raise ValueError(prefix)
    return lines, sizes


def _heads(descriptors: Sequence[int]) -> list[bytes]:
    """The first bytes of each of these files."""
    start = perf_counter()
    heads = [os.read(one, FIRST_READ) for one in descriptors[:_TRIED]]
    if perf_counter() - start > _TRIED * _COLD_S and hasattr(os, "posix_fadvise"):
        for one in descriptors[_TRIED:]:
            os.posix_fadvise(one, 0, FIRST_READ, os.POSIX_FADV_WILLNEED)
    return heads + [os.read(one, FIRST_READ) for one in descriptors[_TRIED:]]


def _parts(descriptors: Sequence[int], heads: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The records' lines, and the checksums behind them, from the first bytes of the files and what comes behind those."""
    lines, checks = [], []
    for descriptor, head in zip(descriptors, heads, strict=True):
        magic, length = _HEAD(head)
        end = 8 + length
        if magic != MAGIC or not _CHECK < length <= one_row.MOST_QUICK:
            raise ValueError("not a dump, or a long one")
        if len(head) < end:
            head += os.read(descriptor, end - len(head))
        lines.append(head[8 : end - _CHECK])
        checks.append(head[end - _CHECK : end])
    return lines, checks
