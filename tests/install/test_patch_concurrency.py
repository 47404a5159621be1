"""Sixteen processes patch and unpatch one file at once, and a reader never sees anything but the two states."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patchkit import ACTOR, OLD, facts_of, written

import actordbg
from actordbg.install import patching as history
from actordbg.install import trailer
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

PROCESSES, ROUNDS = 16, 2
WORKER = """
import sys
from actordbg.install import patching as operate
from actordbg.install.patch_target import Target
from actordbg.store.layout import Store
from pathlib import Path
target = Target(Path(sys.argv[1]), Path(sys.argv[1]), sys.executable, None)
operate.require_hook = lambda python: "0"   # that the hook imports is another test's matter, and takes seconds
for _ in range(int(sys.argv[3])):
    for action in (operate.patch, operate.unpatch):
        print(action(target, Store(sys.argv[2])).action, flush=True)
"""


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    return written(tmp_path / "models" / "actor.py")


def _start(actor: Path, store: Store, rounds: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(actordbg.__file__).parents[1])}
    command = [sys.executable, "-c", WORKER, str(actor), str(store.root), str(rounds)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_sixteen_processes_never_leave_a_third_state(actor: Path, store):
    patched = trailer.append(ACTOR, str(store.root), mtime_ns=OLD)
    workers = [_start(actor, store, ROUNDS) for _ in range(PROCESSES)]
    seen: set[bytes] = set()
    while any(worker.poll() is None for worker in workers):
        seen.add(actor.read_bytes())
        time.sleep(0.001)
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err
        assert len(out.split("\n")) == 2 * ROUNDS + 1
    assert seen <= {ACTOR, patched}
    assert facts_of(actor) == (ACTOR, 0o640, os.getuid(), OLD)
    assert os.listdir(actor.parent) == ["actor.py"]
    names = [event.event for event in history.events(store)]
    assert names == ["patch", "unpatch"] * (len(names) // 2), "the events tell the same story, in order"
