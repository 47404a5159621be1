"""Samples of memory, and where two series of them part, as headings, tables and pictures. Pure.

`memory compare` decides for each process and quantity that both sides have:

* **peaks** part if they differ by more than the threshold (of the larger one) and by 4 MiB.
* **growths** part if their ranges have nothing in common, and over all that both saw the difference comes to more than three
  times the larger scatter and a MiB.
* **from** is the first step from which on the two are further apart than three times the noise (and a MiB), counted from where
  each began. The noise is that of the gap between them: its second differences, which a line that bends once leaves at zero.

Processes are paired by rank and name; where none agree, in the order in which they appear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from actordbg.base.units import plural
from actordbg.document.blocks import BAD_TONE, GOOD_TONE, NO_TONE, Banner, Block, Chart, Grid, Heading, Items, Paragraph
from actordbg.document.specifications import MOST_MARKS, hints, layer, layered, names, quantity, thinned
from actordbg.measure.watching import FLOOR, QUANTITIES, SCATTERS, SECOND, STEP, Sample, by_process, figures, points, sizes_of
from actordbg.records.comparison_record import Growth, MemoryRecord, ProcessMemory, SizeFigures

ALIKE, APART, NOT_COMPARED = "alike", "apart", "not-compared"
LEAST_PEAK = 4 * 2**20
MIB = 2**20


@dataclass(frozen=True)
class SizePair:
    """One quantity of a process on both sides. parts: peak, growth or both; from_step, from_dump: where they part."""

    process: str
    other: str
    quantity: str
    a: SizeFigures
    b: SizeFigures
    parts: tuple[str, ...]
    from_step: int | None = None
    from_dump: str = ""

    @property
    def growth_judged(self) -> bool:
        """Whether both have a growth, by the same unit."""
        return bool(self.a.growth and self.b.growth and self.a.growth.unit == self.b.growth.unit)


@dataclass(frozen=True)
class MemoryComparison:
    """The answer of `memory compare`. reasons: why it is not alike, in sentences."""

    verdict: str
    a: str
    b: str
    threshold: float
    pairs: tuple[SizePair, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def compare_samples(
    names: tuple[str, str], a: Sequence[Sample], b: Sequence[Sample], threshold: float, quantities: Sequence[str] = ()
) -> MemoryComparison:
    """Hold every process of A beside its like in B. quantities: only these; all for none."""
    ours, theirs = by_process(a), by_process(b)
    sizes = [{process.process: process.sizes for process in figures(side)} for side in (a, b)]
    matched = [(name, name) for name in ours if name in theirs] or list(zip(ours, theirs, strict=False))
    pairs = []
    for x, y in matched:
        for name in quantities or QUANTITIES:
            if name in sizes[0][x] and name in sizes[1][y]:
                pair = sizes[0][x][name], sizes[1][y][name]
                parts = _parts(*pair, threshold)
                by_step = "growth" in parts and pair[0].growth and pair[0].growth.unit == STEP
                began = (by_step and _first_apart(ours[x], theirs[y], name)) or (None, "")
                pairs.append(SizePair(x, y, name, *pair, parts, *began))
    notes = []
    alone = [f"{name} (A)" for name in ours if name not in dict(matched)]
    if alone := alone + [f"{name} (B)" for name in theirs if name not in {y for _, y in matched}]:
        notes.append(f"only on one side: {', '.join(alone)}")
    if short := sorted({pair.process for pair in pairs if not (pair.a.growth and pair.b.growth)}):
        notes.append(_too_short(short))
    if mixed := sorted({pair.process for pair in pairs if pair.a.growth and pair.b.growth and not pair.growth_judged}):
        notes.append(f"growth of {', '.join(mixed)} not judged: steps are known on one side only")
    reasons = [reason for pair in pairs for reason in _reasons(pair)]
    verdict = NOT_COMPARED if not pairs else APART if reasons else ALIKE
    reasons = reasons if pairs else ["the two have no process with a quantity in common"]
    return MemoryComparison(verdict, *names, threshold, tuple(pairs), tuple(reasons), tuple(notes))


def _parts(a: SizeFigures, b: SizeFigures, threshold: float) -> tuple[str, ...]:
    """What parts: peak, growth, or both."""
    parts = ["peak"] * (abs(a.peak - b.peak) > max(threshold * max(a.peak, b.peak), LEAST_PEAK))
    x, y = a.growth, b.growth
    if x and y and x.unit == y.unit and (x.low > y.high or y.low > x.high):
        apart = abs(x.slope - y.slope) * min(x.span, y.span)
        parts += ["growth"] * (apart > max(SCATTERS * max(x.scatter, y.scatter), FLOOR))
    return tuple(parts)


def _first_apart(ours: Sequence[Sample], theirs: Sequence[Sample], quantity: str) -> tuple[int, str] | None:
    """The step from which on the two stay apart, and the dump that was running in it."""
    x, y = (dict(points(side, quantity, STEP)) for side in (ours, theirs))
    common = sorted(x.keys() & y.keys())
    gaps = [x[step] - y[step] for step in common]
    bends = [abs(before - 2 * gap + after) for before, gap, after in zip(gaps, gaps[1:], gaps[2:], strict=False)]
    noise = max(SCATTERS * 1.4826 * median(bends or [0]) / math.sqrt(6), FLOOR)
    apart = common[max((at + 1 for at, gap in enumerate(gaps) if abs(gap - gaps[0]) <= noise), default=0) :]
    if not apart:
        return None
    dumps = (sample.dump_id for sample in (*ours, *theirs) if sample.step == apart[0] and sample.dump_id)
    return int(apart[0]), next(dumps, "")


def size(value: float) -> str:
    """Bytes in MiB, or in GiB from one on."""
    return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**30 else f"{value / MIB:.2f} MiB"


def in_short(growth: Growth | None) -> str:
    """A growth for a table: "1.00 MiB/step", "none"."""
    if growth is None:
        return "-"
    return f"{size(growth.slope)}/{'s' if growth.unit == SECOND else growth.unit}" if growth.grows else "none"


def in_words(growth: Growth | None) -> str:
    """A growth: "1.00 MiB a step (0.99 MiB to 1.01 MiB)", "none (...)" where nothing grows."""
    if growth is None:
        return "not known"
    line = f"{size(growth.slope)} a {growth.unit}" if growth.grows else "none"
    return f"{line} ({size(growth.low)} to {size(growth.high)} a {growth.unit})"


def _reasons(pair: SizePair) -> list[str]:
    who, said = f"{pair.process}, {QUANTITIES[pair.quantity]}", []
    if "growth" in pair.parts:
        where = "" if pair.from_step is None else f"; they part at step {pair.from_step}"
        where += pair.from_dump and f" (dump {pair.from_dump})"
        said.append(f"{who}: growth is {in_words(pair.a.growth)} in A, {in_words(pair.b.growth)} in B{where}")
    if "peak" in pair.parts:
        said.append(f"{who}: the peak is {size(pair.a.peak)} in A, {size(pair.b.peak)} in B")
    return said


def _too_short(processes: Sequence[str]) -> str:
    return f"too few samples or steps to judge growth of {', '.join(processes)}"


def watch_page(record: MemoryRecord, samples: Sequence[Sample]) -> list[Block]:
    """One watching: who leaked, each process's figures, and memory over time."""
    processes, growing = record.processes, leaks(record.processes)
    short = [process.process for process in processes if not any(size.growth for size in process.sizes.values())]
    who = "any process" if len(short) == len(processes) else ", ".join(short[:4])
    if not processes:
        banner = Banner("NOTHING", "was sampled.", NO_TONE)
    elif growing:
        banner = Banner("GROWS", f"{'; '.join(growing[:4])}.", BAD_TONE)
    elif short:
        banner = Banner("TOO SHORT", f"too few samples or steps to say whether {who} grows.", NO_TONE)
    else:
        banner = Banner("STEADY", "no process grows by more than its samples scatter.", GOOD_TONE)
    rows = [
        (one.process, QUANTITIES[name], str(one.samples), str(one.steps or "-"), *map(size, (own.first, own.peak, own.last)),
         in_short(own.growth))
        for one in processes
        for name, own in one.sizes.items()
    ]  # fmt: skip
    count = sum(process.samples for process in processes)
    return [
        Heading("actordbg memory", 1),
        banner,
        Paragraph(f"{record.kind} {record.watched}: {plural(len(processes), 'process')}, {plural(count, 'sample')}"),
        Grid(("process", "of", "samples", "steps", "first", "peak", "last", "growth"), rows, {"process", "of", "growth"}),
        *_items(growing),
        *_charts({"": samples}),
        *_items([*([_too_short(short)] if short else []), *record.notes]),
    ]


