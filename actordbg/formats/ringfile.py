"""The bytes of one ring file: the flight recorder of one process, which outlives it.

The file is memory-mapped by the process that trains (`actordbg.capture.ring` writes it) and read by `dump recover` after that
process died, however it died: what a process stored into a shared mapping before SIGKILL is in the page cache.

    0        header     magic, version, length, and JSON: host, pid, store, capacity, ...; replaced whole, CRC behind it
    4,096    books      MAX_LEDGERS x 1,024 bytes: identity as JSON (512), then counts as u64 (see COUNTS)
    20,480   slots      SLOTS x 64 bytes: one for each call whose input is kept (SLOT)
    86,016   kinds      what many calls have in common, as JSON, written once each (`actordbg.capture.kinds`)
    262,144  data       an extent for each slot: NUMBERS as int64, END bytes for what came of the call, then its tensors

A slot's state byte is written last, after everything that it vouches for, and is cleared first; so a slot that says IN_FLIGHT,
DONE or RAISED is whole. Processor stores of one thread are seen in order, and a kill falls between two of them. Each JSON ends
with its CRC-32 (8 hex digits), and a slot has one over its numbers: what says where tensors are is believed only if it is
undamaged. There is no checksum over the tensors: it would cost the training thread more than the copy.

Standard library only: both zones use this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem
from actordbg.formats.dump_record import is_plain_name

MAGIC, VERSION, SUFFIX = b"ADBGRING", 1, ".ring"
UNFINISHED = ".making"
"""Suffix of a ring that is being made; one that is older than UNFINISHED_SECONDS never will be a ring."""
UNFINISHED_SECONDS = 60.0
HEADER = 4096
BOOKS, BOOK, MAX_LEDGERS, IDENTITY = HEADER, 1024, 16, 512
SLOTS_AT = BOOKS + BOOK * MAX_LEDGERS
SLOTS, SLOT_SIZE = 1024, 64
KINDS_AT = SLOTS_AT + SLOTS * SLOT_SIZE
DATA = 262_144
END = 1024
"""Bytes of an extent that are kept free for what came of the call, as JSON."""
MAX_FILE, MAX_KIND = 2**40, 4 * 2**20
MAX_OPEN = 2**20
"""More calls than can ever be open at once."""

FREE, WRITING, IN_FLIGHT, DONE, RAISED = range(5)
"""A slot's state: nothing; being written; the call runs; it returned; it raised."""
OPEN, CAPTURED, DROPPED, SAMPLED = range(4)
"""How a slot's call stands in the books: not closed yet, or closed so."""

SLOT = struct.Struct("<BBhIQQQQIII")
"""state, book, ledger, end length, sequence number, extent's offset, its size, kind's offset, kind's length, count of NUMBERS,
and a CRC-32: see `slot_check`.
"""
_FIXED = struct.Struct("<hQQQQII")

DROP_REASONS = (
    "queue_full", "disk_floor", "disk_full", "write_error", "error", "exit", "cuda_graph", "killed", "other",
)  # fmt: skip
SAMPLE_REASONS = ("ranks", "seq_len", "every", "max_dumps", "max_bytes", "armed", "max_triggered", "other")
COUNTS = (
    "calls",
    "captured",
    "bytes",
    *(f"dropped.{r}" for r in DROP_REASONS),
    *(f"sampled_out.{r}" for r in SAMPLE_REASONS),
)
"""The u64 counts of a ledger's books, in order."""
PLACE = {name: place for place, name in enumerate(COUNTS)}

ALIGNMENT = 64
"""Extents, and the tensors in them, begin at multiples of this many bytes."""

_HEAD = struct.Struct("<8sII")


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def head_bytes(count: int) -> int:
    """What an extent with `count` numbers holds before its first tensor, in bytes."""
    return aligned(8 * count + END)


def header_bytes(facts: Mapping[str, Any]) -> bytes:
    """The header's bytes for these facts; ValueError if they do not fit."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    if len(text) > HEADER - _HEAD.size - 4:
        raise ValueError("the ring's header does not fit into its page")
    head = _HEAD.pack(MAGIC, VERSION, len(text)) + text
    return head + struct.pack("<I", zlib.crc32(head))


def sealed(data: Mapping[str, Any]) -> bytes:
    """JSON with its CRC-32 behind it."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"%b%08x" % (text, zlib.crc32(text))


