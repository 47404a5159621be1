"""The bytes of one ring file: the flight recorder of one process, which outlives it.

The file is memory-mapped by the process that trains (`actordbg.capture.ring` writes it) and read by `dump recover`
(`actordbg.formats.recording_reading`) after that process died, however it died: what a process stored into a shared
mapping before SIGKILL is in the page cache.

    0        header     magic, version, length, and JSON: host, pid, store, capacity, ...; replaced whole, CRC behind it
    4,096    books      MAX_LEDGERS x 1,024 bytes: identity as JSON (512), then counts as u64 (see COUNTS)
    20,480   slots      SLOTS x 64 bytes: one for each call whose input is kept (SLOT)
    86,016   kinds      what many calls have in common, as JSON, written once each (`actordbg.capture.recorded_call`)
    262,144  data       an extent for each slot: NUMBERS as int64, END bytes for what came of the call, then its tensors

A slot's state byte is written last, after everything that it vouches for, and is cleared first; so a slot that says IN_FLIGHT,
DONE or RAISED is whole. Processor stores of one thread are seen in order, and a kill falls between two of them. Each JSON ends
with its CRC-32 (8 hex digits), and a slot has a sum of its numbers: what says where tensors are is believed only if it is
undamaged. There is no checksum over the tensors: it would cost the training thread more than the copy.

Also where rings lie, what this machine is called, and which of the rings that lie around have to make room: the same answers in
training and at the desk. Nothing that another host's process may hold is touched. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import mmap
import os
import re
import socket
import stat
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actordbg.formats.store_files import StoreFiles, atomic_write, make_folder, open_regular

MAGIC, VERSION, SUFFIX = b"ADBGRING", 2, ".ring"
UNFINISHED = ".making"
"""Suffix of a ring that is being made."""
HEADER = 4096
BOOKS, BOOK, MAX_LEDGERS, IDENTITY = HEADER, 1024, 16, 512
SLOTS_AT = BOOKS + BOOK * MAX_LEDGERS
SLOTS, SLOT_SIZE = 1024, 64
KINDS_AT = SLOTS_AT + SLOTS * SLOT_SIZE
DATA = 262_144
END = 1024
"""Bytes of an extent that are kept free for what came of the call, as JSON."""

FREE, WRITING, IN_FLIGHT, DONE, RAISED = range(5)
"""A slot's state: nothing; being written; the call runs; it returned; it raised."""
OPEN, CAPTURED, DROPPED, SAMPLED = range(4)
"""How a slot's call stands in the books: not closed yet, or closed so."""

SLOT = struct.Struct("<BBhIQQQQIII")
"""state, book, ledger, end length, sequence number, extent's offset, its size, kind's offset, kind's length, count of NUMBERS,
and `slot_check`.
"""
DROP_REASONS = (
    "queue_full", "disk_floor", "disk_full", "write_error", "error", "exit", "cuda_graph", "killed", "other",
)  # fmt: skip
SAMPLE_REASONS = ("ranks", "seq_len", "every", "max_dumps", "max_bytes", "armed", "max_triggered", "other")
TRIGGERS = ("nan", "exception", "oom", "slow", "logprobs", "before")
COUNTS = (
    "calls", "captured", "bytes", *(f"dropped.{r}" for r in DROP_REASONS), *(f"sampled_out.{r}" for r in SAMPLE_REASONS),
    "ended", "outputs_dropped", "rotated", "rotated_bytes", *(f"triggered.{name}" for name in TRIGGERS),
)  # fmt: skip
"""The u64 counts of a ledger's books, in order. `ended`: 1 if the process came to an orderly end."""
PLACE = {name: place for place, name in enumerate(COUNTS)}
CLOSED = PLACE["ended"]
"""Counts before this one, but the first three, are of closed calls."""


def pending(counts: Sequence[int]) -> int:
    """Calls that are neither captured nor dropped nor sampled out: they are in the ring."""
    return counts[0] - counts[1] - sum(counts[3:CLOSED])


def totals(counts: Sequence[int]) -> dict[str, Any]:
    """A ledger's counts as its counters file has them: those that are kept by reason in a dict each, where they are not 0."""
    told: dict[str, Any] = {"pending": pending(counts), "dropped": {}, "sampled_out": {}, "triggered": {}}
    for name, count in zip(COUNTS, counts, strict=True):
        kind, _, reason = name.partition(".")
        if not reason:
            told[name] = count
        elif count:
            told[kind][reason] = count
    del told["ended"]
    return told


OWN_NUMBERS = 7
"""Numbers of a call before those of its tensors (`actordbg.capture.recorded_call.Item.own`)."""
COUNTERS_FORMAT = 1
"""Of the counters files that the same process publishes."""
MOST_OLD = 64
"""Rings of dead processes that a store may have on one machine."""
SHARED_MEMORY = Path("/dev/shm")
_MADV_POPULATE_WRITE = 23
ALIGNMENT = 64
"""Extents, and the tensors in them, begin at multiples of this many bytes."""

HEAD = struct.Struct("<8sII")


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@functools.cache
def head_bytes(count: int) -> int:
    """What an extent with `count` numbers holds before its first tensor, in bytes."""
    return aligned(8 * count + END)


