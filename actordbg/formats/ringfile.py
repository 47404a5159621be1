"""The format of a ring file: the flight recorder of one process, which outlives the process.

The training process maps the file (`actordbg.capture.ring` writes it), and `dump recover` reads it
(`actordbg.formats.recording_reading`) after that process died in any way: stores into a shared mapping before SIGKILL are in the
page cache.

    0        header     magic, version, length, and JSON: host, pid, store, capacity, ...; replaced whole, CRC behind it
    4,096    books      MAX_LEDGERS x 1,024 bytes: identity as JSON (512), then counts as u64 (see COUNTS)
    20,480   slots      SLOTS x 64 bytes: one for each call whose input is kept (SLOT)
    86,016   kinds      facts that many calls share, as JSON, written once each (`actordbg.capture.recorded_call`)
    262,144  data       an extent for each slot: NUMBERS as int64, END bytes for the call's outcome, then its tensors

A slot's state byte is written last, after everything that it covers, and cleared first; so a slot in state IN_FLIGHT, DONE or
RAISED is complete. Stores of one thread become visible in order, and a kill falls between two of them. Each JSON ends with its
CRC-32 (8 hex digits), and a slot has a checksum of its numbers: the places of tensors are used only if they are undamaged. The
tensors themselves have no checksum: it would cost the training thread more than the copy.

This module also decides where rings are stored, the name of this machine, and which old rings to remove, equally in training and
at the desk. It never touches a file that another host's process may hold. Standard library only.
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

from actordbg.formats.store_files import StoreFiles, atomic_write, file_system, make_folder, open_regular

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
"""Bytes of an extent that are reserved for the call's outcome, as JSON."""

FREE, WRITING, IN_FLIGHT, DONE, RAISED = range(5)
"""A slot's state: nothing; being written; the call runs; it returned; it raised."""
OPEN, CAPTURED, DROPPED, SAMPLED = range(4)
"""State of a slot's call in the books: not closed yet, or how it was closed."""

SLOT = struct.Struct("<BBhIQQQQIII")
"""state, book, ledger, end length, sequence number, extent's offset, its size, kind's offset, kind's length, count of NUMBERS,
and `slot_check`.
"""
CAPTURE, CAPTURE_AT = struct.Struct("<Q"), 56
"""In a slot: what its ledger's count `captured` becomes with this call. Written before its book says CAPTURED, and counted after:
so a kill in between is seen.
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
"""Counts before this index, except the first three, are of closed calls."""


def pending(counts: Sequence[int]) -> int:
    """Return the number of calls in the ring: neither captured, dropped nor sampled out."""
    return counts[0] - counts[1] - sum(counts[3:CLOSED])


def totals(counts: Sequence[int]) -> dict[str, Any]:
    """Return a ledger's counts in the form of its counters file: counts by reason in dicts, without zeros."""
    result: dict[str, Any] = {"pending": pending(counts), "dropped": {}, "sampled_out": {}, "triggered": {}}
    for name, count in zip(COUNTS, counts, strict=True):
        kind, _, reason = name.partition(".")
        if not reason:
            result[name] = count
        elif count:
            result[kind][reason] = count
    del result["ended"]
    return result


OWN_NUMBERS = 7
"""Numbers of a call before those of its tensors (`actordbg.capture.recorded_call.Item.own`)."""
COUNTERS_FORMAT = 1
"""Format of the counters files that the same process publishes."""
MOST_OLD = 64
"""Most rings of dead processes that a store may have on one machine."""
SHARED_MEMORY = Path("/dev/shm")
_MADV_POPULATE_WRITE = 23
ALIGNMENT = 64
"""Extents, and the tensors in them, begin at multiples of this many bytes."""

HEAD = struct.Struct("<8sII")


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to a multiple of ALIGNMENT."""
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@functools.cache
def head_bytes(count: int) -> int:
    """Return the bytes of an extent with `count` numbers before its first tensor."""
    return aligned(8 * count + END)


def header_bytes(facts: Mapping[str, Any]) -> bytes:
    """Return the header's bytes for these facts. ValueError if they do not fit."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    if len(text) > HEADER - HEAD.size - 4:
        raise ValueError("the ring's header does not fit into its page")
    head = HEAD.pack(MAGIC, VERSION, len(text)) + text
    return head + struct.pack("<I", zlib.crc32(head))