def slot_check(
    ledger: int, sequence: int, offset: int, size: int, kind_at: int, kind_len: int, count: int, numbers: bytes
) -> int:
    """The CRC-32 of all that does not change while a call is in its slot."""
    return zlib.crc32(_FIXED.pack(ledger, sequence, offset, size, kind_at, kind_len, count) + numbers)


@dataclass(frozen=True)
class Books:
    """Counts of one ledger at the process's death. `identity`: run, rank, world_size, host, pid, instance, role, since."""

    identity: dict[str, Any]
    counts: dict[str, int]

    @property
    def unresolved(self) -> int:
        """Calls that were neither captured nor dropped nor sampled out when the process died."""
        closed = sum(n for name, n in self.counts.items() if name not in ("calls", "bytes"))
        return self.counts["calls"] - closed


@dataclass(frozen=True)
class Slot:
    """One call out of a ring, in its `place`-th slot.

    `kind` is what it has in common with others, `numbers` what it has of its own, `end` what came of it; `data` begins at
    `offset` of the file and ends before `offset + size`.
    """

    place: int
    state: int
    book: int
    ledger: int
    sequence: int
    offset: int
    size: int
    kind: dict[str, Any]
    numbers: tuple[int, ...]
    end: dict[str, Any] = field(default_factory=dict)


@dataclass
class RingFile:
    """A ring as it is on disk. `alive`: its process still holds it. `books` by number; `damaged`: what is wrong with slots that
    were left out.
    """

    path: Path
    facts: dict[str, Any]
    alive: bool
    books: dict[int, Books] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Bytes of the file. CorruptDump if it ends before."""
        with open(self.path, "rb") as file:
            return _exactly(file.fileno(), offset, size, self.path)

    def still_has(self, slot: Slot) -> bool:
        """Whether a slot's call is still there, and so was while it was read. A live process may have written over it."""
        state, _, _, _, sequence, *_ = SLOT.unpack(self.bytes_at(SLOTS_AT + slot.place * SLOT_SIZE, SLOT.size))
        return state in (IN_FLIGHT, DONE, RAISED) and sequence == slot.sequence


def ring_paths(folder: Path) -> list[Path]:
    """Every ring file of a folder, oldest first."""
    try:
        found = [path for path in folder.iterdir() if path.name.endswith(SUFFIX)]
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_unfinished(folder: Path) -> None:
    """Remove what is left of processes that were killed while they made their ring."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS and not is_held(path):
                    path.unlink()


def read_ring(path: Path) -> RingFile:
    """Header, books and slots of a ring; its tensors are read when they are asked for (`bytes_at`).

    Raises CorruptDump, NewerFormat, or StoreProblem where the file cannot be read. Slots that are being written are left out, and
    so are damaged ones (`RingFile.damaged`).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
    try:
        ring = RingFile(path, _header(descriptor, path), _is_held(descriptor))
        ring.books = dict(_books(descriptor, path))
        ring.slots = sorted(_slots(descriptor, path, ring.damaged), key=lambda slot: slot.sequence)
    finally:
        os.close(descriptor)
    return ring


