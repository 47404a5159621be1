"""Processes that die on purpose, hundreds of them: a fork server, what the victims do, and what they report while they live.

A fresh interpreter imports torch and the hook once and runs no operation of torch (a fork after one can hang in OpenMP). It
forks each victim, so that one costs some 20 ms instead of seconds. A victim is told what to do in a Job; it counts in memory
that it shares with the test, so that what it did is known to the instruction, however it died:

    started[i]   incremented just before the hooked forward is called
    entered[i]   incremented as the first thing inside of the original forward
    acked        one byte for each call, set when its dump is published, or counted as captured

The hook counts a call between the two, so entered <= calls in the books <= started, and they differ by one at most for each
thread: by the call that the process died in the beginning of.

Example::

    with Victims(tmp_path) as victims:
        job = Job("calls", store)
        pid = victims.start(job)
        os.kill(pid, 9)
        assert victims.wait(pid) == -9
        job.started
"""

import ctypes
import itertools
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from roots import environment

from actordbg.capture import hook, writer
from actordbg.capture.facts import versions
from actordbg.capture.recorded_call import Item
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats.store_files import StoreFiles
from actordbg.store.layout import Store

SHARED, ACKED = 2**17, 64
PR_SET_PDEATHSIG = 1
_numbers = itertools.count()


@dataclass
class Job:
    """What one victim is to do. `body`: one of the functions below. `log`: gets its standard error.

    `calls`: how many it makes before the call in which `ways` of dying come in; `pause`: seconds that a forward takes.
    """

    body: str
    store: str
    log: str = "/dev/null"
    shared: str = ""
    calls: int = 0
    pause: float = 0.0
    way: str = "kill"
    seed: int = 0
    publish_seconds: float = 1.0
    environment: dict[str, str] = field(default_factory=dict)

    def count(self, place):
        with open(self.shared, "rb") as file:
            return int(struct.unpack_from("<Q", file.read(64), 8 * place)[0])

    @property
    def started(self):
        return self.count(0)

    @property
    def entered(self):
        return self.count(1)

    @property
    def acked(self):
        """Numbers of the calls whose dumps the victim itself saw published."""
        with open(self.shared, "rb") as file:
            return {place for place, byte in enumerate(file.read()[ACKED:]) if byte}


class Victims:
    """The fork server, as the test sees it. `folder`: for what is shared with the victims."""

    def __init__(self, folder):
        self._folder = folder
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._server = subprocess.Popen([sys.executable, __file__], env=environment(), **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)

    def start(self, job):
        """Fork a victim; its pid."""
        if not job.shared:
            job.shared = str(self._folder / f"shared-{next(_numbers)}")
            Path(job.shared).write_bytes(bytes(SHARED))
        return self._ask(asdict(job))

    def wait(self, pid):
        """Wait for a victim's end: its exit code, or minus the signal that killed it."""
        return self._ask({"wait": pid})

    def run(self, job):
        """Start and wait."""
        return self.wait(self.start(job))

    def _ask(self, question):
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def inputs(seed):
    """The arguments of the call of this seed: ids of many shapes, every third transposed; masks absent, int64, bool, int32."""
    generator = torch.Generator().manual_seed(seed)
    batch, seq = 1 + seed % 3, 4 + seed % 29
    ids = torch.randint(0, 128_000, (seq, batch) if seed % 3 == 0 else (batch, seq), generator=generator)
    given = {"sequences": ids.t() if seed % 3 == 0 else ids}
    mask = torch.randint(0, 2, (batch, 2 * seq), generator=generator)
    if seed % 4 == 1:
        given["attention_mask"] = mask[:, :seq].clone()
    elif seed % 4 == 2:
        given["attention_mask"] = mask[:, ::2].bool()
    elif seed % 4 == 3:
        given["attention_mask"] = mask.int()[:, ::2]
        given["action_mask"] = mask[:, 1 : seq - 1]
    return given


def is_of_seed(dump, seed):
    """Whether a dump holds exactly what the call of this seed received: names, values, dtypes, shapes, strides."""
    wanted, found = inputs(seed), dump.inputs
    return wanted.keys() == found.keys() and all(_same(t, found[name]) for name, t in wanted.items())


def _same(one, other):
    """Equal in all that can be told apart; the stride of a dimension of size 1 means nothing."""
    strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (one, other)]
    return one.dtype == other.dtype and torch.equal(one, other) and strides[0] == strides[1]


