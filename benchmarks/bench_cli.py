"""How long a command takes to start, against importing the library it cannot do without.

`actordbg --help` against `python -c "import typer"`, `actordbg dump ls` (on a store with one dump) against
`python -c "import sqlmodel"`. CPU time (user and system) of whole processes, interleaved, medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

from benchmarks.rows import Row


def _cpu_seconds(*arguments: str) -> float:
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env={**os.environ, "COLUMNS": "80"})
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(repeat: int = 15) -> list[Row]:
    """Two rows, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        _cpu_seconds("-m", "actordbg", "--store", store, "dump", "create", "--batch-size", "1", "--seq-len", "16")
        cases = {
            "actordbg --help": (["-m", "actordbg", "--help"], "import typer", 1.3),
            "actordbg dump ls": (["-m", "actordbg", "--store", store, "dump", "ls"], "import sqlmodel", 1.5),
        }
        rows = []
        for name, (command, peer, most) in cases.items():
            pairs = [(_cpu_seconds(*command), _cpu_seconds("-c", peer)) for _ in range(repeat + 1)][1:]
            ours, theirs = (median(column) for column in zip(*pairs, strict=True))
            ratio = ours / theirs
            note = f"CPU time, median of {repeat}"
            rows.append(Row(f"{name} / {peer}", ours, theirs, "s", ratio, f"<= {most}", note, ratio <= most))
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
