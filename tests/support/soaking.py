"""A soak: very many recorded calls with faults drawn at random. `python soaking.py CALLS [SEED]`, from `make soak`.

Each life of a recorder is a forked process that makes some hundreds of calls into one store: with write errors, a full disk, fsyncs that
fail, a slow disk, memory errors, triggers, rotation, sampling, a switch that goes off and on, forks of its own. It comes to an end, or is
killed at a random moment, or runs out of time to write. Then the rings are recovered. What has to hold after each life, exactly:

    calls made = calls in the books = captured + dropped + sampled out        dump files = captured - rotated (+ the recovered ones
                                                                              that were not wanted)

Memory and descriptors of a recorder that lives on through all of it (this process) are looked at on the way, and their slope is told.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from capturekit import Recording

from actordbg.base.errors import StoreProblem
from actordbg.capture import writer as writing
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats import encoding
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.recording_reading import read_counters
from actordbg.store.layout import Store

LIFE = 500
"""Calls of one life."""
ERRORS = (
    OSError(errno.EIO, "I/O error"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Quota exceeded"),
)


class Actor(torch.nn.Module):
    """An actor that raises or returns NaN when it is told to. Guarantees: computes nothing else."""

    def forward(self, sequences: torch.Tensor, attention_mask: Any = None, mood: str = "good") -> torch.Tensor:
        if mood == "broken":
            raise ValueError("they say")
        return sequences.float() * (float("nan") if mood == "nan" else 1)


class Disk(Store):
    """A store whose disk fails and dawdles by dice. Guarantees: what it raises, a real one may raise."""

    dice, trouble = random.Random(0), 0.0

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        if self.dice.random() < self.trouble:
            if self.dice.random() < 0.2:
                time.sleep(0.01)
            else:
                raise self.dice.choice(ERRORS)
        return super().publish_dump(record, blob)


def faulty(function: Any, dice: random.Random, often: float, error: BaseException) -> Any:
    """`function`, which raises now and then."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        if dice.random() < often:
            raise error
        return function(*args, **kwargs)

    return fails


def switches(dice: random.Random) -> dict[str, Any]:
    return {
        "every": dice.choice((1, 1, 3, 0)), "triggers": dice.choice(((), ("nan",), ("nan", "exception"))), "before": dice.choice((0, 2)),
        "keep_bytes": dice.choice((None, None, 20_000)), "with_outputs": dice.random() < 0.3, "with_rng": dice.random() < 0.2,
        "ring": dice.choice((8, 8, 2, 0)), "max_dumps": dice.choice((None, None, 100)),
    }  # fmt: skip


def live(recording: Recording, dice: random.Random, calls: int, shared: Any = None) -> int:
    """So many calls; how many of them were made while recording was on."""
    actor, on = Actor(), 0
    for number in range(calls):
        if dice.random() < 0.004:
            with contextlib.suppress(StoreProblem):  # its fsync failed
                recording.set(enabled=dice.random() < 0.7, **switches(dice))
        if dice.random() < 0.002 and os.fork() == 0:
            os._exit(0)
        elif dice.random() < 0.002:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        on += recording.recorder.control is not None
        if shared is not None:
            shared[:8] = on.to_bytes(8, "little")
        with contextlib.suppress(ValueError):
            ids = torch.full((1 + number % 3, 4 + number % 40), number)
            recording.forward(actor, ids, mood=dice.choice(("good",) * 30 + ("nan", "broken")))
    return on


