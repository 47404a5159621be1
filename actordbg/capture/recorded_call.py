"""A call on its way from the training thread to the disk (`Item`), and what it shares with similar calls (`Kind`).

In a call's record, only number, times, step and shapes are specific to it (`Item.own`); the rest is equal for all calls of the
same actor with the same arguments. So an `Item` refers to its `Kind`: the writer builds records from it, and the ring holds it
once as JSON, so that a call in flight is described without the training thread writing any text.

After the call, `trigger_of` decides which trigger, if any, keeps it. It runs in the writer thread and blocks nobody: outputs are
judged from their copies, times on a GPU from events that the writer thread waits for, memory from the allocator's counters.

**slow** compares with the running median of the last MEDIAN_OF calls of the same actor and gradient mode, and of sizes (B x S) of
the same power of two. Nothing is slow before MEDIAN_FROM calls of a kind are known. A slow call also counts in later medians.
"""

from __future__ import annotations

import math
import os
import resource
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from actordbg.base.fault import describe, scrub
from actordbg.capture.control import EXCEPTION, LOGPROBS, NAN, OOM, SLOW, Control, Triggers
from actordbg.capture.facts import Args, Binder, Bound, Named, digests, plain_facts
from actordbg.capture.ledger import Ledger
from actordbg.capture.ring import Ring, RingEntry
from actordbg.capture.snapshot import LOW, Snapshot
from actordbg.formats.dump_record import OUTPUT_PREFIX, DumpRecord, dtype_name, make_dump_id, timestamp_of
from actordbg.formats.ringfile import CAPTURED, DROPPED, OPEN, OWN_NUMBERS, PLACE, SAMPLED, aligned, sealed
from actordbg.formats.weight_hashes import StepWeights

MEDIAN_OF, MEDIAN_FROM = 64, 5
ERROR = PLACE["dropped.error"]

_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "failed to allocate")
Facts = dict[str, Any]
"""Plain values by name."""


@dataclass(frozen=True)
class TriggerResult:
    """The trigger that keeps a call, and the facts that made it fire."""

    trigger: str
    facts: Facts


def trigger_of(item: Item, tensors: Mapping[str, Tensor], action_mask: Tensor | None) -> TriggerResult | None:
    """Return the first trigger that fires: exceptions, then outputs (`tensors`), then time, which the ledger remembers."""
    on = item.control.on
    if item.error is not None:
        memory = bool(item.error.get("out_of_memory"))
        return TriggerResult(OOM if memory else EXCEPTION, item.error) if on.exception or (on.oom and memory) else None
    slow = None
    if on.slow is not None:
        seconds = item.seconds() if item.seconds is not None else (item.until - item.began) / 1e9
        alike = item.kind.fields["grad_enabled"], (item.own[5] * item.own[6]).bit_length()
        known = item.ledger.times.setdefault(alike, deque(maxlen=MEDIAN_OF))
        usual = median(known) if len(known) >= MEDIAN_FROM else math.inf
        known.append(seconds)
        if seconds > on.slow * usual:
            facts = {"seconds": seconds, "median": usual, "times": seconds / usual, "of": len(known) - 1}
            slow = TriggerResult(SLOW, facts)
    return _in_outputs(on, tensors, action_mask) or slow


def _in_outputs(on: Triggers, tensors: Mapping[str, Tensor], action_mask: Tensor | None) -> TriggerResult | None:
    """Return the trigger that fires on outputs: non-finite values, or log-probs outside the allowed range. None if none does."""
    outputs = {name.removeprefix(OUTPUT_PREFIX): values for name, values in tensors.items()}
    for name, values in outputs.items():
        if on.nan and values.is_floating_point() and (bad := int((~values.isfinite()).sum())):
            nans, first = int(values.isnan().sum()), (~values.isfinite()).nonzero()[0].tolist()
            facts = {"output": name, "nan": nans, "inf": bad - nans, "of": values.numel()}
            return TriggerResult(NAN, facts | ({"first": first} if first else {}))
    log_probs = outputs.get("action_log_probs", outputs.get("log_probs"))
    if on.logprobs is None or log_probs is None:
        return None
    values = log_probs
    if action_mask is not None and action_mask.shape == values.shape:
        values = values[action_mask.bool()]
    values, (low, high) = values[values.isfinite()], on.logprobs
    outside = int(((values < low) | (values > high)).sum())
    if not outside:
        return None
    facts = {"lowest": float(values.min()), "highest": float(values.max()), "outside": outside, "of": values.numel()}
    return TriggerResult(LOGPROBS, facts)


