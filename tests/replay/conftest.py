"""Fixtures of replays: no launcher around, a folder of their own, and scripted workers (`fake_worker`)."""

import os

import pytest
from roots import SUPPORT
from supervised import Bench


@pytest.fixture
def bench(store):
    """Runs scripted replays in a store."""
    return Bench(store)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """No launcher around, an empty folder, and workers that can import the script's reader."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