def is_held(path: Path) -> bool:
    """Whether a process still holds this ring. OSError if it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _is_held(descriptor)
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> None:
    """Mark a ring as its process's own until that process dies; OSError where the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_held(descriptor: int) -> bool:
    """Asks for a shared lock: two that ask at once do not take each other for the owner, and a network file system gives an
    exclusive one only to those who may write.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _header(descriptor: int, path: Path) -> dict[str, Any]:
    page = _exactly(descriptor, 0, HEADER, path)
    magic, version, length = _HEAD.unpack_from(page)
    if magic != MAGIC or length > HEADER - _HEAD.size - 4:
        raise CorruptDump(
            f"{path}: not an actordbg ring (wrong magic)", hint="remove it by hand if you know what it is"
        )
    if version != VERSION:
        raise NewerFormat(
            f"{path} is a ring of version {version}, this actordbg reads {VERSION}", hint="upgrade actordbg"
        )
    end = _HEAD.size + length
    if struct.unpack_from("<I", page, end)[0] != zlib.crc32(page[:end]):
        raise CorruptDump(
            f"{path}: damaged header (its CRC-32 does not match)", hint="`dump recover --discard` removes it"
        )
    return dict(json.loads(page[_HEAD.size : end]))


def _books(descriptor: int, path: Path) -> Iterator[tuple[int, Books]]:
    page = _exactly(descriptor, BOOKS, BOOK * MAX_LEDGERS, path)
    for number in range(MAX_LEDGERS):
        first = number * BOOK
        if not page[first]:  # free, or its identity was being written
            continue
        identity = _json(page[first : first + IDENTITY].rstrip(b"\0"), path)
        counts = struct.unpack_from(f"<{len(COUNTS)}Q", page, first + IDENTITY)
        books = Books(identity, dict(zip(COUNTS, counts, strict=True)))
        if not _names_somebody(identity) or not 0 <= books.unresolved <= MAX_OPEN:
            raise CorruptDump(f"{path}: its books are damaged", hint="`dump recover --discard` removes it")
        yield number, books


def _names_somebody(identity: dict[str, Any]) -> bool:
    """Whether an identity is one, and every name in it may be part of a path."""
    return (
        all(type(identity.get(name)) is int and identity[name] >= 0 for name in ("rank", "pid"))
        and all(is_plain_name(str(identity.get(name))) for name in ("run", "instance"))
        and type(identity.get("host")) is str
        and not {"/", "\0"} & set(identity["host"])
        and type(identity.get("since")) is str
    )


def _slots(descriptor: int, path: Path, damaged: list[str]) -> Iterator[Slot]:
    table = _exactly(descriptor, SLOTS_AT, SLOTS * SLOT_SIZE, path)
    for place in range(SLOTS):
        values = SLOT.unpack_from(table, place * SLOT_SIZE)
        if values[0] not in (FREE, WRITING):
            try:
                yield _slot(descriptor, path, place, *values)
            except CorruptDump as error:
                damaged.append(error.message)


def _slot(
    descriptor: int, path: Path, place: int, state: int, book: int, ledger: int, end: int, sequence: int, offset: int,
    length: int, kind_at: int, kind_len: int, count: int, check: int,
) -> Slot:  # fmt: skip
    size = os.fstat(descriptor).st_size
    inside = offset >= DATA and offset + length <= min(size, MAX_FILE) and head_bytes(count) <= length
    described = kind_at >= KINDS_AT and kind_at + kind_len <= size and kind_len <= MAX_KIND
    known = state in (IN_FLIGHT, DONE, RAISED) and book <= SAMPLED and -1 <= ledger < MAX_LEDGERS
    if not inside or not described or not known or end > END:
        raise CorruptDump(f"{path}: a slot points outside of the ring", hint="`dump recover --discard` removes it")
    packed = _exactly(descriptor, offset, 8 * count, path)
    if check != slot_check(ledger, sequence, offset, length, kind_at, kind_len, count, packed):
        raise CorruptDump(f"{path}: a call in it is damaged", hint="`dump recover --discard` removes it")
    numbers = struct.unpack(f"<{count}q", packed)
    text = _exactly(descriptor, offset + 8 * count, end, path)
    kind = _json(_exactly(descriptor, kind_at, kind_len, path), path)
    end_facts = _json(text, path) if end else {}
    return Slot(place, state, book, ledger, sequence, offset, length, kind, numbers, end_facts)


def _json(text: bytes, path: Path) -> dict[str, Any]:
    """What `sealed` made."""
    data = None
    with contextlib.suppress(ValueError, RecursionError):
        data = json.loads(text[:-8]) if int(text[-8:], 16) == zlib.crc32(text[:-8]) else None
    if not isinstance(data, dict):
        raise CorruptDump(f"{path}: what describes a call is damaged", hint="`dump recover --discard` removes it")
    return data


def _exactly(descriptor: int, offset: int, size: int, path: Path) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise CorruptDump(f"{path}: ends too early", hint="`dump recover --discard` removes it")
        data += more
    return data
