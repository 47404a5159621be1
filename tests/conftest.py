"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from actordbg.store import Store

SHARED_DUMPS = Path(__file__).resolve().parents[2] / "shared" / "data" / "input_dumps"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new, empty store."""
    return Store(tmp_path / "store").create()


@pytest.fixture(scope="session")
def shared_dumps() -> Path:
    """The folder of real training pickles beside the checkout; tests that need it are skipped where it is absent."""
    if not SHARED_DUMPS.is_dir():
        pytest.skip("the real training dumps (../shared/data/input_dumps) are not on this machine")
    return SHARED_DUMPS
