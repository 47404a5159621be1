"""Fixtures of the replays whose workers are scripted (`fake_worker`)."""

from __future__ import annotations

import os

import pytest
from roots import SUPPORT
from supervised import Bench

from actordbg.store.layout import Store


@pytest.fixture
def bench(store: Store, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs scripted replays in a store; its workers can import the script's reader."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    return Bench(store)
