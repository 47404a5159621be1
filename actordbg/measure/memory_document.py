"""Samples of memory, and two series beside each other, as headings, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from actordbg.base.units import plural
from actordbg.document.blocks import (
    BAD_TONE,
    GOOD_TONE,
    NO_TONE,
    Banner,
    Block,
    Chart,
    Grid,
    Heading,
    Items,
    Paragraph,
)
from actordbg.document.specifications import MOST_MARKS, hints, layer, layered, names, quantity, thinned
from actordbg.measure.memory_compare import ALIKE, NOT_COMPARED, MemoryComparison, in_short, in_words, size
from actordbg.measure.memory_samples import QUANTITIES, Sample
from actordbg.measure.watching import by_process
from actordbg.records.comparison_record import MemoryRecord, ProcessMemory

MIB = 2**20


def watch_page(record: MemoryRecord, samples: Sequence[Sample]) -> list[Block]:
    """One watching: who leaked, each process's figures, and memory over time."""
    count = sum(one.samples for one in record.processes)
    growing = leaks(record.processes)
    short = [one.process for one in record.processes if not any(size.growth for size in one.sizes.values())]
    if not record.processes:
        banner = Banner("NOTHING", "was sampled.", NO_TONE)
    elif growing:
        banner = Banner("GROWS", f"{'; '.join(growing[:4])}.", BAD_TONE)
    elif short:
        who = "any process" if len(short) == len(record.processes) else ", ".join(short[:4])
        banner = Banner("TOO SHORT", f"too few samples or steps to say whether {who} grows.", NO_TONE)
    else:
        banner = Banner("STEADY", "no process grows by more than its samples scatter.", GOOD_TONE)
    rows = [
        (one.process, QUANTITIES[name], str(one.samples), str(one.steps or "-"), size(sizes.first), size(sizes.peak),
         size(sizes.last), in_short(sizes.growth))
        for one in record.processes
        for name, sizes in one.sizes.items()
    ]  # fmt: skip
    notes = [*([f"too few samples or steps to judge growth of {', '.join(short)}"] if short else []), *record.notes]
    return [
        Heading("actordbg memory", 1),
        banner,
        Paragraph(f"{record.kind} {record.watched}: {plural(len(record.processes), 'process')}, {plural(count, 'sample')}"),
        Grid(("process", "of", "samples", "steps", "first", "peak", "last", "growth"), rows, {"process", "of", "growth"}),
        *([Items(growing)] if growing else []),
        *_charts({"": samples}),
        *([Items(notes)] if notes else []),
    ]


def leaks(processes: Iterable[ProcessMemory]) -> list[str]:
    """Who grows, in words: by USS where it is known, else RSS; and by CUDA memory."""
    said = []
    for one in processes:
        for name in ("uss" if "uss" in one.sizes else "rss", "cuda_used", "cuda_reserved"):
            growth = one.sizes[name].growth if name in one.sizes else None
            if growth is not None and growth.grows:
                said.append(f"{one.process}: {QUANTITIES[name]} grows by {in_words(growth)}")
    return said


def compare_page(answer: MemoryComparison, a: Sequence[Sample], b: Sequence[Sample]) -> list[Block]:
    """Two series: where they part, figures of both, and both in one picture."""
    word, tone = {ALIKE: ("ALIKE", GOOD_TONE), NOT_COMPARED: ("NOT COMPARED", NO_TONE)}.get(answer.verdict, ("APART", BAD_TONE))
    judged = any(one.growth_judged for one in answer.pairs)
    agree = "peaks and growth agree wherever both were sampled" if judged else "peaks agree; growth was not judged"
    first = answer.reasons[0] if answer.reasons else agree
    rows = [
        (one.process, QUANTITIES[one.quantity], size(one.a.peak), size(one.b.peak), in_short(one.a.growth),
         in_short(one.b.growth), " and ".join(one.parts) or "-")
        for one in answer.pairs
    ]  # fmt: skip
    columns = ("process", "of", "peak A", "peak B", "growth A", "growth B", "part by")
    return [
        Heading("actordbg memory compare", 1),
        Banner(word, f"{first}.", tone),
        Paragraph(f"A  {answer.a}"),
        Paragraph(f"B  {answer.b}"),
        Grid(columns, rows, {"process", "of", "growth A", "growth B", "part by"}),
        *([Items(answer.reasons)] if answer.reasons else []),
        *_charts({"A: ": a, "B: ": b}),
        *map(Paragraph, answer.notes),
    ]


def _charts(sides: Mapping[str, Sequence[Sample]]) -> list[Chart]:
    """A picture for each quantity that was sampled: by step where every side has steps, else by seconds."""
    stepped = all(any(one.step for one in samples) for samples in sides.values())
    series = {prefix + process: own for prefix, samples in sides.items() for process, own in by_process(samples).items()}
    there = [name for name in QUANTITIES if any(getattr(one, name) is not None for own in series.values() for one in own)]
    return [_chart(series, name, stepped) for name in there]


def _chart(series: Mapping[str, Sequence[Sample]], what: str, stepped: bool) -> Chart:
    most = max(60, MOST_MARKS // max(1, len(series)))
    rows = [row for name, own in series.items() for row in thinned(_rows(name, own, what, stepped), most)]
    along = "inputs or calls so far" if stepped else "seconds"
    shown = hints(("c", "process"), ("x", along), ("v", "MiB"), ("d", "dump"))
    line = layer("line", look={"strokeWidth": 1.6}, tooltip=shown)
    x, y = quantity("x", along, zero=False), quantity("v", f"{QUANTITIES[what]}, MiB", zero=False)
    spec = layered(rows, line, height=260, x=x, y=y, color=names("c", None))
    ends = []
    for name, own in series.items():
        known = [value / MIB for one in own if (value := getattr(one, what)) is not None]
        figures = [f"{value:.1f}" for value in (known[0], max(known), known[-1])] if known else ["-"] * 3
        ends.append((name, str(len(own)), *figures))
    table = Grid(("process", "samples", "first, MiB", "peak, MiB", "last, MiB"), ends, {"process"})
    return Chart(f"{QUANTITIES[what]} over {'steps' if stepped else 'time'}", f"{QUANTITIES[what]} of each process.", spec, table)


def _rows(name: str, own: Sequence[Sample], what: str, stepped: bool) -> list[dict[str, object]]:
    return [
        {"c": name, "x": one.step if stepped else one.seconds, "v": round(value / MIB, 2), "d": one.dump_id}
        for one in own
        if (value := getattr(one, what)) is not None and (one.step or not stepped)
    ]
