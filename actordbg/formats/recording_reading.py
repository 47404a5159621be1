"""Read the ring of a recording process, its flight recorder.

The process may be alive, or have died in any way. So every offset, length and name is checked before it is used, damaged or
half-written slots are left out, and nothing here waits for the process.

    ring = read_ring(path)
    tensors_in(ring.bytes_at(slot.offset, slot.size), head_bytes(len(slot.numbers)), slot.numbers, slot.kind["tensors"])
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem, system_errors
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.record_reading import strict_json
from actordbg.formats.ringfile import (
    BOOK,
    BOOKS,
    CAPTURE,
    CAPTURE_AT,
    CAPTURED,
    CLOSED,
    COUNTS,
    DATA,
    DONE,
    END,
    FREE,
    HEAD,
    HEADER,
    IDENTITY,
    IN_FLIGHT,
    KINDS_AT,
    MAGIC,
    MAX_LEDGERS,
    OPEN,
    RAISED,
    SAMPLED,
    SLOT,
    SLOT_SIZE,
    SLOTS,
    SLOTS_AT,
    VERSION,
    WRITING,
    head_bytes,
    is_locked,
    pending,
    slot_check,
    totals,
)
from actordbg.formats.store_files import open_regular, read_regular

MAX_FILE, MAX_KIND = 2**40, 4 * 2**20
MAX_OPEN = 2**20
"""More calls than can ever be open at once."""
Json = dict[str, Any]
"""An object of JSON."""


@dataclass(frozen=True)
class Books:
    """Counts of one ledger when its process died. `identity`: run, rank, world_size, host, pid, instance, role, since."""

    identity: Json
    counts: tuple[int, ...]

    @property
    def unresolved(self) -> int:
        """Return the number of calls that were neither captured nor dropped nor sampled out when the process died."""
        return pending(self.counts)

    def as_counters(self) -> Json:
        """Return these counts in the form of a counters file."""
        return self.identity | totals(self.counts)


@dataclass(frozen=True)
class RingSlot:
    """A call in slot `place` of a ring.

    `kind`: facts that it shares with similar calls; `numbers`: its own; `end`: its outcome; `kept`: further record fields (of a
    call that its process had no time to write). Its data lie in the file from `offset` to `offset + size`.
    """

    place: int
    state: int
    book: int
    ledger: int
    sequence: int
    offset: int
    size: int
    kind: Json
    numbers: tuple[int, ...]
    end: Json = field(default_factory=dict)
    kept: Json = field(default_factory=dict)


@dataclass
class RingFile:
    """A ring on disk. `alive`: its process still holds it. `books`: by number. `damaged`: errors of slots that were left out."""

    path: Path
    facts: Json
    alive: bool
    books: dict[int, Books] = field(default_factory=dict)
    slots: list[RingSlot] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @functools.cached_property
    def ended_by_ray(self) -> bool:
        """Check whether Ray ended the process on purpose (the driver ended, or `ray.kill`), according to Ray's logs.

        Such a process has no time to end in order. If it does not answer within five seconds, it is killed, so that only the
        log of its node's raylet says why. No log says this of a process that crashed or ran out of memory.
        """
        worker = Path(str(self.facts.get("stderr", "")))
        if self.alive or not worker.name.startswith("worker-"):
            return False
        by_raylet = rf"(owner died|job finished|disconnect_type=1\b).* worker_id={re.escape(worker.name.split('-')[1])}"
        said = f"Disconnect, exit_type=INTENDED_|{by_raylet}".encode()
        with contextlib.suppress(OSError, ValueError):
            logs = [*worker.parent.glob(f"python-core-worker-*_{self.facts['pid']}.log"), worker.parent / "raylet.out"]
            return any(re.search(said, read_regular(path)) for path in logs)
        return False

    def state_of(self, books: Books) -> str:
        """Return the state of the process of these books: on, ended, or killed."""
        return "on" if self.alive else "ended" if books.counts[CLOSED] or self.ended_by_ray else "killed"

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Read bytes of the file. CorruptDump if it is too short."""
        with open(open_regular(self.path), "rb") as file:
            return _exactly(file.fileno(), offset, size, self.path)

    def still_has(self, slot: RingSlot) -> bool:
        """Check whether a slot still holds its call, and so held it while it was read: a live process may have overwritten it."""
        state, _, _, _, sequence, *_ = SLOT.unpack(self.bytes_at(SLOTS_AT + slot.place * SLOT_SIZE, SLOT.size))
        return state in (IN_FLIGHT, DONE, RAISED) and sequence == slot.sequence


def read_ring(path: Path) -> RingFile:
    """Read header, books and slots of a ring; read its tensors later with `bytes_at`.

    Raises CorruptDump, NewerFormat, or StoreProblem if the file cannot be read. Slots that are being written are left out, and
    so are damaged slots (`RingFile.damaged`).
    """
    with system_errors(StoreProblem, f"cannot read {path}", "check its permissions"):
        descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
        if os.geteuid() not in (0, status.st_uid):
            raise StoreProblem(f"{path} belongs to another user", hint="run this as that user")
        ring = RingFile(path, _header(descriptor, path), is_locked(descriptor))
        ring.books = dict(_books(descriptor, path))
        if status.st_size != SLOTS_AT:  # its calls were removed for those of later processes
            ring.slots = sorted(_slots(descriptor, ring), key=lambda slot: slot.sequence)
    finally:
        os.close(descriptor)
    return ring


