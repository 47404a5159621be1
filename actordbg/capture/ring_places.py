"""Where rings lie, and what this machine is called: the same answer in the training process and at the desk. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
from pathlib import Path

from actordbg.capture.control import Control
from actordbg.formats.store_files import StoreFiles

SHARED_MEMORY = Path("/dev/shm")


def host_name() -> str:
    """This machine's name, as far as it can be part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64] or "host"


def place(store: StoreFiles, control: Control) -> Path:
    """The folder for the rings of a store, on this machine: as the switch says, else shared memory, else the store."""
    if control.ring_dir == "store":
        return store.root / "rings"
    if control.ring_dir is not None:
        return Path(control.ring_dir) / _folder_name(store)
    return default_place(store)


def default_place(store: StoreFiles) -> Path:
    """Where rings lie unless the switch says otherwise. ACTORDBG_RING_DIR overrides it on a machine."""
    named = os.environ.get("ACTORDBG_RING_DIR")
    if named:
        return Path(named) / _folder_name(store)
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and in_shared_memory(SHARED_MEMORY):
        return SHARED_MEMORY / _folder_name(store)
    return store.root / "rings"


def in_shared_memory(folder: Path) -> bool:
    """Whether storing there never waits for a disk: its file system is a tmpfs."""
    return _file_system(folder) in ("tmpfs", "ramfs")


def _folder_name(store: StoreFiles) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.realpath(store.root))).hexdigest()[:16]
    return f"actordbg-{os.getuid()}-{digest}"


def _file_system(folder: Path) -> str:
    """The kind of the file system that a folder (or its nearest parent that is there) lies on, from the mount table."""
    real = os.path.realpath(folder)
    best, kind = "", ""
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, point, found, *_ = line.split(" ", 3)
            point = point.replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, found
    return kind
