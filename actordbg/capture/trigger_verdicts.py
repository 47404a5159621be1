"""Judges a call that ran: which trigger, if any, keeps it, and what that trigger saw. Runs in the writer thread.

Nothing here makes the training wait: outputs are judged from their copies, times on a GPU from events that the writer thread
waits for, memory from counters that the allocator keeps anyway.

**slow** compares with the running median of the last MEDIAN_OF calls of the same kind: same actor, same gradient mode, and
sizes (B x S) of the same power of two. So a training pass is not slow because log-prob passes are quick, nor a long batch because
most are short. Nothing is slow before MEDIAN_FROM calls of a kind are known. A slow call counts in later medians, too.
"""

from __future__ import annotations

import math
import os
import resource
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from actordbg.base.errors import describe, scrub
from actordbg.capture.control import EXCEPTION, LOGPROBS, NAN, OOM, SLOW, Triggers
from actordbg.formats.dump_record import OUTPUT_PREFIX

MEDIAN_OF, MEDIAN_FROM = 64, 5
LOGITS_SUM = "logits_sum"
"""Stands in for logits, which are far too large to be copied: their sum is finite exactly if they are (or overflows)."""

_OOM_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "failed to allocate")


@dataclass(frozen=True)
class Verdict:
    """The trigger that keeps a call, and what it saw."""

    trigger: str
    facts: dict[str, Any]


@dataclass
class Outcome:
    """What became of a call. `seconds` may be called once the device is done; `error` are the facts of what it raised."""

    kind: tuple[Any, ...]
    seconds: Callable[[], float] | None = None
    error: dict[str, Any] | None = None


@dataclass
class Judge:
    """Judges the calls of one process, and remembers how long they took."""

    times: dict[tuple[Any, ...], deque[float]] = field(default_factory=dict)

    def verdict(
        self, on: Triggers, outcome: Outcome, tensors: Mapping[str, torch.Tensor], action_mask: torch.Tensor | None
    ) -> Verdict | None:
        """The first trigger that fires: exceptions, then outputs, then time."""
        if outcome.error is not None:
            memory = bool(outcome.error.get("out_of_memory"))
            if on.exception or (on.oom and memory):
                return Verdict(OOM if memory else EXCEPTION, outcome.error)
            return None
        found = self._outputs(on, tensors, action_mask) if on.of_outputs else None
        slow = self._slow(on.slow, outcome) if on.slow is not None else None
        return found or slow

    def _outputs(
        self, on: Triggers, tensors: Mapping[str, torch.Tensor], action_mask: torch.Tensor | None
    ) -> Verdict | None:
        outputs = {name[len(OUTPUT_PREFIX) :]: t for name, t in tensors.items() if name.startswith(OUTPUT_PREFIX)}
        for name, values in outputs.items():
            bad = int((~values.isfinite()).sum()) if on.nan and values.is_floating_point() else 0
            if bad:
                nans = int(values.isnan().sum())
                facts = {"output": name, "nan": nans, "inf": bad - nans, "of": values.numel()}
                return Verdict(NAN, facts | _first_bad(values))
        if on.logprobs is None:
            return None
        return _out_of_range(on.logprobs, outputs, action_mask)

    def _slow(self, multiple: float, outcome: Outcome) -> Verdict | None:
        if outcome.seconds is None:
            return None
        seconds = outcome.seconds()
        known = self.times.setdefault(outcome.kind, deque(maxlen=MEDIAN_OF))
        usual = median(known) if len(known) >= MEDIAN_FROM else math.inf
        known.append(seconds)
        if seconds <= multiple * usual:
            return None
        return Verdict(SLOW, {"seconds": seconds, "median": usual, "times": seconds / usual, "of": len(known) - 1})


def kind_of(instance: str, grad_enabled: bool, shape: tuple[int, int]) -> tuple[Any, ...]:
    """What calls have in common whose times can be compared."""
    return instance, grad_enabled, (shape[0] * shape[1]).bit_length()


def error_facts(error: BaseException, device: torch.device | None) -> dict[str, Any]:
    """What is kept of an exception: class, message without secrets, and for out-of-memory what was allocated, in bytes."""
    facts: dict[str, Any] = {"error": type(error).__name__, "message": scrub(describe(error))}
    facts["out_of_memory"] = is_out_of_memory(error)
    if facts["out_of_memory"]:
        facts |= memory_facts(device)
    return facts


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch's own classes, Python's, or a RuntimeError that says so (the CPU's allocator)."""
    kinds = [MemoryError, *(getattr(torch, "OutOfMemoryError", None), getattr(torch.cuda, "OutOfMemoryError", None))]
    if isinstance(error, tuple(kind for kind in kinds if isinstance(kind, type))):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OOM_WORDS)


def memory_facts(device: torch.device | None) -> dict[str, Any]:
    """Bytes in use: of the device's allocator where there is one, and of the process. Asks counters; nothing synchronises."""
    facts: dict[str, Any] = {"resident_bytes": _resident_bytes()}
    facts["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device is not None and device.type == "cuda":
        facts["device"] = str(device)
        facts["allocated_bytes"] = torch.cuda.memory_allocated(device)
        facts["reserved_bytes"] = torch.cuda.memory_reserved(device)
        facts["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        facts["total_bytes"] = torch.cuda.get_device_properties(device).total_memory
    else:
        facts["allocated_bytes"] = facts["reserved_bytes"] = facts["resident_bytes"]
    return facts


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _first_bad(values: torch.Tensor) -> dict[str, Any]:
    place = (~values.isfinite()).nonzero()
    return {"first": [int(n) for n in place[0]]} if place.numel() else {}


def _out_of_range(
    bounds: tuple[float, float], outputs: Mapping[str, torch.Tensor], action_mask: torch.Tensor | None
) -> Verdict | None:
    values = outputs.get("action_log_probs", outputs.get("log_probs"))
    if values is None or not values.numel():
        return None
    if action_mask is not None and action_mask.shape == values.shape:
        values = values[action_mask.bool()]
    values = values[values.isfinite()]
    if not values.numel():
        return None
    lowest, highest = float(values.min()), float(values.max())
    if bounds[0] <= lowest and highest <= bounds[1]:
        return None
    outside = int(((values < bounds[0]) | (values > bounds[1])).sum())
    return Verdict(LOGPROBS, {"lowest": lowest, "highest": highest, "outside": outside, "of": values.numel()})
