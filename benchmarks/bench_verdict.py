"""The first verdict: `check` of a folder of old pickles in a new store, causes included, against importing torch and
transformers.

CPU time (user and system) of all processes, in turn, medians, with the default backend and with `--backend plain`; and by the
clock beside two processes that keep two cores busy, against the same beside none, which an idle machine alone can measure.
The pickles are those of `bench_load`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.bench_first import IMPORTS
from benchmarks.bench_load import pickles_in
from benchmarks.rows import Row, cpu_seconds_of, scatter, seconds_of

_BURN = "while True: sum(range(10_000))"


def run(repeat: int = 2) -> list[Row]:
    """Three rows: the default, the plain backend, and beside other work."""
    with tempfile.TemporaryDirectory() as folder:
        source, what = pickles_in(Path(folder))
        rounds = [_round(Path(folder), source, f"{number}") for number in range(repeat)]
    columns = dict(zip(("check", "check --backend plain", "imports"), zip(*rounds, strict=True), strict=True))
    imports = median(columns.pop("imports"))
    rows = []
    for name, taken in columns.items():
        ratio = median(taken) / imports
        note = f"{what}, a new store; CPU time of all processes, median of {repeat} ({scatter(taken)})"
        row = Row(
            f"first verdict, {name} / import torch, transformers", median(taken), imports, "s",
            ratio=ratio, budget="<= 2", note=note, within=ratio <= 2,
        )  # fmt: skip
        rows.append(row)
    return [*rows, _beside_work(what)]


def _round(folder: Path, source: Path, name: str) -> tuple[float, float, float]:
    """CPU seconds of a check, of one under the plain backend, and of the imports alone."""
    deepspeed = cpu_seconds_of(_check(folder / f"store-{name}", source), (0, 1))
    plain = cpu_seconds_of([*_check(folder / f"plain-{name}", source), "--backend", "plain"], (0, 1))
    return deepspeed, plain, cpu_seconds_of(IMPORTS)


def _check(store: Path, source: Path) -> list[str]:
    return [sys.executable, "-m", "actordbg", "--store", str(store), "check", str(source), "--quiet"]


def _beside_work(what: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        source, _ = pickles_in(Path(folder))

        def by_the_clock(name: str) -> float:
            command = [*_check(Path(folder) / name, source), "--backend", "plain"]
            return seconds_of(lambda: subprocess.run(command, capture_output=True, check=False))

        alone = by_the_clock("alone")
        with busy(2):
            beside = by_the_clock("beside")
    ratio = beside / alone
    return Row(
        "first verdict beside two busy processes / beside none", beside, alone, "s",
        ratio=ratio, budget="<= 1.8", note=f"{what}, plain backend; by the clock, once each", within=ratio <= 1.8,
    )  # fmt: skip


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Inside the block so many processes compute without a pause."""
    burning: Sequence[subprocess.Popen[bytes]] = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    for row in run():
        print(row)
