"""Fixtures of replays: a folder of their own, and scripted workers (`fake_worker`)."""

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
    """An empty folder, and workers that can import the script's reader."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
