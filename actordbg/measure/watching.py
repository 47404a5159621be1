"""The loop of `actordbg memory watch`: ask who there is, read their memory, write a round, wait; and the record of it.

Ends when the processes end, after the time that was given, or with Ctrl-C; what was sampled stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actordbg.base.ids import new_replay_id
from actordbg.document.specifications import thinned
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder
from actordbg.measure.memory_samples import QUANTITIES, Sample, SampleFile, read_samples
from actordbg.measure.process_memory import Reading, read_memory
from actordbg.measure.watched import Watched, WatchedProcess
from actordbg.records.comparison_record import Growth, MemoryRecord, ProcessMemory, SizeFigures
from actordbg.store.layout import Store

Reader = Callable[[Collection[WatchedProcess]], dict[WatchedProcess, Reading]]
_UNKNOWN = {
    "uss": "USS is not known: it was not asked for, or the processes belong to another user",
    "cuda_used": "CUDA memory in use is not known: nvidia-smi named none of these processes",
    "cuda_reserved": "CUDA memory in reserve is not known: only a replay's workers say it, after each input",
}


@dataclass(frozen=True)
class Rhythm:
    """How often, and for how long at most. unshared: ask for USS, too."""

    interval_s: float = 1.0
    for_s: float | None = None
    unshared: bool = True


def local_reader(unshared: bool) -> Reader:
    """Reads processes of this machine."""

    def read(processes: Collection[WatchedProcess]) -> dict[WatchedProcess, Reading]:
        found = {one[0]: one for one in read_memory([process.pid for process in processes], unshared)}
        return {one: found[one.pid] for one in processes if one.pid in found and one.ticks in (0, found[one.pid][1])}

    return read


def rounds(watched: Watched, read: Reader, rhythm: Rhythm) -> Iterator[list[Sample]]:
    """A list of samples for each round, until there is nothing more to watch."""
    began = time.monotonic()
    while True:
        at = time.monotonic() - began
        marks = watched.poll()
        moment, readings = now_timestamp(), read(marks)
        yield [
            Sample(
                moment, round(at, 3), one.node, one.pid, one.rank, one.name, rss, uss, cuda, marks[one].cuda_reserved,
                marks[one].step, marks[one].dump_id,
            )
            for one, (_, _, rss, uss, cuda) in readings.items()
        ]  # fmt: skip
        if watched.over(len(readings)) or (rhythm.for_s is not None and at + rhythm.interval_s > rhythm.for_s):
            return
        time.sleep(max(0.0, rhythm.interval_s - (time.monotonic() - began - at)))


def watch_into(path: Path, found: Iterator[list[Sample]], tell: Callable[[list[Sample]], None]) -> None:
    """Write every round into a new file, and tell of it. Ctrl-C ends it."""
    with SampleFile(path) as file:
        try:
            for samples in found:
                file.write(samples)
                tell(samples)
        except KeyboardInterrupt:
            return


def new_record(kind: str, watched: str, rhythm: Rhythm, replay_id: str | None = None) -> MemoryRecord:
    """The record of a watching that begins."""
    return MemoryRecord(new_replay_id(), now_timestamp(), None, kind, watched, rhythm.interval_s, replay_id)


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
    missing = [name for name in QUANTITIES if not any(name in one.sizes for one in processes)]
    said = [*notes, *(_UNKNOWN[name] for name in missing if processes and name in _UNKNOWN)]
    return replace(record, finished_at=now_timestamp(), processes=processes, notes=tuple(said))


# Whether memory grows: a robust line through samples, by step where steps are known, else by second.


Point = tuple[float, int]
STEP, SECOND = "step", "second"
LEAST = 5
"""Fewest points that a line is drawn through."""
_MOST = 400
_SURE = 2.576
_SCATTERS, FLOOR = 3.0, 2**20
"""How far a growth must be beyond the scatter, and the smallest that is told, in bytes."""


def by_process(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each process, in the order in which they appeared."""
    found: dict[str, list[Sample]] = {}
    for one in samples:
        found.setdefault(one.process, []).append(one)
    return found


def figures(samples: Sequence[Sample]) -> tuple[ProcessMemory, ...]:
    """Every process with what its samples say."""
    processes = []
    for name, own in by_process(samples).items():
        steps = len({one.step for one in own if one.step})
        unit = STEP if steps else SECOND  # a model that is being loaded grows by second
        sizes = {}
        for quantity in QUANTITIES:
            known = [value for one in own if (value := getattr(one, quantity)) is not None]
            if known:
                sizes[quantity] = SizeFigures(known[0], max(known), known[-1], growth_of(points(own, quantity, unit), unit))
        processes.append(ProcessMemory(name, own[0].node, len(own), steps, own[-1].seconds - own[0].seconds, sizes))
    return tuple(processes)


def points(own: Sequence[Sample], quantity: str, unit: str) -> list[Point]:
    """What a line is drawn through."""
    known = [(one, value) for one in own if (value := getattr(one, quantity)) is not None]
    if unit == SECOND:
        return [(one.seconds, value) for one, value in known]
    least: dict[int, int] = {}
    for one, value in known:
        if one.step is not None:
            least[one.step] = min(value, least.get(one.step, value))
    counted = sorted(step for step in least if step > 0)
    return [(float(step), least[step]) for step in counted[1:]]


def growth_of(found: Sequence[Point], unit: str) -> Growth | None:
    """The line through the points; None for fewer than five. Its range is Sen's, from the ranks of the sorted slopes."""
    if len(found) < LEAST:
        return None
    import numpy

    x, y = (numpy.array(side, dtype=float) for side in zip(*thinned(found, _MOST), strict=True))
    one, other = numpy.triu_indices(len(x), 1)
    apart = x[other] != x[one]
    slopes = numpy.sort((y[other] - y[one])[apart] / (x[other] - x[one])[apart])
    if not len(slopes):
        return None
    slope = float(numpy.median(slopes))
    residuals = y - slope * x
    scatter = float(1.4826 * numpy.median(numpy.abs(residuals - numpy.median(residuals))))
    half = _SURE * math.sqrt(len(x) * (len(x) - 1) * (2 * len(x) + 5) / 18) / 2
    middle, last = len(slopes) / 2, len(slopes) - 1
    low, high = float(slopes[max(0, math.floor(middle - half))]), float(slopes[min(last, math.ceil(middle + half))])
    span = float(x[-1] - x[0])
    grows = low > 0 and slope * span > max(_SCATTERS * scatter, FLOOR)
    return Growth(unit, slope, low, high, scatter, span, grows)
