"""The store to play with is made by its program, and the tour through it does what its page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import docpages
import pytest
from roots import ROOT

from actordbg.catalog.query import select_dumps
from actordbg.store.layout import Store

MAKE = ROOT / "examples" / "make_store.py"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_the_tour_does_what_its_page_shows(tmp_path: Path):
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run([sys.executable, MAKE, "examples/store"], cwd=work, check=True, capture_output=True)
    store = Store(work / "examples" / "store")
    dumps = select_dumps(store)
    assert {dump.rank for dump in dumps} == {0, 1} and len({dump.seq_len for dump in dumps}) == 10
    assert [dump.triggered for dump in dumps if dump.triggered] == ["nan"]
    assert all(dump.with_outputs for dump in dumps)
    assert len(list(store.replays.iterdir())) == 2 and len(list(store.root.glob("comparisons/*.json"))) == 1

    tour = [block for block in docpages.blocks(ROOT / "examples" / "README.md") if block.mode == "run"]
    assert 6 <= sum(len(block.commands) for block in tour) <= 10
    docpages.run_blocks(tour, work, ACTORDBG_STORE="examples/store")


def test_a_folder_that_it_did_not_make_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").write_text("precious")
    done = subprocess.run([sys.executable, MAKE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "name another folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
