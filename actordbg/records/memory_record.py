"""What `actordbg memory watch` found: for each process and quantity its peak, and whether it grows.

A record is one file, `store/memory/<memory_id>.json` (`actordbg.records.stored_record`); the samples lie beside it as
`<memory_id>.csv`. It is written when the watching begins, and again when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from actordbg.records.stored_record import StoredRecord


@dataclass(frozen=True)
class Growth:
    """How a size grows: bytes for each unit, the range that this lies in, how far samples are from the line, and over how many
    units that was seen. unit: step or second. grows: more than the samples scatter.
    """

    unit: str
    slope: float
    low: float
    high: float
    scatter: float
    span: float
    grows: bool


@dataclass(frozen=True)
class SizeFigures:
    """One quantity of one process, in bytes. growth: None for too few samples."""

    first: int
    peak: int
    last: int
    growth: Growth | None = None


@dataclass(frozen=True)
class ProcessMemory:
    """One process. `sizes` by quantity: rss, uss, cuda_used, cuda_reserved, as far as they are known."""

    process: str
    node: str
    samples: int
    steps: int
    seconds: float
    sizes: dict[str, SizeFigures]


@dataclass(frozen=True)
class MemoryRecord(StoredRecord):
    """One watching. kind: replay, run, processes or ray; watched: what by name.

    finished_at: None while it goes on, or if it was killed. notes: what could not be sampled, and why.
    """

    what: ClassVar[str] = "watching of memory"

    memory_id: str
    created_at: str
    finished_at: str | None
    kind: str
    watched: str
    interval_s: float
    replay_id: str | None = None
    processes: tuple[ProcessMemory, ...] = ()
    notes: tuple[str, ...] = ()
