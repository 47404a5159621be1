"""The best day of each benchmark row: `benchmarks/best.json`, which `make bench` reads and writes.

A row's figure is its ratio, so a machine's speed is mostly out of it; what is left scatters from run to run. The last `KEPT`
figures of a row stay beside its best one, and their spread is its noise. A row is slower than its best day if it is worse by more
than twice the noise; with fewer than `LEAST` earlier runs that cannot be told.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from benchmarks.rows import Row

FILE = Path(__file__).with_suffix(".json")
KEPT, LEAST = 8, 3
PACKAGES = ("torch", "transformers", "deepspeed", "sqlmodel")


@dataclass(frozen=True)
class Best:
    """A row's best ratio, the commit and versions that it was measured with, and the ratios of the last runs, the newest last."""

    ratio: float
    commit: str
    versions: Mapping[str, str] = field(default_factory=dict)
    runs: Sequence[float] = ()

    @property
    def noise(self) -> float:
        """Return the largest distance of a run from their median."""
        middle = median(self.runs)
        return max(abs(run - middle) for run in self.runs)


def more_is_better(row: Row) -> bool:
    """Return whether the row's goal is a least figure."""
    return row.budget.startswith(">")


def slower(row: Row, best: Best | None) -> str:
    """Return in words how a row falls behind its best day; "" if it does not, or if that cannot be told."""
    if best is None or len(best.runs) < LEAST or math.isnan(row.ratio):
        return ""
    worse = best.ratio - row.ratio if more_is_better(row) else row.ratio - best.ratio
    if worse <= 2 * best.noise:
        return ""
    return f"{row.name}: {row.ratio:.4g}, best day {best.ratio:.4g} (noise {best.noise:.2g}, {best.commit})"


def with_row(row: Row, best: Best | None, commit: str) -> Best:
    """Return the record of a row after this run."""
    runs = [*(best.runs if best else ()), row.ratio][-KEPT:]
    if best is not None:
        beaten = row.ratio > best.ratio if more_is_better(row) else row.ratio < best.ratio
        if not beaten:
            return replace(best, runs=runs)
    return Best(row.ratio, commit, _versions(), runs)


def read(file: Path = FILE) -> dict[str, Best]:
    """Return the records by the rows' names."""
    return {name: Best(**entry) for name, entry in json.loads(file.read_text()).items()} if file.exists() else {}


def update(rows: Sequence[Row], file: Path | None = None) -> list[str]:
    """Write this run's rows that have a goal into the file (FILE); return in words which are slower than their best day."""
    file = file or FILE
    known, commit = read(file), _commit()
    judged = [row for row in rows if row.within is not None and not math.isnan(row.ratio)]
    late = [words for row in judged if (words := slower(row, known.get(row.name)))]
    known |= {row.name: with_row(row, known.get(row.name), commit) for row in judged}
    file.write_text(json.dumps({name: asdict(known[name]) for name in sorted(known)}, indent=1) + "\n")
    return late


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=FILE.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
