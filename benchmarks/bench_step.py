"""What recording adds to a whole step, to half a per cent: single steps in turn, each between two in which the hook is off.

A block of steps (`benchmarks.bench_capture`) is compared with blocks a second away, in which the machine may be another one. Here
a step is compared with its two neighbours, so what is left is the noise of single steps, which goes with their number:
`python -m benchmarks.bench_step 1000` takes six minutes and tells 0.2 % (1 sigma), the 150 of the table 0.5 %.

What other threads of the process do for a call comes up to a quarter of a second later, in any step. So their CPU time, measured
in blocks, is added as if the training had waited for all of it. What the writer process takes from memory and caches in the
recorded step itself is in the figure, and what it takes later is not.

A bare `clone` of the inputs is what any recorder pays at least. It is not a peer: it keeps nothing.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median

from benchmarks.bench_capture import CALL, with_error
from benchmarks.real_step import OURS, Training
from benchmarks.rows import Row, one_thread

PEERS = ("pickle", "torch.save", "safetensors", "clone + thread")


def run(each: int = 150, block: int = 24) -> list[Row]:
    """The rows of the table. each: steps of a way, 3 or more. block: steps in which the CPU time of other threads is measured."""
    with one_thread():
        with tempfile.TemporaryDirectory() as folder:
            training = Training(Path(folder))
            steps = {ours: training.turns(ours, ("clone", *PEERS) if ours == "process" else (), each) for ours in OURS}
            others = {way: mean(training.block(way, block).others) for way in ("off", *OURS, "clone + thread")}
            training.close()
    later = {way: max(seconds - others["off"], 0) for way, seconds in others.items()}
    best = min(_ratio(steps["process"], way)[0] + later.get(way, 0) / _usual(steps["process"]) for way in PEERS)
    return [row for ours, found in steps.items() for row in _rows(ours, found, later, best)]


def _rows(ours: str, steps: list[tuple[str, float]], later: Mapping[str, float], best: float) -> list[Row]:
    usual = _usual(steps)
    noise, error = _ratio(steps, "off")
    said = f"{CALL}; {len(steps)} single steps, {ours} among them"
    rows = [
        Row(
            f"step time beside {ours}, off / off (the noise)",
            1e3 * usual,
            None,
            "ms",
            ratio=noise,
            budget="-",
            note=f"+- {error:.4f}; {said}",
        )
    ]
    for way in sorted({way for way, _ in steps if way != "off"}, key=lambda way: (way != ours, way)):
        ratio, own = _ratio(steps, way)
        whole, limit = ratio + later.get(way, 0) / usual, 1.005 + math.hypot(error, own)
        goal, within, note = "-", None, f"+- {own:.4f}; {ratio:.4f} and {1e3 * later.get(way, 0):.2f} ms of other threads; {said}"
        if way == ours:
            within = whole <= limit and (way == "armed" or whole < best)
            goal = f"<= {limit:.4f}" + ("" if way == "armed" else f", and under {best:.4f} (the best peer)")
        rows.append(
            Row(
                f"step time, {way} / off",
                1e3 * usual * whole,
                1e3 * usual,
                "ms",
                ratio=whole,
                budget=goal,
                note=note,
                within=within,
            )
        )
    return rows


def _usual(steps: list[tuple[str, float]]) -> float:
    return median(seconds for way, seconds in steps if way == "off")


def _ratio(steps: list[tuple[str, float]], way: str) -> tuple[float, float]:
    """Median of a step over its neighbours that are off, and its error (1 sigma)."""
    reach = 2 if way == "off" else 1
    places = [place for place in range(reach, len(steps) - reach) if steps[place][0] == way]
    return with_error([2 * steps[place][1] / (steps[place - reach][1] + steps[place + reach][1]) for place in places])


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
