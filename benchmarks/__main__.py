"""All benchmarks in one command: `make bench`, or `python -m benchmarks [NAME...|all]`, as a table in Markdown.

A row says what is measured, ours, theirs, their ratio (or what else the goal speaks of), the goal, whether it is met, and the
conditions: shapes, threads, repeats, and what repeats scatter by. Without a name: the rows that have a goal, in five to ten
minutes of two quiet cores; their sum is printed at the end. `all`: the others too, which train, or start Ray. Rows with a goal
are held against their best day (`benchmarks/best.py`).
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import sys
import time
from collections.abc import Sequence

from benchmarks import best
from benchmarks.rows import Row

NAMES = ("capture", "step", "load", "index", "growth", "cli", "first", "verdict", "replay")
MORE = ("files", "formats", "pack", "lab", "training", "cluster", "groups")
HEAD = ("What", "Ours", "Theirs", "Ratio", "Goal", "Met", "Conditions")


def main(words: Sequence[str]) -> int:
    """Run the named benchmarks and print a row for each comparison.

    Exit code 1 if one could not be run, or is slower than its best day.
    """
    names = (*NAMES, *MORE) if "all" in words else words or NAMES
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {load}, Python {platform.python_version()}\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    failed, start, measured = 0, time.monotonic(), list[Row]()
    for name in names:
        began = time.monotonic()
        try:
            rows = importlib.import_module(f"benchmarks.bench_{name}").run()
        except Exception as error:  # noqa: BLE001  # the others are measured all the same
            failed += 1
            print(f"| {name} | | | | | COULD NOT BE RUN | {type(error).__name__}: {str(error)[:200]!r} |", flush=True)
            continue
        measured += rows
        print("\n".join(map(line_of, rows)), flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    print(f"all: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    late = best.update(measured)
    for words in late:
        print(f"SLOWER THAN ITS BEST DAY: {words}", flush=True)
    return int(failed > 0 or bool(late))


def line_of(row: Row) -> str:
    """A row of the table."""
    met = {True: "met", False: "NOT MET", None: ""}[row.within]
    theirs = "-" if row.theirs is None else f"{row.theirs:.4g} {row.unit}"
    ratio = "-" if math.isnan(row.ratio) else f"{row.ratio:.4g}"
    return f"| {row.name} | {row.ours:.4g} {row.unit} | {theirs} | {ratio} | {row.budget} | {met} | {row.note} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