def _header(descriptor: int, path: Path) -> Json:
    page = _exactly(descriptor, 0, HEADER, path)
    magic, version, length = HEAD.unpack_from(page)
    if magic != MAGIC or length > HEADER - HEAD.size - 4:
        raise CorruptDump(f"{path}: not an actordbg ring (wrong magic)", hint="remove it by hand if you know what it is")
    if version != VERSION:
        raise NewerFormat(f"{path} is a ring of version {version}, this actordbg reads {VERSION}", hint="upgrade actordbg")
    end = HEAD.size + length
    if struct.unpack_from("<I", page, end)[0] != zlib.crc32(page[:end]):
        raise _damaged(path, "damaged header (its CRC-32 does not match)")
    facts = None
    with contextlib.suppress(ValueError):
        facts = strict_json(page[HEAD.size : end])
    if not isinstance(facts, dict) or type(facts.get("pid")) is not int:
        raise _damaged(path, "its header does not name its process")
    return facts


def _books(descriptor: int, path: Path) -> Iterator[tuple[int, Books]]:
    page = _exactly(descriptor, BOOKS, BOOK * MAX_LEDGERS, path)
    for number in range(MAX_LEDGERS):
        first = number * BOOK
        if not page[first]:  # free, or its identity was being written
            continue
        identity = _json(page[first : first + IDENTITY].rstrip(b"\0"), path)
        counts = struct.unpack_from(f"<{len(COUNTS)}Q", page, first + IDENTITY)
        books = Books(identity, counts)
        named = all(type(name) is str and is_plain_name(name) for name in map(identity.get, ("run", "instance")))
        numbered = all(type(identity.get(name)) is int and identity[name] >= 0 for name in ("rank", "pid"))
        host = identity.get("host")  # every name may be part of a path
        placed = type(host) is str and not {"/", "\0"} & {*host} and type(identity.get("since")) is str
        if not (named and numbered and placed) or not 0 <= books.unresolved <= MAX_OPEN:
            raise _damaged(path, "its counters are damaged")
        yield number, books


def _slots(descriptor: int, ring: RingFile) -> Iterator[RingSlot]:
    table = _exactly(descriptor, SLOTS_AT, SLOTS * SLOT_SIZE, ring.path)
    for place in range(SLOTS):
        values = SLOT.unpack_from(table, place * SLOT_SIZE)
        if values[0] not in (FREE, WRITING):
            try:
                slot, books = _slot(descriptor, ring.path, place, values), ring.books.get(values[2])
            except CorruptDump as error:
                ring.damaged.append(error.message)
                continue
            (captured,) = CAPTURE.unpack_from(table, place * SLOT_SIZE + CAPTURE_AT)
            uncounted = slot.book == CAPTURED and books is not None and captured == books.counts[1] + 1
            yield replace(slot, book=OPEN) if uncounted else slot


def _slot(descriptor: int, path: Path, place: int, values: tuple[int, ...]) -> RingSlot:
    state, book, ledger, end, sequence, offset, length, kind_at, kind_len, count, check = values
    size = os.fstat(descriptor).st_size
    inside = offset >= DATA and offset + length <= min(size, MAX_FILE) and head_bytes(count) <= length
    described = kind_at >= KINDS_AT and kind_at + kind_len <= size and kind_len <= MAX_KIND
    known = state in (IN_FLIGHT, DONE, RAISED) and book <= SAMPLED and -1 <= ledger < MAX_LEDGERS
    if not inside or not described or not known or end > END:
        raise _damaged(path, "a slot points outside of the ring")
    numbers = struct.unpack(f"<{count}q", _exactly(descriptor, offset, 8 * count, path))
    if check != slot_check(ledger, *values[4:10], numbers):
        raise _damaged(path, "a call in it is damaged")
    end_facts = _json(_exactly(descriptor, offset + 8 * count, end, path), path) if end else {}
    kind, kept = _json(_exactly(descriptor, kind_at, kind_len, path), path), end_facts.pop("record", {})
    call = (sequence, offset, length, kind, numbers)
    return RingSlot(place, state, book, ledger, *call, end=end_facts, kept=kept)


def _damaged(path: Path, what: str) -> CorruptDump:
    return CorruptDump(f"{path}: {what}", hint="run `actordbg dump recover --discard` to remove it")


def _json(text: bytes, path: Path) -> Json:
    """Parse JSON with its CRC-32, as `sealed` makes it."""
    data = None
    with contextlib.suppress(ValueError):
        data = strict_json(text[:-8]) if int(text[-8:], 16) == zlib.crc32(text[:-8]) else None
    if not isinstance(data, dict):
        raise _damaged(path, "the description of a call is damaged")
    return data


def _exactly(descriptor: int, offset: int, size: int, path: Path) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise _damaged(path, "ends too early")
        data += more
    return data
