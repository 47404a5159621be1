"""`actordbg memory watch`: ask who there is, read their memory, write a round, wait; then what the samples say.

Samples are a CSV file, one line for each process and moment. Each round is written and flushed at once, so what was sampled
stays, however the watching ends: with the processes, after the time that was given, or with Ctrl-C. A line that was cut, or
whose figures nothing can have, is left out when the file is read.

    time      UTC                               rss, uss        bytes: resident, and of it what no other process shares
    seconds   since the watching began          cuda_used       bytes on GPUs, as nvidia-smi says
    node      host                              cuda_reserved   bytes that torch's allocator held after the last input
    pid       of the process                    step            inputs, calls or lines so far; empty if nobody counts them
    rank      of the replay or the run          dump_id         the input that was running; empty between inputs
    name      role, or class of the Ray actor

Whether memory grows is decided by a robust line through the samples (Theil and Sen): by step where steps are known, else by
second.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import msgspec

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.foreign_text import in_csv
from actordbg.base.units import grouped
from actordbg.document.specifications import thinned
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder, open_regular, read_regular
from actordbg.measure.watched import Watched
from actordbg.records.comparison_record import Growth, MemoryRecord, ProcessMemory, SizeFigures
from actordbg.store.layout import Store

QUANTITIES = {"rss": "RSS", "uss": "USS", "cuda_used": "CUDA used", "cuda_reserved": "CUDA reserved"}
"""What is sampled, and how it is called in answers."""
_UNKNOWN = {
    "uss": "USS is not known: it was not requested, or the processes belong to another user",
    "cuda_used": "CUDA memory in use is not known: nvidia-smi named none of these processes",
    "cuda_reserved": "CUDA memory in reserve is not known: only a replay's workers say it, after each input",
}
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class Sample:
    """One process at one moment. Sizes in bytes; None for what is not known."""

    time: str
    seconds: float
    node: str
    pid: Whole
    rank: Whole | None
    name: str
    rss: Whole | None
    uss: Whole | None
    cuda_used: Whole | None
    cuda_reserved: Whole | None
    step: Whole | None
    dump_id: str

    @property
    def process(self) -> str:
        """The process by the name that stays when it is started again: its rank if it has one."""
        return f"{self.name} ".lstrip() + (f"{self.pid} on {self.node}" if self.rank is None else f"rank {self.rank}")


COLUMNS = tuple(field.name for field in fields(Sample))
_TEXTS = ("time", "node", "name", "dump_id")


def rounds(watched: Watched, interval_s: float, for_s: float | None = None) -> Iterator[list[Sample]]:
    """A list of samples for each round, until there is nothing more to watch, or for `for_s` seconds."""
    began = time.monotonic()
    while True:
        at = time.monotonic() - began
        processes = watched.poll()
        moment, readings = now_timestamp(), watched.read(processes)
        yield [
            Sample(moment, round(at, 3), p.node, p.pid, p.rank, p.name, rss, uss, cuda, p.cuda_reserved, p.step, p.dump_id)
            for p, (_, _, rss, uss, cuda) in readings
        ]
        if watched.over(len(readings)) or (for_s is not None and at + interval_s > for_s):
            return
        time.sleep(max(0.0, interval_s - (time.monotonic() - began - at)))


def watch_into(path: Path, batches: Iterable[list[Sample]], tell: Callable[[list[Sample]], object]) -> None:
    """Write every round into a new file, and tell of it when it is on disk. Ctrl-C ends it."""
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise UsageError(f"{path} already exists", hint="name another file, or remove it first") from None
    except OSError as error:
        raise StoreProblem(f"cannot write {path}: {error.strerror}", hint="name a file in a folder that you may write") from None
    with open(descriptor, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        file.flush()
        try:
            for samples in batches:
                table.writerows([in_csv(v) if isinstance(v, str) else v for v in astuple(sample)] for sample in samples)
                file.flush()
                tell(samples)
        except KeyboardInterrupt:
            return


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file, in its order. UsageError for one that has other columns."""
    try:
        text = read_regular(path).decode(errors="replace")
        rows = list(csv.reader(io.StringIO(text.replace("\0", ""))))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="`actordbg memory watch` writes such a file") from None
    except csv.Error as error:
        raise UsageError(f"{path} is not a sample table: {error}", hint="`actordbg memory watch` writes one") from None
    if not rows or tuple(rows[0]) != COLUMNS:
        raise UsageError(f"{path} has no samples of memory", hint="its first line would be " + ",".join(COLUMNS))
    samples = []
    for row in rows[1:]:
        if len(row) == len(COLUMNS):
            values = {name: text if text or name in _TEXTS else None for name, text in zip(COLUMNS, row, strict=True)}
            with contextlib.suppress(msgspec.ValidationError):
                sample = msgspec.convert(values, Sample, strict=False)
                samples += [sample] * math.isfinite(sample.seconds)
    return samples


