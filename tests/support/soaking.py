"""A soak: very many recorded calls with faults drawn at random. `python soaking.py CALLS [SEED]`, from `make soak`.

Each life of a recorder is a forked process that makes some hundreds of calls into one store: with write errors, a full disk, fsyncs that
fail, a slow disk, memory errors, triggers, rotation, sampling, a switch that goes off and on, forks of its own. It comes to an end, or is
killed at a random moment, or runs out of time to write. Then the rings are recovered. What has to hold after each life, exactly:

    calls made = calls in the books = captured + dropped + sampled out        dump files = captured - rotated (+ the recovered ones
                                                                              that were not wanted)

The other half of the calls is made by one recorder, on a disk with errors, for many actors one after another. Its memory is looked at
on the way: nothing may come to stay.
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from capturekit import Recording
from roots import MEMORY
from victims import wait_for

from actordbg.base.errors import StoreProblem
from actordbg.capture import writer as writing
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats import encoding
from actordbg.formats.ringfile import is_held
from actordbg.records.run_files import read_counters
from actordbg.store.layout import Store

LIFE = 500
"""Calls of one life."""
ACTORS = 40
"""Actors that the long life has, one after another."""
OBJECTS_A_CALL, OBJECTS_IN_ALL = 0.1, 60
"""What stays for a call is one object at least, for an actor some dozens. Noise: some objects in all (what a thread just made)."""
BYTES_A_CALL, CALLS_TO_WEIGH = 64, 20_000
"""A path that stays for each call has 200 bytes. Noise: pages of the allocator, 300 kB in all; so this needs many calls."""
ERRORS = [OSError(code, os.strerror(code)) for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT)]
MOODS = ("good",) * 30 + ("nan", "broken")


class Actor(torch.nn.Module):
    """An actor that raises or returns NaN when it is told to. Guarantees: computes nothing else."""

    def forward(self, sequences, action_mask=None, attention_mask=None, mood="good"):
        if mood == "broken":
            raise ValueError("they say")
        return sequences.float() * (float("nan") if mood == "nan" else 1)


class Disk(Store):
    """A store whose disk fails and dawdles by dice. Guarantees: what it raises, a real one may raise."""

    dice, trouble = random.Random(0), 0.0

    def publish_dump(self, record, blob):
        if self.dice.random() < self.trouble:
            if self.dice.random() < 0.2:
                time.sleep(0.01)
            else:
                raise self.dice.choice(ERRORS)
        return super().publish_dump(record, blob)


def faulty(function, dice, often, error):
    """`function`, which raises now and then."""

    def fails(*args, **kwargs):
        if dice.random() < often:
            raise error
        return function(*args, **kwargs)

    return fails


def switches(dice):
    return {
        "every": dice.choice((1, 1, 3, 0)), "triggers": dice.choice(((), ("nan",), ("nan", "exception"))), "before": dice.choice((0, 2)),
        "keep_bytes": dice.choice((None, None, 20_000)), "with_outputs": dice.random() < 0.3, "with_rng": dice.random() < 0.2,
        "ring": dice.choice((8, 8, 2, 0)), "max_dumps": dice.choice((None, None, 100)),
    }  # fmt: skip


def live(recording, dice, calls, shared):
    """So many calls; `shared` holds how many of them were made while recording was on."""
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
        shared[:8] = on.to_bytes(8, "little")
        with contextlib.suppress(ValueError):
            ids = torch.full((1 + number % 3, 4 + number % 40), number)
            recording.forward(actor, ids, mood=dice.choice(MOODS))


def books_of(store):
    """What the books of all processes say together: each call in them is closed or pending."""
    books = [read_counters(path) for path in store.counters.rglob("[!.]*.json")]
    sums = {name: sum(data[name] for data in books) for name in ("calls", "captured", "pending", "rotated")}
    sums |= {name: sum(sum(data[name].values()) for data in books) for name in ("dropped", "sampled_out")}
    assert sums["calls"] == sums["captured"] + sums["dropped"] + sums["sampled_out"] + sums["pending"], books
    return sums | {"actors": len(books)}


def one_life(root, seed, calls):
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
            recording = Recording(disk, **switches(dice))
            os.fsync = faulty(os.fsync, random.Random(seed), 0.02, OSError(errno.EIO, "fsync"))
            live(recording, dice, dice.randrange(1, 2 * calls), shared)
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
    wait_for(lambda: not any(map(is_held, find_rings(store))))  # a child that it forked just before holds the ring until it ends
    reports = list(recover(store, find_rings(store)))
    assert [report.problem for report in reports] == [None] * len(reports), (seed, reports)
    made, killed, sums = int.from_bytes(shared[:8], "little"), end == "killed", books_of(store)
    assert not sums["pending"] or (killed and not reports), (seed, end, sums)  # without a ring nothing outlives a kill
    assert sums["calls"] <= made, (seed, end, made, sums)
    if not killed and sums["actors"]:
        assert sums["calls"] == made, (seed, end, made, sums)
        extra = sum(dump.recorded is False for report in reports for dump in report.dumps)
        files = len(list(store.iter_dumps()))
        assert sums["captured"] - sums["rotated"] <= files <= sums["captured"] - sums["rotated"] + extra, (seed, end, files, sums)
    shutil.rmtree(store.root)
    return sums | {"recovered": sum(len(report.dumps) for report in reports), "killed": killed}


@dataclass
class Memory:
    """What a process holds at several moments, when it has nothing to do. Guarantees: the allocator keeps nothing for later."""

    calls: list[int] = field(default_factory=list)
    kilobytes: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self, calls):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        self.calls.append(calls)
        self.kilobytes.append(int(status.split("RssAnon:")[1].split()[0]))
        self.objects.append(len(gc.get_objects()))
        self.descriptors.append(len(os.listdir("/proc/self/fd")))

    def came_to_stay(self):
        """From the third quarter of the time to the last one, for each call (medians: now and then the writer holds an item)."""
        quarter = len(self.calls) // 4
        calls = self.calls[-1] - self.calls[-1 - quarter]

        def growth(seen):
            return (median(seen[-quarter:]) - median(seen[-2 * quarter : -quarter])) / calls

        return {"objects_a_call": round(growth(self.objects), 3), "bytes_a_call": round(1024 * growth(self.kilobytes), 1)}

    def is_flat(self):
        """AssertionError if something stays for each call, or for each actor, descriptors too."""
        told = self.came_to_stay()
        looked_at = self.calls[-1] - self.calls[-1 - len(self.calls) // 4]
        assert told["objects_a_call"] < max(OBJECTS_A_CALL, OBJECTS_IN_ALL / looked_at), (told, self)
        assert self.calls[-1] < CALLS_TO_WEIGH or told["bytes_a_call"] < BYTES_A_CALL, (told, self)
        assert max(self.descriptors) <= self.descriptors[0] + 2, self


def long_life(root, seed, calls):
    """One recorder for so many calls of `ACTORS` actors, one after another, on a bad disk; its books are exact and its memory flat."""
    store, dice, made, memory = Store(root / "long").create(), random.Random(seed), 0, Memory()
    disk = Disk(store.root)
    disk.dice, disk.trouble = random.Random(seed), 0.05
    recording = Recording(disk, keep_bytes=200_000, before=2, triggers=("nan", "exception", "slow:1000x"))
    gc.freeze()  # what torch has is there to stay: no look counts it
    for _ in range(ACTORS):
        actor = Actor()
        for number in range(calls // ACTORS):
            with contextlib.suppress(ValueError):
                recording.forward(actor, torch.full((2, 4 + number % 40), number), mood=dice.choice(MOODS))
            made += 1
        del actor
        recording.ledgers.clear()  # the recorder has to forget them on its own
        wait_for(lambda: not recording.recorder.writer.watched())  # an actor is gone: its books are closed
        memory.look(made)
    assert recording.close(60)
    sums = books_of(store)
    assert (sums["actors"], sums["calls"], sums["pending"]) == (ACTORS, made, 0), sums
    assert len(list(store.iter_dumps())) == sums["captured"] - sums["rotated"], sums
    memory.is_flat()
    return memory


def soak(calls, seed):
    """All of it; what came of it. AssertionError if anything does not hold."""
    root = Path(tempfile.mkdtemp(prefix="actordbg-soak-", dir=MEMORY))
    os.environ["ACTORDBG_RING_DIR"] = str(root / "rings")
    torch.set_num_threads(1)
    writing.PUBLISH_SECONDS = writing.LOOK_SECONDS = 0.02
    print(f"seed {seed}", file=sys.stderr)
    total = {"seed": seed, "lives": 0}
    try:
        while total.get("calls", 0) < calls // 2:
            for name, count in one_life(root, seed + total["lives"], min(LIFE, calls // 4)).items():
                total[name] = total.get(name, 0) + count
            total["lives"] += 1
        memory = long_life(root, seed, calls // 2)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return total | memory.came_to_stay() | {"calls_of_the_long_life": memory.calls[-1], "private_kilobytes": memory.kilobytes}


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(10**6))))
