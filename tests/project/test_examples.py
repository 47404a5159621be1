"""The store to play with is made by its program, and the tour through it does what its page shows."""

import subprocess
import sys

import docpages
import pytest
from reportcases import given, replay, result
from roots import ROOT, run_program

from actordbg.catalog.query import select_dumps
from actordbg.judge.exports import render_csv
from actordbg.store.layout import Store

MAKE = ROOT / "examples" / "make_store.py"


@pytest.mark.forked
def test_the_tour_does_what_its_page_shows(tmp_path):
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


def test_a_folder_that_it_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    done = run_program([sys.executable, MAKE, str(tmp_path)])
    assert done.returncode == 1 and "name another folder" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_what_fits_finds_the_law_and_refuses_to_look_too_far(tmp_path):
    """1 GB and 100 bytes for n^2; the second input of a length is smaller, and one of 4,096 ran out of memory."""
    lengths = [64, 128, 256, 512, 1024, 2048]
    every = [*lengths, *lengths, 4096]
    results = [result(index, peak_memory_bytes=int(1e9 + 100 * n * n) - (index > 5)) for index, n in enumerate(every[:-1])]
    unknown = dict.fromkeys(("forward_s", "backward_s", "peak_memory_bytes"))
    results += [result(12, status="failed", signature="cuda-out-of-memory", **unknown)]
    (tmp_path / "all.csv").write_text(render_csv([replay([given(i, n) for i, n in enumerate(every)], results)]))
    (tmp_path / "some.csv").write_text(render_csv([replay([given(i, n) for i, n in enumerate(every[:-1])], results[:-1])]))

    def said(*words):
        done = run_program([sys.executable, ROOT / "examples" / "what_fits.py", *words], cwd=tmp_path)
        return done.stdout + done.stderr

    text = said("all.csv", "--budget", "1.25e9", "--at", "3000", "--at", "5000")
    assert "1e+09 + 100 n^2 bytes" in text and "longest that fits: 1581\n" in text
    assert "3,000  1.9e+09 to 1.9e+09 bytes" in text and "5,000  ran out of memory" in text
    assert "longest that fits: 4095\n" in said("all.csv", "--budget", "1e12")
    text = said("some.csv", "--budget", "1e12", "--at", "5000", "--at", "9000")
    assert (
        "longest that fits: 8192 or more" in text
        and "5,000  3.5e+09 to 3.5e+09 bytes; a guess" in text
        and "9,000  refused" in text
    )
    (tmp_path / "other.csv").write_text("step,loss\n1,2\n")
    for name in ("missing.csv", "other.csv"):
        text = said(name)
        assert f"REPLAY -o FILE.csv` wrote: {name}" in text and "Traceback" not in text
