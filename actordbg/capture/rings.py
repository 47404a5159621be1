"""Makes the ring that the switch asks for, says in the counters where it is, and removes it when nobody needs it.

A ring file stays behind if its process was killed; if it ended by an exception that nobody caught; or if the ring has
something that is nowhere else (a call that raised, or one that could not be written in time). Else it goes with its process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from actordbg import __version__
from actordbg.base.errors import describe
from actordbg.capture import ring as rings
from actordbg.capture import ring_places as machine
from actordbg.capture.control import Control
from actordbg.capture.facts import versions
from actordbg.capture.ring import Ring
from actordbg.capture.watch import Notices
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import StoreFiles


class RingKeeper:
    """The ring of one process."""

    def __init__(self, store: StoreFiles, host: str, token: str, notices: Notices) -> None:
        self._store, self._host, self._token, self._notices = store, host, token, notices
        self._ring: Ring | None = None
        self._wanted: tuple[Any, ...] | None = None
        self._made = 0
        self._incomplete = False

    def ring_for(self, control: Control, queued: int) -> Ring:
        """The ring that a switch asks for: the one there is, or a new one. Never fails: without a file it is private."""
        wanted = (control.ring > 0, control.ring_bytes, control.ring_dir)
        if self._ring is None or wanted != self._wanted:
            before, self._ring = self._ring, self._make(control, queued)
            self._wanted = wanted
            if before is not None:
                before.remove()
        self._ring.keep = control.ring if self._ring.path is not None else 0
        return self._ring

    def complete(self) -> None:
        """Add to the ring's header what takes some milliseconds to find out."""
        if self._ring is not None and self._ring.path is not None and self._incomplete:
            self._incomplete = False
            self._ring.describe(self._facts() | {"versions": versions()})
            self._notices.over("ring")
            rings.forget_old(self._ring.path.parent)

    def about(self) -> dict[str, Any] | None:
        """What the counters say of the ring; None if there is no file."""
        ring = self._ring
        if ring is None or ring.path is None:
            return None
        running = ring.running
        return {
            "path": str(ring.path),
            "keeps": ring.keep,
            "bytes": ring.arena.limit,
            "missed": ring.missed,
            "in_flight": len(running),
            "in_flight_s": ring.seconds_in(running[0]) if running else None,
        }

    def forked(self) -> None:
        """In a forked child: the ring is the parent's."""
        if self._ring is not None:
            self._ring.let_go()

    def close(self, written: bool) -> None:
        """The process ends: remove the file unless it has something to tell. `written`: the queue is empty."""
        ring = self._ring
        if ring is None or ring.path is None:
            return
        kept = getattr(sys, "last_value", None) is not None or not written
        try:
            if not kept:
                kept = True
                kept = ring.is_worth_keeping()
        finally:
            if kept:
                ring.let_go()
            else:
                ring.remove()

    def _make(self, control: Control, queued: int) -> Ring:
        if not control.ring:
            return Ring.private(control.ring_bytes, queued)
        folder = machine.place(self._store, control)
        self._made += 1
        name = f"{self._host}-{os.getpid()}-{self._token}-{self._made}"
        try:
            ring = Ring.create(folder, name, self._facts(), control.ring_bytes, queued)
        except Exception as error:  # noqa: BLE001  # whatever it is: calls are recorded without a ring, too
            self._notices.warn(
                "ring", f"no ring in {folder}: {describe(error)}; the inputs of a process that is killed will be lost"
            )
            return Ring.private(control.ring_bytes, queued)
        self._incomplete = True
        return ring

    def _facts(self) -> dict[str, Any]:
        return {
            "store": str(self._store.root),
            "host": self._host,
            "pid": os.getpid(),
            "boot_id": _boot_id(),
            "made": now_timestamp(),
            "actordbg": __version__,
        }


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
