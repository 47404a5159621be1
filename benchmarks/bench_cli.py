"""How long a command takes to start, against importing the library it cannot do without.

`actordbg --help` against `python -c "import typer"`, `actordbg dump ls` (on a store with one dump) against
`python -c "import sqlmodel"`. Whole processes, interleaved, medians.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.rows import Row, interleaved


def _process(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env={**os.environ, "COLUMNS": "80"})


def run(repeat: int = 11) -> list[Row]:
    """Two rows, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        _process("-m", "actordbg", "--store", store, "dump", "create", "--batch-size", "1", "--seq-len", "16")
        cases = {
            "actordbg --help": (["-m", "actordbg", "--help"], "import typer"),
            "actordbg dump ls": (["-m", "actordbg", "--store", store, "dump", "ls"], "import sqlmodel"),
        }
        rows = []
        for name, (command, peer) in cases.items():
            ours, theirs = interleaved(lambda c=command: _process(*c), lambda p=peer: _process("-c", p), repeat)
            ratio = ours / theirs
            rows.append(
                Row(f"{name} / {peer}", ours, theirs, "s", ratio, "<= 1.5", f"median of {repeat}", ratio <= 1.5)
            )
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