def leaks(processes: Sequence[ProcessMemory]) -> list[str]:
    """Who grows, in words: by USS where it is known, else RSS; and by CUDA memory."""
    return [
        f"{process.process}: {QUANTITIES[name]} grows by {in_words(own.growth)}"
        for process in processes
        for name in QUANTITIES
        if (own := process.sizes.get(name)) and own.growth and own.growth.grows and not (name == "rss" and "uss" in process.sizes)
    ]


def compare_page(answer: MemoryComparison, a: Sequence[Sample], b: Sequence[Sample]) -> list[Block]:
    """Two series: where they part, figures of both, and both in one picture."""
    tone = {ALIKE: GOOD_TONE, NOT_COMPARED: NO_TONE, APART: BAD_TONE}[answer.verdict]
    judged = any(pair.growth_judged for pair in answer.pairs)
    agree = "peaks and growth agree wherever both were sampled" if judged else "peaks agree; growth was not judged"
    rows = [
        (pair.process, QUANTITIES[pair.quantity], size(pair.a.peak), size(pair.b.peak), in_short(pair.a.growth),
         in_short(pair.b.growth), " and ".join(pair.parts) or "-")
        for pair in answer.pairs
    ]  # fmt: skip
    columns = ("process", "of", "peak A", "peak B", "growth A", "growth B", "part by")
    return [
        Heading("actordbg memory compare", 1),
        Banner(answer.verdict.upper().replace("-", " "), f"{[*answer.reasons, agree][0]}.", tone),
        Paragraph(f"A  {answer.a}"),
        Paragraph(f"B  {answer.b}"),
        Grid(columns, rows, {*columns} - {"peak A", "peak B"}),
        *_items(answer.reasons),
        *_charts({"A: ": a, "B: ": b}),
        *map(Paragraph, answer.notes),
    ]


