"""All benchmarks in one command: `make bench`, or `python -m benchmarks [NAME...]`. Prints ratios with their budgets."""

from __future__ import annotations

import importlib
import os
import platform
import sys

NAMES = ("capture", "formats", "load", "pack", "index", "cli", "replay", "lab", "training")


def main() -> None:
    """Run the named benchmarks, or all, and print a row for each comparison."""
    names = sys.argv[1:] or NAMES
    print(f"# {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    for name in names:
        for row in importlib.import_module(f"benchmarks.bench_{name}").run():
            mark = {True: "ok", False: "OVER", None: ""}[row.within]
            theirs = "-" if row.theirs is None else f"{row.theirs:.4g}"
            print(f"{row.name:<58} {row.ratio:>9.3g}  budget {row.budget:<10} {mark:<5}", end="")
            print(f" ours {row.ours:.4g} {row.unit}, theirs {theirs} {row.unit}; {row.note}", flush=True)


if __name__ == "__main__":
    main()
