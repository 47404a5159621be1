"""Capture across processes: forks, many writers, the end of a process, and what never gets into a file."""

import subprocess
import sys

import pytest
from amounts import amount
from deathcases import closed, counters, switch
from roots import SUPPORT, environment

from actordbg.capture.writer import EXIT_SECONDS
from actordbg.dumps.recover import find_rings

pytestmark = pytest.mark.forked

HEAD = """
import os, sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from capturekit import SignatureH, ids
from actordbg.capture import hook
class Actor(SignatureH):
    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False):
        return sequences
assert hook.install(Actor, store={store!r})
"""


def start(store, body):
    """A training process: an Actor with the hook installed as the trailer does it, then `body`."""
    code = HEAD.format(tests=str(SUPPORT), store=str(store.root)) + body
    around = environment(FORKED_PROGRAM="-c")
    return subprocess.Popen([sys.executable, "-c", code], env=around, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, timeout=90):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


def test_the_end_waits_at_most_five_seconds_for_a_stuck_disk(store):
    """The disk never wakes, so the process ends only if it stops waiting; for how long it would wait is what it asks for."""
    switch(store)
    body = """
import threading
from actordbg.formats.store_files import StoreFiles
StoreFiles.publish_dump = lambda self, record, blob: threading.Event().wait()
join = threading.Thread.join
def told(self, timeout=None):
    print(self.name, timeout, flush=True)
    join(self, timeout)
threading.Thread.join = told
Actor()(ids())
"""
    told = [line.split() for line in finish(start(store, body)).splitlines()]
    waits = [float(timeout) for name, timeout in told if name == "actordbg-writer"]
    assert waits and round(sum(waits), 3) <= EXIT_SECONDS == 5


def test_forks_while_the_queue_is_busy(store):
    """Sixteen; in `make whole` two hundred."""
    switch(store)
    body = """
import threading
actor, stop = Actor(), threading.Event()
def busy():
    while not stop.is_set():
        actor(ids(4, 300))
        time.sleep(0.002)
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads: thread.start()
slot = hook._slots[ROOT]
while slot.recorder.watcher.current is None or slot.recorder.ring is None: time.sleep(0.01)
mine = slot.recorder.ring.path
held, made = mine.stat().st_ino, set()
def child():
    (parent,) = slot._left_to_parent
    assert parent.ring._descriptor is None and parent.ring.path == mine
    parent.ring.open = parent.ring.leave = parent.ring.commit = parent.ring._lock = None  # whoever touches it now fails
    for _ in range(3): actor(ids(1, 7))
    assert slot.recorder.faults == 0 and slot.recorder.ring.path != mine
    return slot.recorder.close(20) and not slot.recorder.ring.path.exists()
children = {}
for n in range(FORKS):
    pid = os.fork()
    if pid == 0:
        code = 3
        try: code = 0 if child() else 4
        finally: os._exit(code)
    children[pid] = time.monotonic() + 60
    while len(children) > (3 if n < FORKS - 1 else 0):
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del children[pid]
                assert status == 0, status
            elif time.monotonic() > children[pid]:
                os.kill(pid, 9)
                sys.exit("a child hangs")
        time.sleep(0.002)
assert mine.stat().st_ino == held
stop.set()
for thread in threads: thread.join()
assert slot.recorder.close(100)
"""
    forks = amount(16, 200)
    body = body.replace("ROOT", repr(str(store.root))).replace("FORKS", str(forks))
    finish(start(store, body), timeout=240)
    books = [*counters(store).values()]
    children = [data for data in books if data["calls"] == data["captured"] == 3]
    assert len(books) == forks + 1 and len(children) == forks
    assert all(data["pending"] == 0 and data["calls"] == closed(data) for data in books)
    assert sum(data["captured"] for data in books) == len(list(store.iter_dumps()))
    by_pid = {}
    for path in store.iter_dumps():
        pid = int(path.name.split("-")[2])
        by_pid[pid] = by_pid.get(pid, 0) + 1
    assert by_pid == {data["pid"]: data["captured"] for data in books}  # nothing of the parent's is written twice
    assert not find_rings(store)


def test_a_fork_inside_forward_leaves_the_call_to_the_parent(store):
    switch(store, with_outputs=True)
    body = """
class Forking(SignatureH):
    def forward(self, sequences):
        self.pid = os.fork()
        return sequences
hook.install(Forking, store=sys.argv[0])
actor = Forking()
actor(ids())
if actor.pid == 0:
    os._exit(0 if hook._slots[ROOT].recorder.close() else 3)
assert os.waitpid(actor.pid, 0)[1] == 0
"""
    body = body.replace("sys.argv[0]", "ROOT").replace("ROOT", repr(str(store.root)))
    finish(start(store, body))
    assert len(list(store.iter_dumps())) == 1


def test_children_of_multiprocessing_flush_at_their_end(store):
    switch(store)
    body = """
import multiprocessing
def work():
    actor = Actor()
    for n in range(40): actor(ids(4, 500, n))
child = multiprocessing.get_context("fork").Process(target=work)
child.start(); child.join(30)
assert child.exitcode == 0
"""
    finish(start(store, body))
    (data,) = counters(store).values()
    assert data["captured"] == 40 == len(list(store.iter_dumps()))
    assert data["state"] == "ended"
