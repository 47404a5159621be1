"""Faults in the hook and the writer: the training never notices, and the books are exact.

- Every call that the recorder makes fails in turn, once and from then on, with each kind of error (`faulted_runs`, in a process
  of its own, because there the package is loaded with fault points): one in 192 of the calls, all with `FAULTS=each`.
- A disk that falls asleep in one write: while the training runs, and while it ends.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from amounts import first_or_all
from roots import ROOT, SUPPORT, environment

from actordbg.capture.control import WRITERS
from actordbg.dumps import recover
from actordbg.records.run_files import read_counters
from actordbg.store import payload
from actordbg.store.layout import Store

pytestmark = pytest.mark.forked
TESTS = SUPPORT
PARTS, SAMPLE = 192, 5
"""Shares of the sites. `make test` takes the `SAMPLE`th; `FAULTS=each` takes all, two at a time (about five minutes)."""


# --- every call fails in turn ---------------------------------------------------------------------------------------------


def run_part(part, folder):
    """One share of the sites, in a process of its own; its exit code."""
    command = [sys.executable, str(TESTS / "faulted_runs.py"), "", f"{part}/{PARTS}"]
    with open(folder / f"{part}.out", "w") as out, open(folder / f"{part}.err", "w") as errors:
        # no fork: faults are put into modules as they are imported
        path = os.pathsep.join(map(str, (ROOT, SUPPORT)))
        return subprocess.run(command, env=environment(PYTHONPATH=path), stdout=out, stderr=errors).returncode


def test_every_call_of_the_recorder_may_fail_once_or_for_ever(tmp_path):
    chosen = range(PARTS) if "FAULTS" in os.environ else [SAMPLE]
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(lambda part: run_part(part, tmp_path), chosen))
    assert not any(codes), "".join((tmp_path / f"{part}.err").read_text()[-4000:] for part in chosen)
    lines = [json.loads(line) for part in chosen for line in (tmp_path / f"{part}.out").read_text().splitlines()]
    complaints, parts = [line for line in lines if "fault" in line], [line for line in lines if "runs" in line]
    print(parts)
    assert not complaints, json.dumps(complaints[:20], indent=1)
    sites, runs, errors_made = (sum(one[name] for one in parts) for name in ("sites", "runs", "errors"))
    share = len(chosen) / PARTS
    assert sites > 700 * share and len(set().union(*(one["sites_after_a_fault"] for one in parts))) > 50 * share
    assert errors_made > 6 * sites
    unreached = [plan for one in parts for plan in one["unreached"]]
    # Second faults behind a first one that did not come are missed together: in a share of the sites that is more of its runs.
    assert len(unreached) <= (0.02 if share == 1 else 0.12) * runs, unreached


# --- a disk that sleeps ---------------------------------------------------------------------------------------------------

TRAINING = """
import json, os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from capturekit import TinyActor, ids
from actordbg.capture import hook
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.store.layout import Store

store = Store({store!r}).create()
fsync, naps, awake = os.fsync, [], threading.Event()

def sleeping_fsync(descriptor):
    asleep = threading.current_thread().name == "actordbg-writer" and armed and not naps and {writer!r} == "thread"
    if asleep:
        naps.append(descriptor)
        awake.wait()
    fsync(descriptor)

armed, generation = False, 0
os.fsync = sleeping_fsync

def switch(on):
    global generation
    generation += 1
    write_control(store, Control(on, "r", "2026-11-20T12:00:00.000000Z", generation, free_floor_bytes=0, writer={writer!r}))

class Actor(TinyActor):
    pass
Actor.forward = TinyActor.forward
switch(True)
assert hook.install(Actor, store={store!r})
(slot,) = hook._slots.values()
actor, calls, unsure, inside, waits, sleep = Actor(), 0, 0, False, [], time.sleep

def counted(wait):
    def waiting(*args, **kwargs):
        if inside and threading.current_thread() is threading.main_thread():
            waits.append(wait.__qualname__)
        return wait(*args, **kwargs)
    return waiting

time.sleep = counted(time.sleep)
threading.Condition.wait = counted(threading.Condition.wait)
threading.Thread.join = counted(threading.Thread.join)

def call():
    global calls, unsure, inside
    on = slot.enter is not None
    calls += on
    inside = True
    with torch.no_grad():
        actor(ids(2, 50, calls), return_logprobs=True)
    inside = False
    unsure += on != (slot.enter is not None)  # switched while we called: before the call or in it
    sleep(0.02)

def until(condition):
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline
        call()

for _ in range(20): call()
if {writer!r} == "process":
    until(lambda: slot.recorder.writer._scribe is not None and slot.recorder.writer._scribe._ready)
armed = True
waits.clear()  # the first call of a process waits for the first look at the switch
scribe = slot.recorder.writer._scribe
if scribe is not None:  # it sleeps as a process does whose write does not return
    os.kill(scribe._process.pid, signal.SIGSTOP)
    naps.append(scribe)
until(lambda: naps)
"""

LIVE = """
switch(False)
until(lambda: slot.enter is None)
switch(True)
until(lambda: slot.enter is not None)
enough = calls + 50
until(lambda: calls >= enough)
awake.set()
if scribe is not None:
    os.kill(scribe._process.pid, signal.SIGCONT)
print(json.dumps(dict(calls=calls, unsure=unsure, waits=waits)))
"""

ENDS = """
for _ in range(20): call()
print(json.dumps(dict(calls=calls, unsure=unsure, waits=waits)))
"""


def start(store, body, writer):
    code = TRAINING.format(tests=str(TESTS), store=str(store.root), writer=writer) + body
    around = environment(FORKED_PROGRAM="-c")
    return subprocess.Popen([sys.executable, "-c", code], env=around, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("writer", first_or_all(WRITERS))
def test_a_disk_that_sleeps_holds_up_nobody(tmp_path, writer):
    """While the writer hangs in a write: calls continue and wait for nothing, the switch works, the process ends, and the books
    are
    exact (of the process that had to leave, once its ring is recovered).

    The disk wakes when the training has seen all that, and never in the process that ends: whoever waited for it would not come
    here."""
    live, ends = Store(tmp_path / "live"), Store(tmp_path / "ends")
    processes = [start(live, LIVE, writer), start(ends, ENDS, writer)]
    told = [json.loads(process.communicate(timeout=180)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [one["waits"] for one in told] == [[], []]

    (data,) = [read_counters(path) for path in live.counters.rglob("*.json")]
    assert abs(data["calls"] - told[0]["calls"]) <= told[0]["unsure"] <= 2
    assert data["calls"] == data["captured"] == len(list(live.iter_dumps()))
    assert (data["pending"], data["dropped"], data["state"]) == (0, {}, "ended")

    assert [len(report.dumps) > 0 for report in recover.recover(ends, recover.find_rings(ends))] == [True]
    (data,) = [read_counters(path) for path in ends.counters.rglob("*.json")]
    assert data["calls"] == told[1]["calls"] and data["pending"] == 0
    assert data["calls"] == data["captured"] + sum(data["dropped"].values()) + sum(data["sampled_out"].values())
    assert data["captured"] == len(list(ends.iter_dumps()))
    assert all(payload.load(path).record.seq_len == 50 for path in ends.iter_dumps())
