"""What recording adds to a whole step, to half a per cent: single steps in turn, each between two in which the hook is off.

A block of steps (`benchmarks.bench_capture`) is compared with blocks a second away, in which the machine may be another one. Here
a step is compared with its two neighbours, so what is left is the noise of single steps, which goes with their number:
`python -m benchmarks.bench_step 1500` takes half an hour and tells 0.2 % (1 sigma), the 60 of the table 1 %.

The writer process works beside the step on another core, and what it takes from memory and cache is in the figure.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.bench_capture import CALL, with_error
from benchmarks.real_step import OURS, Training
from benchmarks.rows import Row

PEERS = ("pickle", "torch.save", "safetensors", "clone + thread")


def run(each: int = 60) -> list[Row]:
    """The rows of the table. each: recorded steps of a way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            training = Training(Path(folder))
            found = {ours: training.turns(ours, PEERS, each) for ours in OURS}
            training.close()
    finally:
        torch.set_num_threads(threads)
    return [row for ours, steps in found.items() for row in _rows(ours, steps)]


def _rows(ours: str, steps: list[tuple[str, float]]) -> list[Row]:
    usual = median(seconds for way, seconds in steps if way == "off") * 1e3
    said = f"{CALL}; single steps, {len(steps)}, beside {ours}"
    noise, error = _ratio(steps, "off")
    rows = [Row(f"step time beside {ours}, off / off (the noise)", usual, usual, "ms", noise, "-", f"+- {error:.4f}; {said}")]
    found = {way: _ratio(steps, way) for way in (ours, *PEERS)}
    best = min(ratio for way, (ratio, _) in found.items() if way != ours)
    for way, (ratio, own) in found.items():
        limit, within = 1.005 + math.hypot(error, own), None
        if way == ours:
            within = ratio <= limit and (way == "armed" or ratio < best)
        goal = "-" if within is None else f"<= {limit:.4f}" + (" and under every peer" if way != "armed" else "")
        mine = median(seconds for which, seconds in steps if which == way) * 1e3
        rows.append(Row(f"step time beside {ours}, {way} / off", mine, usual, "ms", ratio, goal, f"+- {own:.4f}; {said}", within))
    return rows


def _ratio(steps: list[tuple[str, float]], way: str) -> tuple[float, float]:
    """Median of a step over its neighbours that are off, and its error (1 sigma)."""
    reach = 2 if way == "off" else 1
    places = [place for place in range(reach, len(steps) - reach) if steps[place][0] == way]
    return with_error([2 * steps[place][1] / (steps[place - reach][1] + steps[place + reach][1]) for place in places])


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
