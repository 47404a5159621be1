"""Fixtures of replays: no launcher around, a folder of their own, and scripted workers (`fake_worker`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from roots import SUPPORT
from supervised import Bench

from actordbg.store.layout import Store


@pytest.fixture
def bench(store: Store, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs scripted replays in a store; its workers can import the script's reader."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    return Bench(store)


@pytest.fixture(autouse=True)
def no_surrounding_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
