"""Files that runs leave behind: reading their rows and a first verdict, beside the format's own library on the same file.

- *rows*: CPU seconds, the decoding process's included, from a file to its rows as arrays (`RowFile`), over those of the library:
  `msgspec` decodes every line of JSON, `pyarrow` makes Python's lists of every batch, `torch.load` loads the archive.
- *verdict*: CPU seconds of `actordbg lint FILE`, from the start of Python to its first line, over 5 s.
- *memory*: the largest resident set of `actordbg lint FILE` and of its decoding process on a file of a gigabyte, over 500 MB.

Rows have up to 200 or 2,000 tokens, half of them sampled; groups of eight have one prompt.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from pyarrow import Table, parquet  # type: ignore[import-untyped]

from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.containers import container_of
from actordbg.dumps.rows_import import RowFile
from benchmarks.rows import Row, cpu_seconds_of, one_thread

ROWS, LENGTHS, GIGABYTE = 10_000, (200, 2_000), 10**9
LINT = (sys.executable, "-m", "actordbg", "lint")


def run(rows: int = ROWS) -> list[Row]:
    """A row of reading and one of a verdict for each format and length; one of memory for JSON lines."""
    table = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for length in LENGTHS:
            for name, (write, read) in FORMATS.items():
                path = Path(folder) / "rows"
                write(path, made(rows, length))
                table += _compared(
                    name, path, read, f"{rows:,} rows of up to {length:,} tokens, {path.stat().st_size / 1e6:.0f} MB"
                )
        lines(path, made(GIGABYTE // 33_600, 2_000))
        table.append(_memory(path))
    return table


def made(rows: int, length: int) -> Iterator[dict[str, Any]]:
    """Healthy rows of a trainer, as a plain table has them."""
    draw = np.random.default_rng(0)
    for row in range(rows):
        if row % 8 == 0:
            prompt = draw.integers(5, 150_000, length // 2).tolist()
        count = int(draw.integers(2, length // 2 + 1))
        ours = np.round(-draw.exponential(0.5, count), 6)
        reward = float(draw.integers(0, 2))
        yield {
            "tokens": prompt + draw.integers(5, 150_000, count).tolist(), "response_length": count, "loss_mask": [1] * count,
            "log_probs": ours.tolist(), "rollout_log_probs": np.round(ours - np.abs(draw.normal(0, 0.003, count)), 6).tolist(),
            "advantages": [reward - 0.5] * count, "reward": reward,
        }  # fmt: skip


def lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write JSON lines."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    parquet.write_table(Table.from_pylist([*rows]), path, row_group_size=1_000)


def _write_archive(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    torch.save({"rollout_id": 3, "samples": [{**row, "prompt": "p", "metadata": {}} for row in rows]}, path)


def _read_lines(path: Path) -> int:
    with path.open("rb") as file:
        return len([msgspec.json.decode(line)["reward"] for line in file])


FORMATS: dict[str, tuple[Callable[..., None], Callable[[Path], object]]] = {
    "JSON lines beside msgspec": (lines, _read_lines),
    "parquet beside pyarrow": (
        _write_parquet,
        lambda path: sum(len(batch.to_pylist()) for batch in parquet.ParquetFile(path).iter_batches()),
    ),
    "slime's .pt beside torch.load": (_write_archive, torch.load),
}
"""Each format by name: what writes a file of rows, and how its own library reads it."""


def _compared(name: str, path: Path, read: Callable[[Path], object], note: str) -> list[Row]:
    theirs, ours = _cpu(lambda: read(path)), _cpu(lambda: _rows_of(path))
    verdict = cpu_seconds_of([*LINT, str(path), "--quiet"])
    return [
        Row(f"rows of {name}", ours, theirs, "s", ours / theirs, "<= 3 times", note, ours <= 3 * theirs),
        Row(f"verdict on {name}", verdict, None, "s", verdict / 5, "<= 5 s", note, verdict <= 5),
    ]


def _rows_of(path: Path) -> int:
    with LegacyReader() as trees:
        return sum(1 for _ in RowFile(path, container_of(path), {}, trees).rows())


def _cpu(call: Callable[[], object]) -> float:
    """CPU seconds of a call, and of the processes that it started and waited for."""
    start = _used()
    call()
    return _used() - start


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _memory(path: Path) -> Row:
    script = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    command = [sys.executable, "-c", script, *LINT, str(path), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    peak, size = int(done.stdout) / 1e6, path.stat().st_size / 1e6
    return Row("memory of a verdict on JSON lines", peak, size, "MB", peak / size, "<= 500 MB", f"{size:.0f} MB", peak <= 500)
