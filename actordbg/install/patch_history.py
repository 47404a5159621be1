"""What the store remembers of patches: the original of every patched file, and one immutable file for each event.

    store/backups/<sha256>/actor.py + origin.json    written before the file is changed
    store/events/<utc>-<pid>-<rand>.json             written after it was changed and proven

Neither is needed to unpatch (the patched file holds all that takes). The backup is for a file that someone damaged, the
events tell `overwritten by an upgrade` from `clean`, and the catalog's table `patch_event` is made from them.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from actordbg.base.errors import StoreProblem
from actordbg.formats.store_files import atomic_write
from actordbg.store.layout import Store

EVENT_FORMAT = 1


@dataclass(frozen=True)
class Event:
    """One patch or unpatch of one file on one host. `timestamp` is ISO-8601 UTC; the hashes are the file's."""

    event: str
    timestamp: str
    target: str
    sha256_before: str
    sha256_after: str
    python: str
    openrlhf_version: str | None
    actordbg_version: str
    host: str | None = None
    format: int = EVENT_FORMAT


def now() -> str:
    """The time as events keep it: "2026-11-20T12:00:00.123456Z"."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def back_up(store: Store, original: bytes, sha256: str, facts: dict[str, Any]) -> Path:
    """Keep `original` under its hash, with `facts` on where it came from, and return its path."""
    path = store.backups / sha256 / "actor.py"
    try:
        if not path.is_file() or path.read_bytes() != original:
            atomic_write(path, original)
        atomic_write(path.with_name("origin.json"), json.dumps(facts, indent=2).encode() + b"\n")
    except OSError as error:
        raise _cannot_write(path, error) from None
    return path


def record(store: Store, event: Event) -> Path:
    """Write one event file; its name sorts by time."""
    stamp = event.timestamp.replace("-", "").replace(":", "")
    path = store.events / f"{stamp}-{os.getpid()}-{secrets.token_hex(4)}.json"
    try:
        atomic_write(path, json.dumps(asdict(event)).encode() + b"\n")
    except OSError as error:
        raise _cannot_write(path, error) from None
    return path


def events(store: Store, target: Path | None = None) -> list[Event]:
    """All events of the store, or those of one file, oldest first; files of another format are left out."""
    found = []
    for path in sorted(store.events.glob("*.json")):
        try:
            event = Event(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            continue
        if event.format == EVENT_FORMAT and target in (None, Path(event.target)):
            found.append(event)
    return found


def standing_patch(store: Store, target: Path) -> Event | None:
    """The last patch of this file on this host, if no unpatch followed it. Hosts may share a store, not their disks."""
    known = [event for event in events(store, target) if event.host in (None, socket.gethostname())]
    return known[-1] if known and known[-1].event == "patch" else None


def _cannot_write(path: Path, error: OSError) -> StoreProblem:
    return StoreProblem(f"cannot write {path}: {error.strerror}", hint="name a store you may write with --store DIR")