class Reporting:
    """What the victim shares with the test."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), SHARED)

    def add(self, place):
        count = struct.unpack_from("<Q", self.memory, 8 * place)[0]
        struct.pack_into("<Q", self.memory, 8 * place, count + 1)

    def publish(self, store, record, blob):
        path = _publish(store, record, blob)
        self.memory[ACKED + (record.call_index or 0)] = 1
        return path


_publish = StoreFiles.publish_dump


class Actor(torch.nn.Module):
    """An actor whose forward does what its victim is there for: `inside`."""

    def __init__(self, job, shared):
        super().__init__()
        self.job, self.shared, self.inside = job, shared, lambda: None

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False):
        self.shared.add(1)
        self.inside()
        return sequences

    def call(self, seed):
        given = inputs(seed)
        self.shared.add(0)
        self(**given)


def calls(actor):
    """As many calls as it is told to make, and an end as it should be; else call after call, until somebody kills the process."""
    actor.inside = lambda: time.sleep(actor.job.pause)
    for seed in range(actor.job.calls or SHARED - ACKED):
        actor.call(actor.job.seed + seed)


def dies_inside(actor):
    """Dies in one of many ways at the beginning of a forward, after some calls that went well."""
    for seed in range(actor.job.calls):
        actor.call(seed)
    actor.inside = DEATHS[actor.job.way]
    actor.call(actor.job.calls)


def dies_after(actor):
    """Dies right after a forward returned, as in its backward."""
    for seed in range(actor.job.calls + 1):
        actor.call(seed)
    DEATHS[actor.job.way]()


def hangs(actor):
    """Is inside of forward until the file `go` is in the store, then makes three more calls."""
    for seed in range(actor.job.calls):
        actor.call(seed)
    go = Path(actor.job.store) / "go"
    actor.inside = lambda: wait_for(go.exists)
    actor.call(actor.job.calls)
    for seed in range(3):
        actor.call(actor.job.calls + 1 + seed)


def stuck(actor):
    """The disk hangs from the first dump on; calls continue, then wait inside of the last one."""
    StoreFiles.publish_dump = lambda store, record, blob: time.sleep(600)  # type: ignore[assignment,method-assign,return-value]
    for seed in range(actor.job.calls):
        actor.call(seed)
    actor.inside = lambda: time.sleep(600)
    actor.call(actor.job.calls)


def large(actor):
    """Calls with a megabyte of input each; it stays inside of the last one."""
    for seed in range(actor.job.calls + 1):
        if seed == actor.job.calls:
            actor.inside = lambda: time.sleep(600)
        actor.shared.add(0)
        actor(torch.full((2, 60_000), seed))


def recovers(actor):
    """Recovers what there is in its store, and its rings folder."""
    store = Store(actor.job.store)
    problems = [report.problem for report in recover(store, find_rings(store)) if report.problem]
    os._exit(3 if problems else 0)


def wait_for(condition, seconds=60):
    """Wait until a condition holds; fails after a while."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def _raise():
    raise RuntimeError("out of memory: an error that nobody catches")


def _segfault():
    ctypes.string_at(0)


DEATHS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "segfault": _segfault,
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "_exit": lambda: os._exit(7),
    "raise": _raise,
    "sys.exit": lambda: sys.exit(0),
}
BODIES = {body.__name__: body for body in (calls, dies_inside, dies_after, hangs, stuck, large, recovers)}


def _live(job):
    """The life of a victim. It never outlives the fork server, whatever becomes of the test."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    os.environ.update(job.environment)
    torch.set_num_threads(1)
    writer.PUBLISH_SECONDS = job.publish_seconds
    shared = Reporting(job.shared)
    StoreFiles.publish_dump = lambda store, record, blob: shared.publish(store, record, blob)  # type: ignore[method-assign]
    captured = Item.captured

    def acknowledged(item, nbytes, trigger):
        captured(item, nbytes, trigger)
        shared.memory[ACKED + item.number] = 1

    Item.captured = acknowledged  # type: ignore[method-assign]
    assert hook.install(Actor, store=job.store)
    BODIES[job.body](Actor(job, shared))


def _serve():
    """Fork a victim for each job that comes in, and answer with its pid; or wait for one, and answer with its exit code."""
    import multiprocessing.util  # noqa: F401  # what victims need and the server can import for them

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    versions()
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os.close(0)
                os.open("/dev/null", os.O_RDONLY)
                os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
                return _live(Job(**question))
        print(answer, flush=True)
    return None


if __name__ == "__main__":
    threading.current_thread().name = "victims"
    _serve()
