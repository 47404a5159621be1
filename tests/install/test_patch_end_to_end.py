"""A patched file, the real hook, a process that knows nothing of actordbg: the calls arrive in the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import actordbg
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.install import patch_state as history
from actordbg.install import patching as operate
from actordbg.install.patch_target import find_target
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

ACTOR = """
import torch

class Actor(torch.nn.Module):
    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False):
        return sequences * 2
"""
JOB = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from actor import Actor
sequences = torch.arange(6).reshape(2, 3)
assert torch.equal(Actor()(sequences, attention_mask=torch.ones_like(sequences)), sequences * 2)
"""


def _train(folder: Path) -> None:
    """One forward call in a new process that starts in another folder, as a Ray worker does."""
    done = subprocess.run([sys.executable, "-c", JOB, str(folder)], cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "not capturing" not in done.stderr


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(actordbg.__file__).parents[1]))
    for name in ("ACTORDBG_STORE", "ACTORDBG_DISABLE", "ACTORDBG_RUN"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "job" / "actor.py"
    path.parent.mkdir()
    path.write_text(ACTOR)
    return path


def test_a_patched_actor_records_its_calls_and_an_unpatched_one_does_not(actor: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "it's the store").create()
    write_control(store, Control(enabled=True, run="run", since=history.now(), free_floor_bytes=0))
    target = find_target(target=actor)
    operate.patch(target, store)
    _train(actor.parent)
    assert len(list(store.iter_dumps())) == 1
    operate.unpatch(target, store)
    assert actor.read_text() == ACTOR
    _train(actor.parent)
    assert len(list(store.iter_dumps())) == 1