def samples_path(store: Store, record: MemoryRecord) -> Path:
    """Where the samples of a record in the store lie."""
    return store.memory / f"{record.memory_id}.csv"


def save(store: Store, record: MemoryRecord) -> None:
    """Publish the record, in place of what it said before."""
    make_folder(store.memory)
    store.publish_text(store.memory / f"{record.memory_id}.json", record.to_json())


def finished(record: MemoryRecord, path: Path, notes: list[str]) -> MemoryRecord:
    """The record with what the samples say."""
    processes = figures(read_samples(path))
    known = {name for process in processes for name in process.sizes}
    lines = [*notes, *(why for name, why in _UNKNOWN.items() if processes and name not in known)]
    return replace(record, finished_at=now_timestamp(), processes=processes, notes=tuple(lines))


STEP, SECOND = "step", "second"
LEAST = 5
"""Fewest points that a line is drawn through."""
_MOST = 400
_SURE = 2.576
SCATTERS, FLOOR = 3.0, 2**20
"""How far a growth must be beyond the scatter, and the smallest that is told, in bytes."""


def by_process(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The samples of each process, in the order in which they appeared."""
    return grouped((sample.process, sample) for sample in samples)


def sizes_of(own: Sequence[Sample], quantity: str) -> list[tuple[Sample, int]]:
    """The samples of a process that have this quantity, and its bytes in each."""
    return [(sample, size) for sample in own if (size := getattr(sample, quantity)) is not None]


def figures(samples: Iterable[Sample]) -> tuple[ProcessMemory, ...]:
    """Every process with what its samples say."""
    processes = []
    for name, own in by_process(samples).items():
        steps = len({sample.step for sample in own if sample.step})
        unit = STEP if steps else SECOND  # a model that is being loaded grows by second
        sizes = {}
        for quantity in QUANTITIES:
            if known := [size for _, size in sizes_of(own, quantity)]:
                growth = growth_of(points(own, quantity, unit), unit)
                sizes[quantity] = SizeFigures(known[0], max(known), known[-1], growth)
        processes.append(ProcessMemory(name, own[0].node, len(own), steps, own[-1].seconds - own[0].seconds, sizes))
    return tuple(processes)


def points(own: Sequence[Sample], quantity: str, unit: str) -> list[tuple[float, int]]:
    """What a line is drawn through: every sample by second; by step the least of each, but for the first."""
    known = sizes_of(own, quantity)
    if unit == SECOND:
        return [(sample.seconds, size) for sample, size in known]
    least: dict[float, int] = {}
    for sample, size in known:
        if sample.step:
            least[sample.step] = min(size, least.get(sample.step, size))
    return sorted(least.items())[1:]


def growth_of(series: Sequence[tuple[float, int]], unit: str) -> Growth | None:
    """The line through the points; None for fewer than five. Its range is Sen's, from the ranks of the sorted slopes."""
    if len(series) < LEAST:
        return None
    import numpy

    x, y = numpy.array(thinned(series, _MOST), dtype=float).T
    i, j = numpy.triu_indices(len(x), 1)
    apart = x[j] != x[i]
    slopes = numpy.sort((y[j] - y[i])[apart] / (x[j] - x[i])[apart])
    if not len(slopes):
        return None
    slope, span = float(numpy.median(slopes)), float(x[-1] - x[0])
    residuals = y - slope * x
    scatter = float(1.4826 * numpy.median(abs(residuals - numpy.median(residuals))))
    half = _SURE * math.sqrt(len(x) * (len(x) - 1) * (2 * len(x) + 5) / 18) / 2
    ranks = math.floor(len(slopes) / 2 - half), math.ceil(len(slopes) / 2 + half)
    low, high = slopes[numpy.clip(ranks, 0, len(slopes) - 1)].tolist()
    return Growth(unit, slope, low, high, scatter, span, low > 0 and slope * span > max(SCATTERS * scatter, FLOOR))
