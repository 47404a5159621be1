"""What recording costs a training step, against what one would write by hand, all in one run (`benchmarks.real_step`).

Every figure of a block is compared with its two neighbours, in which the hook is installed and off. Medians over blocks; the
error is 1 sigma of that median. *Noise* is the same done with blocks that do not differ.

- *CPU of a step*: the process's CPU time in the block over that of its neighbours. `benchmarks.bench_step` has the step's time.
- *stall*: what the call takes beside its forward, less that of the neighbours.
- *CPU of other threads*: of the process that trains, for each step, less that of the neighbours.
- *bytes*: on the disk, for each call of 135 kB.
- *after kill -9*: inputs that can be read back, of those of 20 calls and the one in flight.
- *full disk*: steps that were made, of 40, on a file system that has room for ten calls.
- *off*: time that an installed hook adds while recording is off, per call.

msProbe and its like record outputs and statistics of every module, not the inputs of one call, so it is named and not compared.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actordbg.capture.hook import Slot, wrap
from actordbg.dumps.recover import find_rings, recover
from actordbg.store import payload
from actordbg.store.layout import Store
from benchmarks.real_step import OURS, Actor, Block, Training, batches
from benchmarks.rows import Row, one_thread

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("process", "pickle", "thread", "pickle + fsync", "armed", "torch.save", "clone", "safetensors", "clone + thread")
DEATHS = ("process", "thread", "pickle", "pickle + fsync", "torch.save", "safetensors", "clone + thread")
KILLED, FULL = 20, 40
CALL = "4 x 2,048 int64 and masks, 135 kB; fp32, one thread"


def run(rounds: int = 4, steps: int = 12, deaths: bool = True) -> list[Row]:
    """The rows of the table."""
    with one_thread():
        with tempfile.TemporaryDirectory() as folder:
            training = Training(Path(folder))
            order = [way for _ in range(rounds) for pair in WAYS for way in ("off", pair)] + ["off"]
            blocks = [training.block(way, steps) for way in order]
            training.close()
            said = f"{CALL}; {rounds} blocks of {steps} steps of each way, in turn"
            rows = [_with(said, row) for row in _rows(blocks, _bytes(training, Path(folder)))]
            off = _off(Path(folder) / "off")
    note = "one thread; median of 60 differences, of 500 calls each"
    rows.append(Row("hook that is off, per call", off, None, "us", ratio=off, budget="< 2 us", note=note, within=off < 2))
    return rows + (_deaths() if deaths else []) + [_msprobe()]


def _with(conditions: str, row: Row) -> Row:
    return replace(row, note="; ".join(filter(None, [row.note, conditions])))


def _rows(blocks: list[Block], sizes: dict[str, float]) -> list[Row]:
    rows: list[Row] = []
    for way in ("off", *WAYS):
        ratio, own = ratio_of(blocks, way, "cpu")
        spent = median(_middle(blocks, way, "cpu")) * 1e3
        rows.append(Row(f"CPU of a step, {way} / off", spent, None, "ms", ratio=ratio, note=f"+- {own:.4f}"))
    clone, _ = beside(blocks, "clone", "stalls")
    for way in WAYS:
        stall, own = beside(blocks, way, "stalls")
        most = 200e-6 if way == "armed" else max(150e-6, 1.5 * clone)
        within = stall <= most if way in OURS else None
        said = f"<= {most * 1e6:.0f} us" if way in OURS else "-"
        name, note = f"stall in the step, {way} / clone", f"+- {own * 1e6:.0f} us"
        rows.append(Row(name, stall * 1e6, clone * 1e6, "us", ratio=stall / clone, budget=said, note=note, within=within))
    for way in (*OURS, "clone + thread"):
        spent, own = (1e3 * figure for figure in beside(blocks, way, "others"))
        within, said = (spent <= 0.3, "<= 0.3 ms") if way in ("process", "armed") else (None, "-")
        note = f"+- {own:.3f} ms, for each step"
        rows.append(
            Row(
                f"CPU of other threads in the trainer, {way}",
                spent,
                None,
                "ms",
                ratio=spent,
                budget=said,
                note=note,
                within=within,
            )
        )
    for way, size in sizes.items():
        rows.append(
            Row(
                f"bytes of a call, {way} / pickle",
                size / 1e3,
                sizes["pickle"] / 1e3,
                "kB",
                ratio=size / sizes["pickle"],
            )
        )
    return rows


def _middle(blocks: list[Block], way: str, what: str) -> list[float]:
    return [median(getattr(block, what)) for block in blocks if block.way == way]


def _pairs(blocks: list[Block], way: str) -> Iterator[tuple[Block, Block, Block]]:
    """Blocks of a way and their neighbours that are off: those beside it, or for off itself the next ones."""
    reach = 2 if way == "off" else 1
    for place in range(reach, len(blocks) - reach):
        if blocks[place].way == way:
            yield blocks[place], blocks[place - reach], blocks[place + reach]


def ratio_of(blocks: list[Block], way: str, what: str) -> tuple[float, float]:
    """Median of a figure over that of the neighbours, and its error (1 sigma)."""
    triples = [[median(getattr(block, what)) for block in three] for three in _pairs(blocks, way)]
    return with_error([2 * mine / (before + after) for mine, before, after in triples])


def with_error(values: list[float]) -> tuple[float, float]:
    """The median, and its error as if the values were normally distributed."""
    middle = median(values)
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return middle, 1.2533 * spread / math.sqrt(len(values))


def beside(blocks: list[Block], way: str, what: str) -> tuple[float, float]:
    """Median of a figure, less that of the neighbours, and its error. CPU of threads that work now and then is a mean over the
    block."""
    over: Callable[[list[float]], float] = median if what == "stalls" else lambda values: sum(values) / len(values)
    found = [over(getattr(a, what)) - (over(getattr(b, what)) + over(getattr(c, what))) / 2 for a, b, c in _pairs(blocks, way)]
    return with_error(found)


def _bytes(training: Training, folder: Path) -> dict[str, float]:
    """Bytes of a file of each kind."""
    dumps = [path.stat().st_size for path in training.store.iter_dumps()]
    (arguments,) = batches(1)
    sizes = {"ours": sum(dumps) / len(dumps)}
    for name in ("pickle", "torch.save", "safetensors"):
        training.peers.ways[name](Actor(), **arguments)
        newest = max((folder / "peers").iterdir(), key=lambda path: path.name)
        sizes[name] = newest.stat().st_size
    return sizes


def _off(root: Path, batches_: int = 60, calls: int = 500) -> float:
    """Microseconds that a hook adds to a call while recording is off: the median over pairs of batches."""

    class Empty(torch.nn.Module):
        def forward(self, sequences: Any) -> Any:
            return sequences

    plain, actor, ids = Empty.forward, Empty(), torch.arange(8)
    hooked = wrap(plain, Slot(Store(root), None))

    def batch(forward: Callable[..., Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            forward(actor, ids)
        return (time.perf_counter() - start) / calls

    return median(batch(hooked) - batch(plain) for _ in range(batches_)) * 1e6


def _deaths() -> list[Row]:
    """What is left after kill -9, and how far a training comes on a full disk: nothing is timed, so two at once."""
    with ThreadPoolExecutor(2) as pool:
        left, made = pool.map(_left_by, DEATHS), pool.map(_made_on_a_full_disk, DEATHS)
        rows = [_survived("after kill -9, inputs left", "inputs", *one, KILLED + 1) for one in zip(DEATHS, left, strict=True)]
        on_full = list(zip(DEATHS, made, strict=True))
    if any(count is None for _, count in on_full):
        return [
            *rows,
            Row("full disk, steps made", 0, None, "steps", ratio=0, note="no file system can be mounted here"),
        ]
    return rows + [_survived("full disk, steps made", "steps", way, count or 0, FULL) for way, count in on_full]


def _survived(what: str, unit: str, way: str, count: int, most: int) -> Row:
    within = count == most if way in OURS else None
    return Row(f"{what}, {way}", count, None, unit, ratio=count / most, budget="1", note=f"of {most}; {CALL}", within=within)


def _left_by(way: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        _child(way, Path(folder), KILLED)
        return _readable(way, Path(folder))


def _made_on_a_full_disk(way: str) -> int | None:
    with tempfile.TemporaryDirectory() as folder, _small_disk(Path(folder)) as disk:
        return None if disk is None else _child(way, disk, FULL)


def _child(way: str, folder: Path, calls: int) -> int:
    """A process that records so many calls and is killed; how many it made."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks.real_step", "survive", way, str(folder), str(calls)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    return done.stdout.count("call\n")


def _readable(way: str, folder: Path) -> int:
    """Inputs that can be read back."""
    store = Store(folder / "store")
    if way in OURS:
        assert all(report.problem is None for report in recover(store, find_rings(store)))
        return sum(payload.load(path).record.seq_len == 2048 for path in store.iter_dumps())
    left = 0
    for path in (folder / "peers").iterdir():
        with contextlib.suppress(Exception):
            if way == "torch.save":
                torch.load(path)
            elif way == "safetensors":
                from safetensors.torch import load_file

                load_file(path)
            else:
                pickle.loads(path.read_bytes())
            left += 1
    return left


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """An empty file system of 1.4 MB, where one can be mounted."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1400k", "none", str(folder)], capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _msprobe() -> Row:
    there = find_spec("msprobe") is not None
    said = "installed; it records modules, not the inputs of a call" if there else "not installed"
    return Row("msProbe", 0, None, "us", ratio=math.nan, note=said)


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
