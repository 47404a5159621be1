"""One call on its way from the training thread to the disk, and what it has in common with others.

Of a call's record, only its number, times, step, and shapes are its own; the rest is that of every other call of the same
actor with the same arguments. So a call (`Item`) refers to its `Kind`: the writer builds records from it, and the ring holds it
once as JSON, so that a call in flight is described without the training thread writing a word.

    numbers(...)     what is the call's own, as integers: see `actordbg.formats.ringfile`
    Item.record(...) the record, from both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from actordbg.capture.binding import Bound
from actordbg.capture.control import Control
from actordbg.capture.facts import ActorFacts, CallFacts, Rank
from actordbg.capture.ledger import Ledger
from actordbg.capture.ring import Entry, Ring
from actordbg.capture.snapshot import Snapshot, Timer
from actordbg.capture.trigger_verdicts import Outcome, Verdict
from actordbg.formats.dump_record import DumpRecord, make_dump_id
from actordbg.formats.encoding import dtype_name
from actordbg.formats.ringfile import CAPTURED, DROPPED, OPEN, SAMPLED, sealed

if TYPE_CHECKING:
    from actordbg.capture.ring import Ring

NO_STEP = -1
MOST_KINDS = 512
"""Kinds that are remembered; with more than these, arguments are different for each call."""


@dataclass(slots=True, eq=False)
class Kind:
    """`fields`: of the record, equal for all calls of this kind. `tensors`: (name, dtype) of each, in order.

    `shared`: other calls refer to it, too. `ring`, `at`: where a ring holds
    `text`; (0, 0): the call's own extent has to.
    """

    fields: dict[str, Any]
    tensors: tuple[tuple[str, str], ...]
    text: bytes
    shared: bool = False
    ring: Ring | None = None
    at: tuple[int, int] = (0, 0)

    def place_in(self, ring: Ring) -> tuple[int, int]:
        """Where this ring holds the text, written there the first time; (0, 0) if it has no room, or is not shared."""
        if self.ring is not ring:
            self.ring, self.at = ring, ring.add_kind(self.text) if self.shared else (0, 0)
        return self.at


@dataclass
class Kinds:
    """The kinds of one process, by what tells them apart."""

    known: dict[Any, Kind] = field(default_factory=dict)

    def of(self, ledger: Ledger, instance: Any, call: CallFacts, bound: Bound, dtypes: tuple[torch.dtype, ...]) -> Kind:
        """The kind of a call. `instance`: its actor (`actordbg.capture.recorder.Instance`)."""
        if bound.extra or any(bound.groups.values()):
            return self._make(ledger, instance, call, bound, dtypes)
        arguments = bound.arguments
        key = (
            ledger.serial, instance.role, call.training, call.grad_enabled, call.autocast_dtype, call.packing_samples,
            call.temperature, *bound.tensors, dtypes, *bound.groups, *arguments, *arguments.values(),
            *map(type, arguments.values()),
        )  # fmt: skip
        try:
            kind = self.known.get(key)
        except TypeError:  # an argument is a list or a dict
            return self._make(ledger, instance, call, bound, dtypes)
        if kind is None:
            kind = self._make(ledger, instance, call, bound, dtypes)
            if len(self.known) < MOST_KINDS:
                kind.shared = True
                self.known[key] = kind
        return kind

    def _make(
        self, ledger: Ledger, instance: Any, call: CallFacts, bound: Bound, dtypes: tuple[torch.dtype, ...]
    ) -> Kind:
        who, rank, about = ledger.identity, instance.rank, instance.about
        fields = _fields(who, rank, instance.role, call, bound, about)
        tensors = tuple((name, dtype_name(dtype)) for name, dtype in zip(bound.tensors, dtypes, strict=True))
        return Kind(fields, tensors, sealed({"fields": fields, "tensors": tensors}))


def _fields(who: Any, rank: Rank, role: str | None, call: CallFacts, bound: Bound, about: ActorFacts) -> dict[str, Any]:
    return {
        "run": who.run,
        "rank": rank.rank,
        "world_size": rank.world_size,
        "local_rank": rank.local_rank,
        "host": who.host,
        "pid": who.pid,
        "instance": who.instance,
        "role": role,
        "training": call.training,
        "grad_enabled": call.grad_enabled,
        "autocast_dtype": call.autocast_dtype,
        "packing_samples": call.packing_samples,
        "temperature": call.temperature,
        "arguments": bound.arguments,
        "process_groups": bound.groups,
        "extra": bound.extra,
        "model_name": about.model_name,
        "model_dtype": about.model_dtype,
        "actor": about.facts,
    }


def numbers(
    call: CallFacts, number: int, token: int, shape: tuple[int, int], tensors: Sequence[int]
) -> tuple[int, ...]:
    """What is one call's own: number, time (ns), monotonic time (ns), step, token of its dump id, B, S, then for each tensor
    its count of dimensions, shape, strides, offset in the extent, bytes.
    """
    step = NO_STEP if call.step is None else call.step
    return (number, call.time_ns, call.monotonic_ns, step, token, *shape, *tensors)


NOWHERE = Entry(0, 0, -1)
"""Of a call that has no place in the ring (yet)."""
NO_KIND = Kind({}, (), b"")
NO_FACTS = CallFacts(0, 0, None, False, None, None, None, None)


@dataclass(slots=True, eq=False)
class Item:
    """One call. `standing` in the books: OPEN (wanted, nothing is decided), CAPTURED, DROPPED or SAMPLED, the last two for a
    `reason`.

    `nbytes`: reserved in the queue; 0 for a call that only the ring keeps. `held`: holds on its place in the ring.
    `whole`: it is copied, and can be written. `deferred`: it is queued when it has run. `queued`: the writer was given it;
    `handled`: has had it. `failed`: something went wrong around its call, so it is none of the last calls. `previous`: the
    calls before it, held in the ring; `cause`: the dump id of the triggered call that this one came before. `path`,
    `written`: its dump file, once published, its record and its safetensors bytes (the latter only where calls before a
    trigger are wanted).
    """

    pid: int
    ledger: Ledger
    control: Control
    ring: Ring
    number: int
    reason: str | None
    standing: int
    entry: Entry = NOWHERE
    kind: Kind = NO_KIND
    call: CallFacts = NO_FACTS
    token: int = 0
    shape: tuple[int, int] = (0, 0)
    nbytes: int = 0
    device: torch.device | None = None
    snapshot: Snapshot | None = None
    outputs: Snapshot | None = None
    timer: Timer | None = None
    error: dict[str, Any] | None = None
    outcome: Outcome | None = None
    rng_after: dict[str, torch.Tensor] | None = None
    previous: tuple[Item, ...] = ()
    held: int = 0
    whole: bool = False
    deferred: bool = False
    queued: bool = False
    handled: bool = False
    failed: bool = False
    cause: str | None = None
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
        if self.entry is not NOWHERE:
            self.ring.set_book(self.entry, self.standing)