def sealed(data: Mapping[str, Any]) -> bytes:
    """Return `data` as JSON, followed by its CRC-32."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"%b%08x" % (text, zlib.crc32(text))


def slot_check(*numbers: Any) -> int:
    """Return the checksum of a ledger, SLOT's numbers from the sequence on, and NUMBERS. Integers hash alike everywhere."""
    return hash(numbers) & 0xFFFFFFFF


def hold(descriptor: int) -> None:
    """Lock a ring for its process until that process dies. OSError if the file system has no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def host_name() -> str:
    """Return this machine's name, with characters that a file name may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64] or "host"


def place(store: StoreFiles, ring_dir: str | None = None) -> Path:
    """Return the folder for a store's rings on this machine: the preferred one, or the store's if others may write to that."""
    preferred = wanted_place(store, ring_dir)
    return preferred if preferred.parent == store.root or is_ours(preferred) else store.root / "rings"


def is_ours(folder: Path) -> bool:
    """Check whether a folder is missing, or is a real folder of this user to which nobody else may write."""
    try:
        status = os.lstat(folder)
    except OSError:
        return True
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def wanted_place(store: StoreFiles, ring_dir: str | None = None) -> Path:
    """Return the preferred folder: the switch's, else ACTORDBG_RING_DIR, else shared memory, else the store's."""
    named = ring_dir or os.environ.get("ACTORDBG_RING_DIR")
    if named and ring_dir != "store":
        return Path(named) / _folder_name(store)
    if ring_dir is None and os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and in_shared_memory(SHARED_MEMORY):
        return SHARED_MEMORY / _folder_name(store)
    return store.root / "rings"


def in_shared_memory(folder: Path) -> bool:
    """Check whether storing there never waits for a disk: by the mount table, it (or its nearest existing parent) is a tmpfs."""
    return file_system(folder) in ("tmpfs", "ramfs")


def _folder_name(store: StoreFiles) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(store.root))).hexdigest()[:16]
    return f"actordbg-{os.getuid()}-{digest}"


def new_file(path: Path) -> int:
    """Create a file and return its descriptor. Recreates a folder that vanishes meanwhile, with another process's last ring."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    for _ in range(10):
        make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o600)
    return os.open(path, flags, 0o600)


def mapped(path: Path, size: int) -> mmap.mmap:
    """Map the file through a second descriptor: mmap keeps it, and with the lock's a forked child would keep the ring alive."""
    descriptor = open_regular(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def back(descriptor: int, shared: bool, first: int, length: int) -> None:
    """Allocate memory (`shared`) or disk for part of a ring. OSError if only what data loaders and NCCL need is left, or none."""
    space = os.fstatvfs(descriptor)
    left = space.f_bavail * space.f_frsize - length
    if shared and space.f_blocks and left < space.f_blocks * space.f_frsize // 4:
        raise OSError(errno.ENOSPC, "a quarter of the shared memory is reserved for others")
    os.posix_fallocate(descriptor, first, length)


def touch(memory: mmap.mmap, first: int, length: int) -> None:
    """Map the pages now, so that the training thread does not take the page faults. Older kernels lack this advice."""
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_WRITE, first, length)


UNFINISHED_SECONDS = 60.0
"""Age after which an unfinished ring is abandoned."""


def ring_paths(folder: Path) -> list[Path]:
    """Return the ring files of a folder, oldest first."""
    rings = []
    with contextlib.suppress(OSError):  # no folder, or an invalid name
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # removed meanwhile
                rings.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(rings)]


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed while they made their ring."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS and not is_held(path):
                    path.unlink()


def is_held(path: Path) -> bool:
    """Check whether a process still holds this ring. OSError if it cannot be opened."""
    with open(open_regular(path), "rb") as file:
        return is_locked(file.fileno())


def is_locked(descriptor: int) -> bool:
    """Check for an owner by trying a shared lock.

    With a shared lock, two checkers at once do not take each other for the owner; and a network file system grants an exclusive
    lock only to processes that may write.
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
    """Truncate the oldest rings of this host's dead processes, beyond `most`, to their books, and remove unfinished rings.

    So a job that is killed every night does not fill the memory, and `dump recover` still counts the lost calls.
    """
    remove_unfinished(folder)
    dead = []
    for path in ring_paths(folder):
        with contextlib.suppress(OSError):
            if path.name.rsplit("-", 3)[0] == host_name() and path.stat().st_size > SLOTS_AT and not is_held(path):
                dead.append(path)
    for path in dead[: max(0, len(dead) - most)]:
        with contextlib.suppress(OSError), open(open_regular(path), "rb") as ring:
            atomic_write(path, ring.read(SLOTS_AT))  # a new file: processes that map the old one keep it