def _items(lines: Sequence[str]) -> list[Block]:
    return [Items(lines)] if lines else []


def _charts(sides: Mapping[str, Sequence[Sample]]) -> list[Chart]:
    """A picture for each quantity that was sampled: by step where every side has steps, else by seconds."""
    stepped = all(any(sample.step for sample in samples) for samples in sides.values())
    along = "inputs or calls so far" if stepped else "seconds"
    series = {prefix + process: own for prefix, samples in sides.items() for process, own in by_process(samples).items()}
    most = max(60, MOST_MARKS // max(1, len(series)))
    charts = []
    for what, called in QUANTITIES.items():
        rows, ends = [], []
        for name, own in series.items():
            known = sizes_of(own, what)
            rows += thinned(
                [
                    {"c": name, "x": one.step if stepped else one.seconds, "v": round(value / MIB, 2), "d": one.dump_id}
                    for one, value in known
                    if one.step or not stepped
                ],
                most,
            )
            values = [value / MIB for _, value in known]
            shown = [f"{value:.1f}" for value in (values[0], max(values), values[-1])] if values else ["-"] * 3
            ends.append((name, str(len(own)), *shown))
        if all(row[2] == "-" for row in ends):
            continue
        line = layer(
            "line", look={"strokeWidth": 1.6}, tooltip=hints(("c", "process"), ("x", along), ("v", "MiB"), ("d", "dump"))
        )
        x, y = quantity("x", along, zero=False), quantity("v", f"{called}, MiB", zero=False)
        spec = layered(rows, line, height=260, x=x, y=y, color=names("c", None))
        table = Grid(("process", "samples", "first, MiB", "peak, MiB", "last, MiB"), ends, {"process"})
        charts.append(Chart(f"{called} over {'steps' if stepped else 'time'}", f"{called} of each process.", spec, table))
    return charts
