"""The record of `actordbg memory`: how the memory of processes grew while they were watched, and where it parted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from actordbg.records.comparison_record import Real, StoredRecord


@dataclass(frozen=True)
class Growth:
    """Growth of a size. slope, low, high: bytes per unit, and the range of that estimate. scatter: how far samples are from the
    line. span: units that were observed. unit: step or second. grows: by more than the samples scatter.
    """

    unit: str
    slope: Real
    low: Real
    high: Real
    scatter: Real
    span: Real
    grows: bool


@dataclass(frozen=True)
class SizeFigures:
    """Sizes of a quantity of a process, in bytes. growth: None for too few samples."""

    first: int
    peak: int
    last: int
    growth: Growth | None = None


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process. `sizes` by quantity: rss, uss, cuda_used, cuda_reserved, as far as they are known."""

    process: str
    node: str
    samples: int
    steps: int
    seconds: Real
    sizes: dict[str, SizeFigures]


@dataclass(frozen=True)
class MemoryRecord(StoredRecord):
    """A memory watch. kind: replay, run, processes or ray; watched: its name.

    finished_at: None while it runs, or if it was killed. notes: what could not be sampled, and why.
    """

    what: ClassVar[str] = "memory watch"

    memory_id: str
    created_at: str
    finished_at: str | None
    kind: str
    watched: str
    interval_s: Real
    replay_id: str | None = None
    processes: tuple[ProcessMemory, ...] = ()
    notes: tuple[str, ...] = ()
