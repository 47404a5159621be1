"""All benchmarks in one command: `make bench`, or `python -m benchmarks [NAME...]`.

Prints a row for each: what is measured, the ratio that its goal speaks of, the goal, whether it is met, ours, theirs, conditions.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys

NAMES = (
    "capture", "formats", "load", "pack", "index", "growth", "cli", "first", "replay", "lab", "training", "cluster",
)  # fmt: skip


def main() -> None:
    """Run the named benchmarks, or all, and print a row for each comparison."""
    names = sys.argv[1:] or NAMES
    print(f"# {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    for name in names:
        for row in importlib.import_module(f"benchmarks.bench_{name}").run():
            mark = {True: "met", False: "NOT MET", None: ""}[row.within]
            theirs = "-" if row.theirs is None else f"{row.theirs:.4g}"
            print(f"{row.name:<58} {row.ratio:>9.3g}  goal {row.budget:<9} {mark:<8}", end="")
            print(f" ours {row.ours:.4g} {row.unit}, theirs {theirs} {row.unit}; {row.note}", flush=True)


if __name__ == "__main__":
    main()
