"""`actordbg memory watch`: find processes, read their memory, write a round, wait; then evaluate the samples.

Samples are a CSV file with a line per process and round. Each round is written and flushed at once, so samples survive however
watching ends: with the processes, after a time limit, or with Ctrl-C. Truncated lines, and lines with impossible figures, are
skipped when the file is read.

    time      UTC                               rss, uss        bytes: resident; of these, unshared
    seconds   since the watching began          cuda_used       bytes on GPUs, as nvidia-smi says
    node      host                              step            calls so far; empty if unknown
    pid       of the process                    name            role, or class of the Ray actor
    rank      in the run

Growth is decided by a robust line through the samples (Theil and Sen): per step if steps are known, else per second.
"""

import contextlib
import csv
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec

from actordbg.base.errors import StoreProblem, UsageError, reason_of, system_errors
from actordbg.base.foreign_text import in_csv
from actordbg.base.units import grouped
from actordbg.document.specifications import thinned
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import open_regular, read_regular
from actordbg.measure.watched import Watched

QUANTITIES = {"rss": "RSS", "uss": "USS", "cuda_used": "CUDA used"}
"""The sampled quantities, and their names in results."""
_UNKNOWN = {
    "uss": "USS is unknown: not requested, or the processes belong to another user",
    "cuda_used": "CUDA memory in use is unknown: nvidia-smi listed none of these processes",
}
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True)
class Sample:
    """A process at a point in time. Sizes in bytes; None if unknown."""

    time: str
    seconds: float
    node: str
    pid: Whole
    rank: Whole | None
    name: str
    rss: Whole | None
    uss: Whole | None
    cuda_used: Whole | None
    step: Whole | None

    @property
    def process(self) -> str:
        """Return a name of the process that survives a restart if it has a rank."""
        return f"{self.name} ".lstrip() + (f"{self.pid} on {self.node}" if self.rank is None else f"rank {self.rank}")


@dataclass(frozen=True)
class Growth:
    """Growth of a size. slope, low, high: bytes per unit, and the range of that estimate. scatter: how far samples are from the
    line. span: units that were observed. unit: step or second. grows: by more than the samples scatter.
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
    """Sizes of a quantity of a process, in bytes. growth: None for too few samples."""

    first: int
    peak: int
    last: int
    growth: Growth | None = None


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process. `sizes` by quantity: rss, uss, cuda_used, as far as they are known."""

    process: str
    node: str
    samples: int
    steps: int
    seconds: float
    sizes: dict[str, SizeFigures]


COLUMNS = tuple(field.name for field in fields(Sample))
_TEXTS = ("time", "node", "name")


def rounds(watched: Watched, interval_s: float, for_s: float | None = None) -> Iterator[list[Sample]]:
    """Yield the samples of each round until watching is over, or for `for_s` seconds."""
    began = time.monotonic()
    while True:
        at = time.monotonic() - began
        processes = watched.poll()
        moment, readings = now_timestamp(), watched.read(processes)
        yield [
            Sample(moment, round(at, 3), rss=rss, uss=uss, cuda_used=cuda,
                   node=p.node, pid=p.pid, rank=p.rank, name=p.name, step=p.step)
            for p, (_, _, rss, uss, cuda) in readings
        ]  # fmt: skip
        if watched.over(len(readings)) or (for_s is not None and at + interval_s > for_s):
            return
        time.sleep(max(0.0, interval_s - (time.monotonic() - began - at)))


def watch_into(path: Path, batches: Iterable[list[Sample]], tell: Callable[[list[Sample]], object]) -> None:
    """Write every round into a new file, and call `tell` with it once it is flushed. Ctrl-C ends it."""
    with system_errors(StoreProblem, f"cannot write {path}", "name a file in a writable folder"):
        try:
            descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise UsageError(f"{path} already exists", hint="name another file, or remove it first") from None
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
    """Read the samples of a file, in order. Raises UsageError if it has other columns."""
    try:
        text = read_regular(path).decode(errors="replace")
        rows = list(csv.reader(io.StringIO(text.replace("\0", ""))))
    except (OSError, csv.Error) as error:
        hint = "`actordbg memory watch -o FILE.csv` writes samples"
        raise UsageError(f"cannot read {path}: {reason_of(error)}", hint=hint) from None
    if not rows or tuple(rows[0]) != COLUMNS:
        raise UsageError(f"{path} has no memory samples", hint="name a file whose first line is " + ",".join(COLUMNS))
    samples = []
    for row in rows[1:]:
        if len(row) == len(COLUMNS):
            values = {name: text if text or name in _TEXTS else None for name, text in zip(COLUMNS, row, strict=True)}
            with contextlib.suppress(msgspec.ValidationError):
                sample = msgspec.convert(values, Sample, strict=False)
                if math.isfinite(sample.seconds):
                    samples.append(sample)
    return samples


def unknown_of(processes: Sequence[ProcessMemory]) -> list[str]:
    """Say why quantities are unknown of every process."""
    known = {name for process in processes for name in process.sizes}
    return [why for name, why in _UNKNOWN.items() if processes and name not in known]


STEP, SECOND = "step", "second"
LEAST = 5
"""Fewest points for a line."""
_MOST = 400
_SURE = 2.576
SCATTERS, FLOOR = 3.0, 2**20
"""A growth must exceed this multiple of the scatter, and this many bytes."""


def by_process(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Group samples by process, in order of appearance."""
    return grouped((sample.process, sample) for sample in samples)


def sizes_of(own: Sequence[Sample], quantity: str) -> list[tuple[Sample, int]]:
    """Return the samples of a process that have this quantity, with its bytes."""
    return [(sample, size) for sample in own if (size := getattr(sample, quantity)) is not None]


def figures(samples: Iterable[Sample]) -> tuple[ProcessMemory, ...]:
    """Summarize the samples of every process."""
    processes = []
    for name, own in by_process(samples).items():
        steps = len({sample.step for sample in own if sample.step})
        unit = STEP if steps else SECOND  # before the first step (loading the model), growth is per second
        sizes = {}
        for quantity in QUANTITIES:
            if known := [size for _, size in sizes_of(own, quantity)]:
                growth = growth_of(points(own, quantity, unit), unit)
                sizes[quantity] = SizeFigures(known[0], max(known), known[-1], growth)
        processes.append(ProcessMemory(name, own[0].node, len(own), steps, own[-1].seconds - own[0].seconds, sizes))
    return tuple(processes)


def points(own: Sequence[Sample], quantity: str, unit: str) -> list[tuple[float, int]]:
    """Return the points of the line: per second every sample; per step the smallest of each step except the first."""
    known = sizes_of(own, quantity)
    if unit == SECOND:
        return [(sample.seconds, size) for sample, size in known]
    least: dict[float, int] = {}
    for sample, size in known:
        if sample.step:
            least[sample.step] = min(size, least.get(sample.step, size))
    return sorted(least.items())[1:]


def growth_of(series: Sequence[tuple[float, int]], unit: str) -> Growth | None:
    """Fit a Theil-Sen line to the points; None for fewer than five. Its range is Sen's, from the ranks of the sorted slopes."""
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
    away = abs(residuals - numpy.median(residuals))
    scatter = float(1.4826 * numpy.median(away))
    n = len(x)
    half = _SURE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    ranks = math.floor(len(slopes) / 2 - half), math.ceil(len(slopes) / 2 + half)
    low, high = slopes[numpy.clip(ranks, 0, len(slopes) - 1)].tolist()
    grows = low > 0 and slope * span > max(SCATTERS * scatter, FLOOR)
    return Growth(unit, slope, low=low, high=high, scatter=scatter, span=span, grows=grows)