def error_facts(error: BaseException, device: torch.device | None) -> Facts:
    """Return the facts of an exception: class, message without secrets, and for out-of-memory the allocated bytes."""
    cpu_oom = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OOM_WORDS)  # by the CPU's allocator
    out = isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or cpu_oom
    facts: Facts = {"error": scrub(type(error).__name__), "message": describe(error), "out_of_memory": out}
    return facts | memory_facts(device) if out else facts


def memory_facts(device: torch.device | None) -> Facts:
    """Return the bytes in use by the device's allocator (if any) and by the process. Reads counters, never synchronizes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts: Facts = {"resident_bytes": resident, "peak_resident_bytes": peak}
    if device is None or device.type != "cuda":
        return facts | {"allocated_bytes": resident, "reserved_bytes": resident}
    return facts | {
        "device": str(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


_MOST = 512
"""Kinds, and layouts of a kind, that are cached; a job with more than these has different arguments in each call."""
_PLAIN = frozenset((bool, int, float, type(None)))
"""Types of values that distinguish kinds. No strings: how a string is stored depends on the environment."""
_strided = torch.strided


@dataclass(slots=True, eq=False)
class Layout:
    """Layout of tensors of these shapes and strides in an extent: `offsets` and `sizes` in bytes, from 0; `end`: total bytes.

    `described`: dimensions, shape, strides, offset, bytes of each. `pack_into` writes a call's `count` numbers. `shape`: (B, S).
    `apart`: indices of tensors that are not contiguous, and of `sizes` 0.
    """

    described: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int
    shape: tuple[int, int]
    apart: tuple[int, ...]
    count: int
    pack_into: Callable[..., None]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], leading: int) -> Layout:
        """Compute the layout of `tensors`. `leading`: index of the tensor of shape (B, S), -1 for none."""
        described: list[int] = []
        offsets, end = [], 0
        for tensor in tensors:
            described += (tensor.dim(), *tensor.shape, *tensor.stride(), end, tensor.nbytes)
            offsets.append(end)
            end += aligned(tensor.nbytes)
        shape = tensors[leading].shape if leading >= 0 else ()
        pair = (shape[0], shape[1]) if len(shape) > 1 else (1, shape[0]) if shape else (0, 0)
        apart = tuple(at for at, tensor in enumerate(tensors) if not tensor.is_contiguous())
        sizes = tuple(0 if at in apart else tensor.nbytes for at, tensor in enumerate(tensors))
        count = OWN_NUMBERS + len(described)
        pack_into = struct.Struct(f"<{count}q").pack_into
        return cls(tuple(described), tuple(offsets), sizes, end, pair, apart, count=count, pack_into=pack_into)


@dataclass(slots=True, eq=False)
class Kind:
    """What all calls of the same actor with the same arguments share.

    `fields`: their common record fields. `tensors`: (name, dtype) of each, in order. `text`: the kind as JSON. `leading`: see
    `Layout`; `layouts`: by shapes and strides. `weight`: bytes that the plain arguments count as. `returns`: name of the
    log-probs that a call returns, or the names of all its results. `shared`: other calls also refer to this kind. `ring`, `at`:
    where a ring holds `text`; (0, 0): the call's own extent has to hold it.
    """

    fields: Facts
    tensors: tuple[tuple[str, str], ...]
    text: bytes
    leading: int = -1
    weight: int = 0
    returns: str | tuple[str, ...] = "log_probs"
    shared: bool = False
    ring: Ring | None = None
    at: tuple[int, int] = (0, 0)
    layouts: dict[Any, Layout] = field(default_factory=dict)

    def place_in(self, ring: Ring) -> tuple[int, int]:
        """Return (offset, length) of the text in this ring, written on first use; (0, 0) without room, or if it is not shared."""
        if self.ring is not ring:
            self.ring, self.at = ring, ring.add_kind(self.text) if self.shared else (0, 0)
        return self.at


def kind_of(
    ledger: Ledger, instance: Any, call: tuple[Any, ...], binder: Binder, args: Args, kwargs: Named
) -> tuple[Kind, Layout, list[Tensor], list[int]]:
    """Return a call's kind, its layout, the tensors to copy, and the addresses of those in plain memory of this process.

    `instance`: its actor (`actordbg.capture.recorder.Instance`), with the kinds known so far; `call`: result of `facts_of_call`.
    Arguments that are tensors, numbers and None are visited only once.
    """
    _, grad, autocast, *values = call
    key: Any = [binder, ledger, instance.role, grad, autocast, len(args), *kwargs]
    tensors: list[Tensor] = []
    addresses: list[int] = []
    sizes: tuple[Any, ...] = ()
    for value in (*values, *args, *kwargs.values()):
        which = type(value)
        if which is Tensor and value.layout is _strided:
            tensors.append(value)
            sizes += value.shape, value.stride()
            if value.is_cpu and not value.is_neg() and (address := value.data_ptr()) >= LOW:
                addresses.append(address)
            key += which, value.dtype
        elif which in _PLAIN:
            key += which, value
        else:
            key = ()
            break
    kind = instance.kinds.get(key := tuple(key))
    if kind is None:
        bound = binder.bind(args, kwargs)
        kind, sorted_tensors = _kind(ledger, instance, call, bound, binder.returns), list(bound.tensors.values())
        alike = key and not bound.extra and not any(bound.groups.values())  # similar calls get the same kind
        if alike and [*map(id, tensors)] == [*map(id, sorted_tensors)] and len(instance.kinds) < _MOST:
            kind.shared = True
            instance.kinds[key] = kind
        addresses = [at for t in sorted_tensors if t.is_cpu and not t.is_neg() and (at := t.data_ptr()) >= LOW]
        return kind, Layout.of(sorted_tensors, kind.leading), sorted_tensors, addresses
    layout = kind.layouts.get(sizes)
    if layout is None:
        if len(kind.layouts) >= _MOST:
            kind.layouts = {}
        kind.layouts[sizes] = layout = Layout.of(tensors, kind.leading)
    return kind, layout, tensors, addresses


def _kind(ledger: Ledger, instance: Any, call: tuple[Any, ...], bound: Bound, returns: tuple[str, ...]) -> Kind:
    fields = {
        **{name: getattr(ledger.identity, name) for name in ("run", "host", "pid", "instance")},
        **instance.rank,
        "role": instance.role,
        **plain_facts(*call[1:]),
        "arguments": bound.arguments,
        "process_groups": bound.groups,
        "extra": bound.extra,
        **instance.about,
    }
    tensors = tuple((name, dtype_name(tensor.dtype)) for name, tensor in bound.tensors.items())
    mask = "action_mask" in bound.tensors or "action_mask" in bound.extra
    of_actions = mask or bound.arguments.get("num_actions") is not None  # the second in old trainers
    named = returns or ("action_log_probs" if of_actions else "log_probs")
    return Kind(fields, tensors, sealed({"fields": fields, "tensors": tensors}), bound.leading, bound.argument_bytes, named)


LEFT = -1
"""`standing` of a call that its process leaves in the ring, where it is still OPEN."""
NOWHERE = RingEntry(0, 0, -1)
"""The entry of a call that has no place in the ring (yet)."""
NO_KIND = Kind({}, (), b"")


class Item:
    """A recorded call. `standing`: its state in the books: OPEN (undecided), CAPTURED, DROPPED or SAMPLED, the last two for a
    `reason`.

    `own`: number, time (ns), monotonic time (ns), step, token of its dump id, B, S, then `Layout.described`. It ran from
    `began` to `until` (monotonic, ns); on a device `timer` runs, and `seconds` may be called once the device is done.
    `outputs`: copies of the returned tensors; `weights`: those that it met. `ended`: triggers can judge it. `nbytes`: bytes
    reserved in the queue, 0 for a call that only the ring keeps. `held`: holds on its place in the ring; `kept`: holds that
    stay. `whole`: it is copied and can be written. `deferred`: it is queued after it ran. `handled`: the writer has processed
    it. `failed`: the recorder failed during the call, so it is not one of the last calls. `cause`: dump id of the triggered
    call that followed it. `path`: its dump file, once published; `written`: its record and safetensors bytes (only if calls
    before a trigger are kept). `offered`: it was sent to the writer process; `ahead`: bytes of the file that the writer process
    published.
    """

    entry: RingEntry = NOWHERE
    kind: Kind = NO_KIND
    own: tuple[int, ...] = ()
    nbytes: int = 0
    device: torch.device | None = None
    snapshot: Snapshot | None = None
    outputs: Snapshot | None = None
    weights: StepWeights | None = None
    timer: Callable[[], Callable[[], float]] | None = None
    error: Facts | None = None
    seconds: Callable[[], float] | None = None
    began = until = 0
    ended: bool = False
    rng_after: dict[str, Tensor] | None = None
    held: int = 0
    kept: int = 0
    whole: bool = False
    deferred: bool = False
    handled: bool = False
    failed: bool = False
    cause: str | None = None
    path: Path | None = None
    written: tuple[DumpRecord, bytes] | None = None
    offered: bool = False
    ahead: int = 0

    def __init__(self, pid: int, ledger: Ledger, control: Control, ring: Ring, number: int, reason: str | None) -> None:
        self.pid, self.ledger, self.control, self.ring = pid, ledger, control, ring
        self.number, self.reason, self.standing = number, reason, OPEN if reason is None else SAMPLED

    @property
    def dump_id(self) -> str:
        return make_dump_id(timestamp_of(self.own[1]), self.number, self.pid, f"{self.own[4]:08x}")

    def needs_only_inputs(self) -> bool:
        """Check whether the ring alone holds everything needed to write the call, and to decide that it is written."""
        control = self.control
        decided = not (control.triggers or control.before or control.with_outputs or control.with_rng)
        return decided and control.max_bytes is None and self.standing == OPEN and self.whole and self.ring.path is not None

    def captured(self, nbytes: int, trigger: str | None) -> None:
        """Close the call: its file is published. The ring's slot is first, with the count to come (`ringfile.CAPTURE`)."""
        if self.entry is not NOWHERE:
            self.ring.set_book(self.entry, CAPTURED, self.ledger.counts[1] + 1)
        self.ledger.capture(nbytes, trigger)
        self.standing, self.reason = CAPTURED, None

    def dropped(self, reason: str, error: str | None = None) -> None:
        """Close the call as lost."""
        self.ledger.drop(reason, error, item=self)
        self._mirror()

    def over_max_bytes(self, nbytes: int) -> bool:
        """Close the call as sampled out if its file of `nbytes` would exceed `max_bytes`. Returns whether it did."""
        over = self.ledger.over_max_bytes(self.control, nbytes)
        if over:
            self.standing, self.reason = SAMPLED, "max_bytes"
            self._mirror()
        return over

    def leave_in_ring(self, fired: TriggerResult | None) -> None:
        """Keep a call that there is no time to write in the ring for `dump recover`, if the ring's file outlives this process."""
        file = self.ring.path is not None and self.ring.path.exists() and self.ledger.book >= 0
        if not (file and (self.held or self.ring.hold(self.entry))):
            return self.dropped("exit", "the process ended before the queue was written")
        known: Facts = {"triggered": fired.trigger} if fired else {}
        if self.rng_after is not None:
            known["rng"] = digests(self.rng_after)
        self.ring.set_end(self.entry, {**(fired.facts if fired else self.error or {}), "record": known})
        self.held = 0
        if self.standing == OPEN:
            if self.outputs is not None and self.control.with_outputs:
                self.ledger.lost_outputs()
            self.standing = LEFT
        return None

    def reopen(self) -> None:
        """Reopen a call that was sampled out, because a trigger keeps it."""
        if self.standing == SAMPLED and self.reason is not None:
            self.ledger.promote(self.reason)
            self.standing, self.reason = OPEN, None
            self._mirror()

    def close_somehow(self) -> None:
        """Close a call that nothing else could close. Calls nothing, so nothing in here can fail."""
        if self.standing == OPEN and self.path is not None:
            self.ledger.counts[1] += 1
            self.standing = CAPTURED
        elif self.standing == OPEN:
            self.ledger.counts[ERROR] += 1
            self.standing, self.reason = DROPPED, "error"

    def known(self, fired: TriggerResult | None) -> Facts:
        """Return the record fields that are known only after the call."""
        known: Facts = {"rng": digests(self.rng_after)} if self.rng_after is not None else {}
        return known if fired is None else known | {
            "pinned": True, "triggered": fired.trigger, "trigger_facts": fired.facts,
        }  # fmt: skip

    def _mirror(self) -> None:
        """Copy `standing` into the ring. The ledger and the item already agree, so that nothing is counted twice."""
        if self.entry is not NOWHERE:
            self.ring.set_book(self.entry, self.standing)
