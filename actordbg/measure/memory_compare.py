"""Where two series of samples part: peak, and growth by step, for each process and quantity that both have. Pure.

* **peaks** part if they differ by more than the threshold (of the larger one) and by 4 MiB.
* **growths** part if their ranges have nothing in common, and over all that both saw the difference comes to more than three
  times the larger scatter and a MiB.
* **from** is the first step from which on the two are further apart than three times the noise (and a MiB), counted from where
  each began. The noise is that of the gap between them: its second differences, which a line that bends once leaves at zero.

Processes are paired by rank and name; where none agree, in the order in which they appear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from actordbg.measure.memory_samples import QUANTITIES, Sample
from actordbg.measure.watching import FLOOR, SECOND, STEP, by_process, figures, points
from actordbg.records.comparison_record import Growth, ProcessMemory, SizeFigures

ALIKE, APART, NOT_COMPARED = "alike", "apart", "not-compared"
LEAST_PEAK = 4 * 2**20
_SCATTERS = 3.0


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
        return self.a.growth is not None and self.b.growth is not None and self.a.growth.unit == self.b.growth.unit


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
    known = [{one.process: one for one in figures(side)} for side in (a, b)]
    matched = [(name, name) for name in ours if name in theirs] or list(zip(ours, theirs, strict=False))
    pairs = [
        _pair(known[0][x], known[1][y], quantity, ours[x], theirs[y], threshold)
        for x, y in matched
        for quantity in quantities or QUANTITIES
        if quantity in known[0][x].sizes and quantity in known[1][y].sizes
    ]
    reasons = tuple(reason for one in pairs for reason in _reasons(one))
    verdict = NOT_COMPARED if not pairs else APART if reasons else ALIKE
    notes = _notes(list(ours), list(theirs), matched, pairs)
    if not pairs:
        reasons = ("the two have no process with a quantity in common",)
    return MemoryComparison(verdict, *names, threshold, tuple(pairs), reasons, notes)


def _notes(ours: list[str], theirs: list[str], matched: list[tuple[str, str]], pairs: list[SizePair]) -> tuple[str, ...]:
    alone = [f"{name} (A)" for name in ours if name not in {x for x, _ in matched}]
    alone += [f"{name} (B)" for name in theirs if name not in {y for _, y in matched}]
    said = [f"only on one side: {', '.join(alone)}"] if alone else []
    short = sorted({one.process for one in pairs if not (one.a.growth and one.b.growth)})
    mixed = sorted({one.process for one in pairs if one.a.growth and one.b.growth and not one.growth_judged})
    said += [f"too few samples or steps to judge growth of {', '.join(short)}"] if short else []
    return (*said, *([f"growth of {', '.join(mixed)} not judged: steps are known on one side only"] if mixed else []))


def _pair(
    a: ProcessMemory, b: ProcessMemory, quantity: str, ours: Sequence[Sample], theirs: Sequence[Sample], threshold: float
) -> SizePair:
    x, y = a.sizes[quantity], b.sizes[quantity]
    parts = []
    if abs(x.peak - y.peak) > max(threshold * max(x.peak, y.peak), LEAST_PEAK):
        parts.append("peak")
    step: tuple[int, str] | None = None
    if x.growth and y.growth and x.growth.unit == y.growth.unit:
        disjoint = x.growth.low > y.growth.high or y.growth.low > x.growth.high
        apart = abs(x.growth.slope - y.growth.slope) * min(x.growth.span, y.growth.span)
        if disjoint and apart > max(_SCATTERS * max(x.growth.scatter, y.growth.scatter), FLOOR):
            parts.append("growth")
            step = _first_apart(ours, theirs, quantity) if x.growth.unit == STEP else None
    return SizePair(a.process, b.process, quantity, x, y, tuple(parts), *(step or (None, "")))


def _first_apart(ours: Sequence[Sample], theirs: Sequence[Sample], quantity: str) -> tuple[int, str] | None:
    """The step from which on the two stay apart, and the dump that was running in it."""
    x, y = dict(points(ours, quantity, STEP)), dict(points(theirs, quantity, STEP))
    common = sorted(x.keys() & y.keys())
    gaps = [x[step] - y[step] for step in common]
    bends = [abs(before - 2 * gap + after) for before, gap, after in zip(gaps, gaps[1:], gaps[2:], strict=False)]
    noise = max(_SCATTERS * 1.4826 * median(bends or [0]) / math.sqrt(6), FLOOR)
    near = max((at for at, gap in enumerate(gaps) if abs(gap - gaps[0]) <= noise), default=-1)
    if near + 1 == len(common):
        return None
    step = int(common[near + 1])
    return step, next((one.dump_id for side in (ours, theirs) for one in side if one.step == step and one.dump_id), "")


def size(value: float) -> str:
    """Bytes in MiB, or in GiB from one on."""
    return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**30 else f"{value / 2**20:.2f} MiB"


def in_short(growth: Growth | None) -> str:
    """A growth for a table: "1.00 MiB/step", "none"."""
    if growth is None:
        return "-"
    unit = "s" if growth.unit == SECOND else growth.unit
    return f"{size(growth.slope)}/{unit}" if growth.grows else "none"


def in_words(growth: Growth | None) -> str:
    """A growth: "1.00 MiB a step (0.99 MiB to 1.01 MiB)", "none (...)" where nothing grows."""
    if growth is None:
        return "not known"
    within = f"{size(growth.low)} to {size(growth.high)} a {growth.unit}"
    return f"{size(growth.slope)} a {growth.unit} ({within})" if growth.grows else f"none ({within})"


def _reasons(one: SizePair) -> list[str]:
    who, said = f"{one.process}, {QUANTITIES[one.quantity]}", []
    if "growth" in one.parts:
        where = f"; they part at step {one.from_step}" if one.from_step is not None else ""
        where += f" (dump {one.from_dump})" if one.from_dump else ""
        said.append(f"{who}: growth is {in_words(one.a.growth)} in A, {in_words(one.b.growth)} in B{where}")
    if "peak" in one.parts:
        said.append(f"{who}: the peak is {size(one.a.peak)} in A, {size(one.b.peak)} in B")
    return said
