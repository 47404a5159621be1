"""Turn memory samples, and a comparison of two series of samples, into headings and tables. Pure.

`memory compare` decides for each process and quantity that both sides have:

* **peaks** differ if they are more than the threshold (of the larger peak) and 4 MiB apart.
* **growths** differ if their ranges do not overlap, and the difference over the common span exceeds three times the larger
  scatter and 1 MiB.
* **from** is the first step after which the gap between both sides, less its initial value, stays above three times its noise
  (and 1 MiB). The noise is estimated from second differences of the gap, which are zero for a line with a single bend.

Processes are paired by rank and name; if none match, in order of appearance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from actordbg.base.units import listed, plural
from actordbg.document.blocks import RIGHT, UNCHECKED, WRONG, Block, Grid, Heading, Paragraph, Verdict, section
from actordbg.measure.watching import (
    FLOOR,
    QUANTITIES,
    SCATTERS,
    SECOND,
    STEP,
    Growth,
    ProcessMemory,
    Sample,
    SizeFigures,
    by_process,
    figures,
    points,
)  # fmt: skip
from actordbg.records.finding import Finding, Rule

ALIKE, APART, NOT_COMPARED = "alike", "apart", "not-compared"
LEAST_PEAK = 4 * 2**20
MIB = 2**20


@dataclass(frozen=True)
class SizePair:
    """A quantity of a process on both sides. parts: what differs (peak, growth); from_step: where growth diverges."""

    process: str
    other: str
    quantity: str
    a: SizeFigures
    b: SizeFigures
    parts: tuple[str, ...]
    from_step: int | None = None

    @property
    def growth_judged(self) -> bool:
        """Return whether both sides have a growth in a common unit."""
        return bool(self.a.growth and self.b.growth and self.a.growth.unit == self.b.growth.unit)


STEADY = Rule("memory", "no process grows")
ALIKE_MEMORY = Rule("same memory", "peaks and growth agree")


@dataclass(frozen=True)
class MemoryComparison:
    """The result of `memory compare`. reasons: the differences, in sentences."""

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
    """Compare every process of A with its counterpart in B. quantities: only these; all if empty."""
    ours, theirs = by_process(a), by_process(b)
    sizes = [{process.process: process.sizes for process in figures(side)} for side in (a, b)]
    matched = dict([(name, name) for name in ours if name in theirs] or zip(ours, theirs, strict=False))
    pairs: list[SizePair] = []
    reasons, notes = [], []
    for x, y in matched.items():
        for name in quantities or QUANTITIES:
            left, right = sizes[0][x].get(name), sizes[1][y].get(name)
            if left is None or right is None:
                continue
            parts, differences, step = [], [], None
            if abs(left.peak - right.peak) > max(threshold * max(left.peak, right.peak), LEAST_PEAK):
                parts.append("peak")
                differences.append(f"the peak is {size(left.peak)} in A, {size(right.peak)} in B")
            p, q = left.growth, right.growth
            if (
                p
                and q
                and p.unit == q.unit
                and (p.low > q.high or q.low > p.high)
                and (abs(p.slope - q.slope) * min(p.span, q.span) > max(SCATTERS * max(p.scatter, q.scatter), FLOOR))
            ):
                parts.append("growth")
                step = _first_apart(ours[x], theirs[y], name) if p.unit == STEP else None
                where = "" if step is None else f"; diverging at step {step}"
                differences.insert(0, f"growth is {in_words(p)} in A, {in_words(q)} in B{where}")
            reasons += [f"{x}, {QUANTITIES[name]}: {reason}" for reason in differences]
            pairs.append(SizePair(x, y, name, a=left, b=right, parts=tuple(parts), from_step=step))
    alone = [f"{name} (A)" for name in ours if name not in matched]
    alone += [f"{name} (B)" for name in theirs if name not in matched.values()]
    if alone:
        notes.append(f"only in one series: {listed(alone)}")
    if short := sorted({pair.process for pair in pairs if not (pair.a.growth and pair.b.growth)}):
        notes.append(_too_short(short))
    if mixed := sorted({pair.process for pair in pairs if pair.a.growth and pair.b.growth and not pair.growth_judged}):
        notes.append(f"growth of {listed(mixed)} not checked: only one series has steps")
    verdict = NOT_COMPARED if not pairs else APART if reasons else ALIKE
    reasons = reasons if pairs else ["the series have no process with a common quantity"]
    return MemoryComparison(verdict, *names, threshold, tuple(pairs), tuple(reasons), tuple(notes))


def _first_apart(ours: Sequence[Sample], theirs: Sequence[Sample], quantity: str) -> int | None:
    """Return the first step after which the sides stay apart; None if there is none."""
    x, y = (dict(points(side, quantity, STEP)) for side in (ours, theirs))
    common = sorted(x.keys() & y.keys())
    gaps = [x[step] - y[step] for step in common]
    bends = [abs(before - 2 * gap + after) for before, gap, after in zip(gaps, gaps[1:], gaps[2:], strict=False)]
    noise = max(SCATTERS * 1.4826 * median(bends or [0]) / math.sqrt(6), FLOOR)
    apart = common[max((at + 1 for at, gap in enumerate(gaps) if abs(gap - gaps[0]) <= noise), default=0) :]
    return int(apart[0]) if apart else None


def size(value: float) -> str:
    """Format bytes in MiB, or in GiB from 1 GiB."""
    return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**30 else f"{value / MIB:.2f} MiB"


def in_short(growth: Growth | None) -> str:
    """Format a growth for a table: "1.00 MiB/step", "none"."""
    if growth is None:
        return "-"
    unit = "s" if growth.unit == SECOND else growth.unit
    return f"{size(growth.slope)}/{unit}" if growth.grows else "none"


def in_words(growth: Growth | None) -> str:
    """Format a growth with its range: "1.00 MiB a step (0.99 MiB to 1.01 MiB a step)", "none (...)"."""
    if growth is None:
        return "unknown"
    line = f"{size(growth.slope)} a {growth.unit}" if growth.grows else "none"
    return f"{line} ({size(growth.low)} to {size(growth.high)} a {growth.unit})"


def _too_short(processes: Sequence[str]) -> str:
    return f"too few samples or steps to judge growth of {listed(processes)}"


def watch_page(name: str, processes: Sequence[ProcessMemory], notes: Sequence[str]) -> list[Block]:
    """Build the document of a series of samples: growing processes, and figures per process."""
    growing = leaks(processes)
    short = [process.process for process in processes if not any(size.growth for size in process.sizes.values())]
    which = "any process" if len(short) == len(processes) else listed(short[:4])
    if not processes:
        verdict = Verdict(UNCHECKED, "nothing was sampled")
    elif growing:
        verdict = Verdict(WRONG, "; ".join(growing[:4]), findings=[Finding(STEADY, said) for said in growing])
    elif short:
        verdict = Verdict(UNCHECKED, f"too few samples or steps to say whether {which} grows")
    else:
        verdict = Verdict(RIGHT, "no process grows beyond sampling noise")
    rows = [
        (process.process, QUANTITIES[name], str(process.samples), str(process.steps or "-"),
         *map(size, (own.first, own.peak, own.last)), in_short(own.growth))
        for process in processes
        for name, own in process.sizes.items()
    ]  # fmt: skip
    count = sum(process.samples for process in processes)
    return [
        Heading("actordbg memory", 1),
        verdict,
        Paragraph(f"{name}: {plural(len(processes), 'process')}, {plural(count, 'sample')}"),
        Grid(("process", "of", "samples", "steps", "first", "peak", "last", "growth"), rows, {"process", "of", "growth"}),
        *section("", growing),
        *section("", [_too_short(short), *notes] if short else notes),
    ]


def leaks(processes: Sequence[ProcessMemory]) -> list[str]:
    """List the growing processes, in words: by USS if known, else RSS; and by CUDA memory."""
    return [
        f"{process.process}: {QUANTITIES[name]} grows by {in_words(own.growth)}"
        for process in processes
        for name in QUANTITIES
        if (own := process.sizes.get(name)) and own.growth and own.growth.grows and not (name == "rss" and "uss" in process.sizes)
    ]


def compare_page(answer: MemoryComparison) -> list[Block]:
    """Build the document of two series: their differences and figures."""
    word = {ALIKE: RIGHT, NOT_COMPARED: UNCHECKED, APART: WRONG}[answer.verdict]
    agree = "peaks agree; growth was not checked"
    if any(pair.growth_judged for pair in answer.pairs):
        agree = "peaks and growth agree wherever both were sampled"
    found = [Finding(ALIKE_MEMORY, said) for said in answer.reasons] if word == WRONG else []
    rows = [
        (pair.process, QUANTITIES[pair.quantity], size(pair.a.peak), size(pair.b.peak), in_short(pair.a.growth),
         in_short(pair.b.growth), " and ".join(pair.parts) or "-")
        for pair in answer.pairs
    ]  # fmt: skip
    columns = ("process", "of", "peak A", "peak B", "growth A", "growth B", "differ by")
    return [
        Heading("actordbg memory compare", 1),
        Verdict(word, [*answer.reasons, agree][0], findings=found),
        Paragraph(f"A  {answer.a}"),
        Paragraph(f"B  {answer.b}"),
        Grid(columns, rows, {*columns} - {"peak A", "peak B"}),
        *section("", answer.reasons),
        *map(Paragraph, answer.notes),
    ]