def one_life(root: Path, seed: int, calls: int) -> dict[str, int]:
    """A process that records into a store of its own, and how its books stand in the end."""
    import mmap

    dice, store, shared = random.Random(seed), Store(root / f"life{seed}").create(), mmap.mmap(-1, 64)
    end = dice.choice(("well", "well", "killed", "no time"))
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            disk = Disk(store.root)
            disk.dice, disk.trouble = random.Random(seed), dice.choice((0.0, 0.05, 0.5))
            encoding.serialize = faulty(encoding.serialize, random.Random(seed), 0.02, MemoryError())
            writing.PUBLISH_SECONDS = 0.05
            recording = Recording(store, publisher=disk, **switches(dice))
            os.fsync = faulty(os.fsync, random.Random(seed), 0.02, OSError(errno.EIO, "fsync"))
            shared[16:24] = live(recording, dice, dice.randrange(1, 2 * calls), shared).to_bytes(8, "little")
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "no time":
                writer = recording.recorder.writer
                writer._deadline, writer._give_up = time.monotonic(), time.monotonic() + 60
            code = 0 if recording.close(60) else 4
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == (-9 if end == "killed" else 0), (seed, end, status)
    reports = list(recover(store, find_rings(store)))
    assert [report.problem for report in reports] == [None] * len(reports), (seed, reports)
    made, books = int.from_bytes(shared[:8], "little"), [read_counters(path) for path in store.counters.rglob("[!.]*.json")]
    sums = {name: sum(data[name] for data in books) for name in ("calls", "captured", "pending", "rotated")}
    sums["dropped"] = sum(sum(data["dropped"].values()) for data in books)
    sums["sampled_out"] = sum(sum(data["sampled_out"].values()) for data in books)
    sums["recovered"] = sum(len(report.dumps) for report in reports)
    sums["killed"] = end == "killed"
    told = bool(books) or end == "killed"
    closed = sums["captured"] + sums["dropped"] + sums["sampled_out"]
    assert sums["calls"] == closed + sums["pending"], (seed, end, books)
    assert not sums["pending"] or (end == "killed" and not reports), (seed, end, books)  # without a ring nothing outlives a kill
    assert not told or made - (end == "killed") * made <= sums["calls"] <= made, (seed, end, made, books)
    if end != "killed" and books:
        assert sums["calls"] == made, (seed, end, made, books)
        extra = sum(dump.recorded is False for report in reports for dump in report.dumps)
        files = len(list(store.iter_dumps()))
        assert sums["captured"] - sums["rotated"] <= files <= sums["captured"] - sums["rotated"] + extra, (seed, end, files, sums)
    shutil.rmtree(store.root)
    return sums


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def soak(calls: int, seed: int) -> dict[str, Any]:
    """All of it; what came of it. AssertionError if anything does not hold."""
    root = Path(tempfile.mkdtemp(prefix="actordbg-soak-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    os.environ["ACTORDBG_RING_DIR"] = str(root / "rings")
    torch.set_num_threads(1)
    total: dict[str, Any] = {"seed": seed, "lives": 0}
    began, memory, descriptors, store = time.monotonic(), [], [], Store(root / "long").create()
    try:
        while total.get("calls", 0) < calls // 2:
            for name, count in one_life(root, seed + total["lives"], min(LIFE, calls // 4)).items():
                total[name] = total.get(name, 0) + count
            total["lives"] += 1
        dice, disk = random.Random(seed), Disk(store.root)
        disk.dice, disk.trouble = random.Random(seed), 0.05
        recording, on = Recording(store, publisher=disk, keep_bytes=200_000, before=2, triggers=("nan", "exception")), 0
        for _ in range(max(10, calls // 2 // LIFE)):
            actor = Actor()
            for number in range(calls // 2 // max(10, calls // 2 // LIFE)):
                with contextlib.suppress(ValueError):
                    mood = dice.choice(("good",) * 30 + ("nan", "broken"))
                    recording.forward(actor, torch.full((2, 4 + number % 40), number), mood=mood)
                on += 1
            del actor
            memory.append(resident())
            descriptors.append(len(os.listdir("/proc/self/fd")))
        assert recording.close(60)
        books = recording.ledgers
        assert sum(ledger.calls for ledger in books) == on and not any(ledger.pending for ledger in books)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    half = len(memory) // 2
    total["calls_of_one_life"] = on
    total["resident_growth_kb_per_1000_calls"] = round((memory[-1] - memory[half]) / 1024 / max(1, on / 2) * 1000, 1)
    total["descriptors"] = [min(descriptors), max(descriptors)]
    total["seconds"] = round(time.monotonic() - began, 1)
    return total


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6))))