def header_bytes(facts: Mapping[str, Any]) -> bytes:
    """The header's bytes for these facts; ValueError if they do not fit."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    if len(text) > HEADER - HEAD.size - 4:
        raise ValueError("the ring's header does not fit into its page")
    head = HEAD.pack(MAGIC, VERSION, len(text)) + text
    return head + struct.pack("<I", zlib.crc32(head))


def sealed(data: Mapping[str, Any]) -> bytes:
    """JSON with its CRC-32 behind it."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"%b%08x" % (text, zlib.crc32(text))


def slot_check(*numbers: Any) -> int:
    """The sum of a ledger, of SLOT's numbers from the sequence on, and of NUMBERS: whole numbers hash alike in every process."""
    return hash(numbers) & 0xFFFFFFFF


def hold(descriptor: int) -> None:
    """Mark a ring as its process's own until that process dies; OSError where the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def host_name() -> str:
    """This machine's name, as far as it can be part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64] or "host"


def place(store: StoreFiles, ring_dir: str | None = None) -> Path:
    """The folder for the rings of a store, on this machine: the wanted one, or the store's own if that is not ours alone."""
    wanted = wanted_place(store, ring_dir)
    return wanted if wanted.parent == store.root or is_ours(wanted) else store.root / "rings"


def is_ours(folder: Path) -> bool:
    """Whether a folder is not there yet, or is a real one of this user to which nobody else may write."""
    try:
        found = os.lstat(folder)
    except OSError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def wanted_place(store: StoreFiles, ring_dir: str | None = None) -> Path:
    """As the switch says, else ACTORDBG_RING_DIR, else shared memory, else the store."""
    named = ring_dir or os.environ.get("ACTORDBG_RING_DIR")
    if named and ring_dir != "store":
        return Path(named) / _folder_name(store)
    if ring_dir is None and os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and in_shared_memory(SHARED_MEMORY):
        return SHARED_MEMORY / _folder_name(store)
    return store.root / "rings"


def in_shared_memory(folder: Path) -> bool:
    """Whether storing there never waits for a disk: by the mount table, it (or its nearest parent that is there) is a tmpfs."""
    real = os.path.realpath(folder)
    best, kind = "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, point, found, *_ = line.split(" ", 3)
            point = point.replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind in ("tmpfs", "ramfs")


def _folder_name(store: StoreFiles) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(store.root))).hexdigest()[:16]
    return f"actordbg-{os.getuid()}-{digest}"


def new_file(path: Path) -> int:
    """A descriptor of a new file. Its folder may vanish meanwhile, with another process's last ring: then it is made again."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    for _ in range(10):
        make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o600)
    return os.open(path, flags, 0o600)


def mapped(path: Path, size: int) -> mmap.mmap:
    """Map the file by a second descriptor: mmap keeps one, and with that of the lock a forked child would keep the ring alive."""
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        return mmap.mmap(file.fileno(), size)


def back(descriptor: int, shared: bool, first: int, length: int) -> None:
    """Take memory (`shared`) or disk for a stretch of a ring. OSError if there is none, or only what loaders and NCCL need."""
    space = os.fstatvfs(descriptor)
    left = space.f_bavail * space.f_frsize - length
    if shared and space.f_blocks and left < space.f_blocks * space.f_frsize // 4:
        raise OSError(errno.ENOSPC, "a quarter of the shared memory is left to others")
    os.posix_fallocate(descriptor, first, length)


def touch(memory: mmap.mmap, first: int, length: int) -> None:
    """Map the pages now, so that the thread that trains does not take their faults; an older kernel has no such advice."""
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_WRITE, first, length)


UNFINISHED_SECONDS = 60.0
"""A ring that has been in the making for so long never will be a ring."""


def ring_paths(folder: Path) -> list[Path]:
    """Every ring file of a folder, oldest first."""
    found = []
    with contextlib.suppress(OSError):  # no folder, or a name that no disk takes
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # it went meanwhile
                found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def remove_unfinished(folder: Path) -> None:
    """Remove what is left of processes that were killed while they made their ring."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS and not is_held(path):
                    path.unlink()


def is_held(path: Path) -> bool:
    """Whether a process still holds this ring. OSError if it cannot be opened."""
    with open(open_regular(path), "rb") as file:
        return is_locked(file.fileno())


def is_locked(descriptor: int) -> bool:
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


def forget_old(folder: Path, most: int = MOST_OLD) -> None:
    """Reduce the oldest rings of this host's dead processes, beyond `most`, to their books: a job that is killed every night must
    not fill the memory, and `dump recover` still counts what it lost. Removes what is left of rings that were never finished.
    """
    remove_unfinished(folder)
    dead = []
    for path in ring_paths(folder):
        with contextlib.suppress(OSError):
            if path.name.rsplit("-", 3)[0] == host_name() and path.stat().st_size > SLOTS_AT and not is_held(path):
                dead.append(path)
    for path in dead[: max(0, len(dead) - most)]:
        with contextlib.suppress(OSError), open(open_regular(path), "rb") as ring:
            atomic_write(path, ring.read(SLOTS_AT))  # a new file: whoever maps the old one keeps it
