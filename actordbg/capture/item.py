"""One call on its way from the training thread to the disk: its books, its switch, its copies, and what its record needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actordbg.capture.control import Control
from actordbg.capture.facts import CallFacts
from actordbg.capture.kinds import Kind
from actordbg.capture.ledger import Ledger
from actordbg.capture.ring import Entry, Ring
from actordbg.capture.snapshot import Snapshot, Timer
from actordbg.capture.trigger_verdicts import Outcome, Verdict
from actordbg.formats.dump_record import DumpRecord, make_dump_id
from actordbg.formats.ringfile import CAPTURED, DROPPED, OPEN, SAMPLED


@dataclass(slots=True, eq=False)
class Item:
    """One call. `standing` in the books: OPEN (wanted, nothing is decided), CAPTURED, DROPPED or SAMPLED, the last two for a
    `reason`.

    `nbytes`: reserved in the queue; 0 for a call that only the ring keeps. `held`: so is its place in the ring, for the writer.
    `deferred`: it is queued when it has run. `queued`:
    the writer has it, or had it. `previous`: the calls before it, held in the ring. `path`, `written`: its dump file, once
    published, its record and its safetensors bytes (the latter only where calls before a trigger are wanted).
    """

    pid: int
    ledger: Ledger
    control: Control
    ring: Ring
    entry: Entry
    kind: Kind
    call: CallFacts
    number: int
    token: int
    shape: tuple[int, int]
    standing: int
    reason: str | None = None
    nbytes: int = 0
    device: torch.device | None = None
    snapshot: Snapshot | None = None
    outputs: Snapshot | None = None
    timer: Timer | None = None
    error: dict[str, Any] | None = None
    outcome: Outcome | None = None
    rng_after: dict[str, torch.Tensor] | None = None
    previous: tuple[Item, ...] = ()
    held: bool = False
    deferred: bool = False
    queued: bool = False
    path: Path | None = None
    written: tuple[DumpRecord, bytes] | None = None

    def captured(self, nbytes: int, trigger: str | None) -> None:
        """Close the call: its file is published."""
        self.ledger.capture(nbytes, trigger)
        self.standing, self.reason = CAPTURED, None
        self._mirror()

    def dropped(self, reason: str, error: str | None = None) -> None:
        """Close the call: it was wanted and is lost."""
        self.ledger.drop(reason, error)
        self.standing, self.reason = DROPPED, reason
        self._mirror()

    def over_max_bytes(self, nbytes: int) -> bool:
        """Close the call as sampled out if its file of `nbytes` would pass `max_bytes`."""
        over = self.ledger.over_max_bytes(self.control, nbytes)
        if over:
            self.standing, self.reason = SAMPLED, "max_bytes"
            self._mirror()
        return over

    def reopen(self) -> None:
        """A trigger wants a call that was sampled out."""
        if self.standing == SAMPLED and self.reason is not None:
            self.ledger.promote(self.reason)
            self.standing, self.reason = OPEN, None
            self._mirror()

    def close_somehow(self) -> None:
        """Close a call whose books nothing else could close. Calls nothing, so nothing in here can fail."""
        if self.standing == OPEN and self.path is not None:
            self.ledger.captured += 1
            self.standing = CAPTURED
        elif self.standing == OPEN:
            self.ledger.faulted += 1
            self.standing, self.reason = DROPPED, "error"

    def record(self, tensors: dict[str, torch.Tensor], versions: dict[str, str], verdict: Verdict | None) -> DumpRecord:
        """The record of this call with these (complete) copies, all but what `payload.encode` fills in."""
        batch, seq_len = self.shape
        attention, action = tensors.get("attention_mask"), tensors.get("action_mask")
        timestamp, fields = self.call.timestamp, self.kind.fields
        return DumpRecord(
            dump_id=make_dump_id(timestamp, self.number, self.pid, f"{self.token:08x}"),
            timestamp=timestamp,
            monotonic_ns=self.call.monotonic_ns,
            call_index=self.number,
            step=self.call.step,
            batch_size=batch,
            seq_len=seq_len,
            action_len=action.shape[-1] if action is not None and action.dim() else None,
            tokens=int(attention.count_nonzero()) if attention is not None else batch * seq_len,
            replayable=not fields["extra"] and bool(seq_len),
            pinned=verdict is not None,
            triggered=verdict.trigger if verdict else None,
            trigger_facts=verdict.facts if verdict else {},
            versions=versions,
            **fields,
        )

    def _mirror(self) -> None:
        """Say in the ring how the call stands. The ledger and the item agree before that, so that nothing is counted twice."""
        self.ring.set_book(self.entry, self.standing)
