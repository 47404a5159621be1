"""A matrix over scripted workers: what is shared, what a bad cell costs, resuming after any end, baselines, what is shown."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from matrixcases import FOUR, Bench, in_cell
from replaycases import PlannedRow
from roots import SUPPORT
from typer.testing import CliRunner

from actordbg.base.errors import Conflict, MachineFault, UsageError
from actordbg.base.processes import session_members
from actordbg.campaign import run_matrix as matrices
from actordbg.campaign.cell_outcomes import Baseline, context_of, regressions, require_common
from actordbg.campaign.matrix_document import MatrixContext, matrix_document
from actordbg.campaign.run_matrix import MatrixEvent, open_baseline
from actordbg.campaign.runner import claimed
from actordbg.cli.app import app
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.blocks import PART_TONE, Banner
from actordbg.document.page import as_html
from actordbg.document.renderings import as_markdown, as_text
from actordbg.records.journal import read_events, read_results
from actordbg.records.matrix_record import MatrixRecord
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store


@pytest.fixture
def bench(store: Store, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    return Bench(store)


def statuses(record: MatrixRecord) -> list[str]:
    return [cell.status for cell in record.cells]


def shown(record: MatrixRecord) -> str:
    return as_text(matrix_document(record, MatrixContext()))


def banner_of(record: MatrixRecord) -> tuple[str, str]:
    return next((one.word, one.tone) for one in matrix_document(record, MatrixContext()) if isinstance(one, Banner))


def test_cells_that_can_share_load_once_and_each_is_a_replay_of_its_own(bench: Bench) -> None:
    record = bench.run(bench.new(FOUR))
    assert statuses(record) == ["passed"] * 4 and record.status == "complete" and record.good
    assert record.loads == 1 and len(bench.sessions) == 1
    assert [(cell.loads, cell.load_s, cell.shared_with) for cell in record.cells] == [
        (1, 1.0, None),
        *[(0, 0.0, 0)] * 3,
    ]
    for cell in record.cells:
        spec = load_spec(bench.store, str(cell.replay_id))
        assert spec.config.attn == cell.settings["attn"] and spec.config.packing == cell.settings["packing"]
        assert len(read_results(bench.store.replays / spec.replay_id)) == 3
        last = read_events(bench.store.replays / spec.replay_id / "supervisor.jsonl")[-1]
        assert last["status"] == "complete"
    assert bench.left_running() == []
    assert matrices.load(bench.store, "last") == record
    assert "1 Actor built in 1.00 s for 4 cells" in shown(record) and "as 0" in shown(record)
    again = bench.run(record)
    assert replace(again, finished_at="") == replace(record, finished_at="") and len(bench.sessions) == 1


def test_who_shares_and_which_replay_is_gone_is_said(bench: Bench) -> None:
    record = bench.run(bench.new({"attn": "sdpa", "compile": "off", "packing": "both"}))
    assert "cell 0, not packed: 1.00 s; shared by cell 1" in shown(record)
    resumed = replace(record, cells=(record.cells[0], replace(record.cells[1], loads=1, load_s=2.0)), loads=2)
    assert "shared by" not in shown(resumed) and "2 Actors built in 3.00 s for 2 cells" in shown(resumed)
    first, second = (str(cell.replay_id) for cell in record.cells)
    shutil.rmtree(bench.store.replays / second)
    text = " ".join(as_text(matrix_document(record, context_of(bench.store, record))).split())
    assert f"0: {first}, 1: {second} (gone)" in text


@pytest.mark.parametrize(("action", "status", "signature"), [("kill", "crashed", "killed"), ("fail", "failed", "shape-mismatch")])
def test_a_bad_cell_does_not_harm_its_neighbours(bench: Bench, action: str, status: str, signature: str) -> None:
    record = bench.run(bench.new(FOUR), in_cell("sdpa", True, {"d1": action}))
    assert statuses(record) == ["passed", "failed", "passed", "passed"] and not record.good
    bad = record.cells[1]
    assert bad.counts == {"passed": 2, status: 1} and bad.signature == signature
    assert bad.log and (bench.store.root / bad.log).is_file() and bad.error
    crashed = status == "crashed"
    assert record.loads == 1 + crashed and [cell.shared_with for cell in record.cells[2:]] == [int(crashed)] * 2
    assert bench.left_running() == []
    text = shown(record)
    assert "failed 1/3" in text and f"cell 1, sdpa, packed: {signature}" in text and str(bad.log) in text


def test_a_full_disk_ends_the_matrix_and_its_cell_is_run_again(bench: Bench) -> None:
    record, events, script = bench.new(FOUR), list[MatrixEvent](), in_cell("sdpa", True, {"d1": "full"})
    with pytest.raises(MachineFault, match="No space left on device") as caught:
        bench.run(record, script, on_event=events.append)
    assert caught.value.hint == f"fix that, then `actordbg matrix --resume {record.matrix_id}` goes on"
    left = matrices.load(bench.store, record.matrix_id)
    assert (left.status, statuses(left)) == ("failed", ["passed", "not run", "not run", "not run"]) and bench.left_running() == []
    (bench.store.root / "room").touch()
    assert statuses(bench.run(left, script)) == ["passed"] * 4


def test_an_actor_that_cannot_be_built_is_a_failed_cell_and_the_rest_goes_on(bench: Bench) -> None:
    def script(config: ReplayConfig) -> dict[str, Any]:
        return {"open": "fail"} if config.dtype == "bf16" else {}

    record = bench.run(bench.new({"dtype": "bf16,fp32", "attn": "sdpa"}, inputs=1), script)
    assert statuses(record) == ["failed", "passed"]
    assert record.cells[0].signature == "shape-mismatch" and record.cells[0].counts == {"not run": 1}
    assert "rank0.log" in str(record.cells[0].log)


def test_cells_that_call_for_other_ranks_than_were_captured_are_said_so_and_the_rest_goes_on(bench: Bench) -> None:
    """Three dumps of rank 0 alone, so two processes have no whole call; then two calls, of which one lacks a rank."""
    record = bench.run(bench.new({"nproc": "1,2", "attn": "sdpa"}, align="rank"))
    assert statuses(record) == ["passed", "unavailable"] and record.status == "complete"
    assert "no call is whole for 2 processes" in record.cells[1].reason and "way out: select all" in record.cells[1].reason
    rows = [
        PlannedRow(name, f"dumps/{name}", rank=rank, call_index=call)
        for name, rank, call in (("d0", 0, 0), ("d1", 1, 0), ("d2", 0, 1))
    ]
    bench.rows = lambda inputs: rows[:inputs]  # type: ignore[method-assign]
    record = bench.run(bench.new({"nproc": "1,2", "attn": "sdpa"}, align="rank"))
    assert statuses(record) == ["passed"] * 2
    assert [cell.reason for cell in record.cells] == ["", "1 of 3 dumps left out: not of a whole call"]
    assert "cell 1: 1 of 3 dumps left out" in shown(record)


def test_a_cell_whose_ranks_differ_where_they_were_to_do_the_same_has_failed(bench: Bench) -> None:
    script = in_cell("sdpa", True, {"d1": "differ"})
    record = bench.run(bench.new({"packing": "both", "attn": "sdpa"}, align="same", nproc=2), script)
    assert statuses(record) == ["passed", "failed"] and not record.good
    bad = record.cells[1]
    assert (bad.signature, bad.counts) == ("ranks-differ", {"passed": 3})
    assert (bad.error or "").startswith("on 1 of 3 inputs; d1: rank 1 has other log-probs than rank 0")
    assert "cell 1, packed: ranks-differ" in shown(record) and "0/3" not in shown(record)
    assert bench.log_of(bad) is not None


def test_nothing_is_started_for_what_is_unavailable(bench: Bench) -> None:
    record = bench.run(bench.new({"attn": "flash_attention_2", "compile": "off"}))
    assert statuses(record) == ["unavailable"] * 2 and bench.sessions == []
    assert not list(bench.store.replays.glob("*")) and all(cell.replay_id is None for cell in record.cells)
    assert not record.good, "a table in which nothing ran is no good answer"
    assert "cells 0, 1: flash_attention_2 was asked for" in shown(record)


class TestGoingOn:
    def interrupted(self, bench: Bench) -> MatrixRecord:
        """Stopped by a Ctrl-C after the first input of the second cell."""

        def interrupt(event: MatrixEvent) -> None:
            if event.kind == "input" and event.cell.index == 1:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            bench.run(bench.new(FOUR), lambda config: {"takes": 0.2}, on_event=interrupt)
        return matrices.load(bench.store, "last")

    def test_ctrl_c_keeps_what_is_done_ends_every_process_and_resume_does_the_rest(self, bench: Bench) -> None:
        before = self.interrupted(bench)
        assert bench.left_running() == [] and before.status == "interrupted"
        assert statuses(before) == ["passed", "not run", "not run", "not run"] and "unfinished" in shown(before)
        begun = read_results(bench.store.replays / str(before.cells[1].replay_id))
        after = bench.run(before)
        assert statuses(after) == ["passed"] * 4 and after.status == "complete"
        assert [cell.replay_id for cell in after.cells[:2]] == [cell.replay_id for cell in before.cells[:2]]
        ended = read_results(bench.store.replays / str(after.cells[1].replay_id))
        assert all(ended[dump_id] == result for dump_id, result in begun.items()) and len(ended) == 3
        assert after.cells[0] == before.cells[0] and after.loads == 2

    @pytest.mark.slow
    def test_a_killed_matrix_leaves_nothing_running_and_goes_on(self, bench: Bench) -> None:
        record = bench.new(FOUR)
        child = os.fork()
        if child == 0:
            bench.run(record, lambda config: {"takes": 0.3})
            os._exit(0)
        deadline = time.monotonic() + 60
        while not matrices.names(bench.store) or statuses(matrices.load(bench.store, "last"))[1] != "passed":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # inside of the third cell
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed = matrices.load(bench.store, record.matrix_id)
        assert killed.status == "running" and statuses(killed)[3] == "not run"
        boot = read_events(bench.store.replays / str(killed.cells[0].replay_id) / "rank0.jsonl")[0]
        while session_members(boot["pid"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        after = bench.run(killed)
        assert statuses(after) == ["passed"] * 4
        assert after.cells[:2] == killed.cells[:2]

    def test_a_matrix_that_another_process_runs_is_refused(self, bench: Bench) -> None:
        record = claimed(bench.new(FOUR), "matrix m")
        pid, ticks = record.options["runner"]
        child = os.fork()
        if child == 0:
            try:
                claimed(record, "matrix m")
            except Conflict as problem:
                os._exit(7 if str(pid) in problem.message else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert claimed(replace(record, options={"runner": [pid, ticks + 1]}), "m").status == "running"


class TestBaseline:
    @pytest.mark.parametrize("whole", [True, False])
    def test_a_dump_that_passed_there_and_fails_here_is_a_regression(self, bench: Bench, whole: bool) -> None:
        """A matrix is a baseline cell by cell, one replay for all cells."""
        first = bench.run(bench.new(FOUR if whole else {"attn": "sdpa", "compile": "off", "packing": "off"}))
        held = open_baseline(bench.store, first.matrix_id if whole else str(first.cells[0].replay_id), None)
        record = bench.run(bench.new(FOUR, baseline=held), in_cell("eager", False, {"d2": "fail"}), held)
        assert [bool(cell.regressed) for cell in record.cells] == [False, False, True, False]
        assert "passed in the baseline, not here: d2" in record.cells[2].regressed[0] and not record.good
        assert "REGRESSED" in shown(record)

    def test_slower_counts_where_a_factor_is_given(self, bench: Bench) -> None:
        one = {"attn": "sdpa", "compile": "off", "packing": "off"}
        first = bench.run(bench.new(one))
        for factor, good in ((3.0, True), (1.5, False)):
            held = Baseline(replay_id=first.cells[0].replay_id, slower=factor)
            record = bench.run(bench.new(one, baseline=held), lambda config: {"forward_s": 0.02}, held)
            assert record.good is good
        assert "the forward takes 2.00 times as long" in record.cells[0].regressed[0]

    def test_a_cell_that_ran_there_and_cannot_run_here_has_regressed(self, bench: Bench) -> None:
        record = bench.new({"attn": "flash_attention_2", "compile": "off", "packing": "off"})
        there = replace(record, cells=(replace(record.cells[0], status="passed", reason="", replay_id="r"),))
        held = Baseline(matrix=there)
        after = bench.run(replace(record, baseline="m"), baseline=held)
        assert "is unavailable here" in after.cells[0].regressed[0]

    def test_a_baseline_with_nothing_in_common_is_refused(self, bench: Bench) -> None:
        first = bench.run(bench.new(FOUR, inputs=1))
        held = open_baseline(bench.store, "last", None)
        require_common(bench.store, held, first.cells, first.dump_ids)
        with pytest.raises(UsageError, match="has passed none of these dumps"):
            require_common(bench.store, held, first.cells, ["another"])
        other = bench.new({"attn": "sdpa,eager"}, inputs=1, num_layers=1)
        with pytest.raises(UsageError, match="no cell in common"):
            require_common(bench.store, Baseline(matrix=first), other.cells, first.dump_ids)
        with pytest.raises(UsageError, match="neither a replay nor a matrix"):
            open_baseline(bench.store, "nonsense", None)


def test_a_matrix_with_cells_that_must_still_run_is_not_good_and_its_page_not_green(bench: Bench) -> None:
    """As a kill leaves it: what ran was judged and is right."""
    done = bench.run(bench.new(FOUR, inputs=1))
    right = tuple(replace(cell, verdict="match", laws="asked") for cell in done.cells)
    left = replace(done, status="running", cells=(*right[:3], replace(right[3], status="not run", verdict=None)))
    assert replace(done, cells=right).good and not left.good
    assert "3 passed, 1 unfinished. The matrix is running, or was killed." in shown(left)
    assert banner_of(left) == ("NOT COMPLETE", PART_TONE)
    skipped = replace(left, cells=(*right[:3], replace(right[3], status="not run", verdict=None, reason="known to fail")))
    assert skipped.good, "what is not to be run is not left over"


def test_a_cell_that_fails_and_did_not_run_in_the_baseline_has_regressed(bench: Bench) -> None:
    record = bench.run(
        bench.new({"attn": "sdpa,eager"}, inputs=1), lambda config: {"d0": "fail"} if config.attn == "eager" else {}
    )
    assert statuses(record) == ["passed", "failed"]
    fewer = Baseline(matrix=replace(record, matrix_id="before", cells=record.cells[:1]))
    (found,) = regressions(bench.store, record.cells[1], fewer)
    assert found == "it failed, and did not run in the baseline"
    assert regressions(bench.store, record.cells[1], Baseline(matrix=record)) == (), "what failed there may fail here"
    assert replace(record, baseline="before").good and not record.good


def test_a_cell_with_wrong_numbers_is_wrong_and_one_that_could_not_be_compared_neither_wrong_nor_good(bench: Bench) -> None:
    record = bench.run(bench.new(FOUR, inputs=1))
    wrong = replace(record, cells=(replace(record.cells[0], verdict="mismatch", max_abs=0.5, reason="off"), *record.cells[1:]))
    assert wrong.cells[0].wrong and not wrong.good
    assert "3 passed, 1 WRONG" in shown(wrong) and "cell 0, sdpa, not packed: off" in shown(wrong)
    right = replace(record, cells=tuple(replace(cell, verdict="within-noise", laws="asked") for cell in record.cells))
    assert right.good and "WRONG" not in shown(right)
    left = replace(right, cells=(replace(record.cells[0], verdict="not-compared", reason="no truth: dropout"), *right.cells[1:]))
    assert left.cells[0].unjudged and not left.cells[0].wrong and not left.good
    text = shown(left)
    assert "3 passed, 1 NOT JUDGED" in text and "cell 0: no truth: dropout" in text and "WRONG" not in text
    page = as_html(matrix_document(left, MatrixContext()))
    assert ">NOT JUDGED</strong>" in page and "WRONG" not in page and 'class="cell none"' in page
    broken = replace(left.cells[0], violations=("future broken: row 1 sees later tokens",))
    assert broken.wrong and not broken.unjudged, "a broken law is wrong, compared or not"


def test_a_cell_that_was_never_compared_and_one_whose_laws_raised_have_not_passed(bench: Bench) -> None:
    """An interruption came between the replays and their comparison."""
    raised = {"law": "rerun", "verdict": "not-checked", "words": "RuntimeError: no kernel", "raised": True}
    left = [{"law": "future", "verdict": "not-checked", "words": "rerun failed"}]
    done = bench.run(bench.new(FOUR, inputs=1), in_cell("eager", True, {"laws": [raised, *left]}))
    interrupted = replace(done, status="interrupted", options=done.options | {"oracle": "fp32"})
    bench.store.publish_text(matrices.path_of(bench.store, interrupted.matrix_id), interrupted.to_json())
    said = " ".join(CliRunner().invoke(app, ["--store", str(bench.store.root), "matrix", "--show", "last"]).stdout.split())
    assert ": 3 not compared, 1 failed;" in said, said
    assert "law-failed (1 passed)" in said and "first cause: rerun failed: RuntimeError: no kernel in d0" in said
    others = replace(interrupted, cells=tuple(replace(cell, laws="asked") for cell in done.cells[:3]))
    assert banner_of(others) == ("NOT COMPLETE", PART_TONE) and not others.good


def test_a_table_fits_eighty_columns_whatever_its_axes(bench: Bench) -> None:
    axes = ("attn=sdpa,eager", "packing=both", "compile=both", "backend=plain,deepspeed", "zero_stage=0,3", "dtype=fp32,bf16")
    for given in (dict(axis.split("=") for axis in axes), {}):
        assert max(len(line) for line in shown(bench.new(given)).splitlines()) <= 80


def test_each_cell_has_a_log_under_its_name_and_markdown_links_it(bench: Bench) -> None:
    record = bench.run(bench.new({"attn": "sdpa,eager", "packing": "both"}, inputs=1), in_cell("sdpa", True, {"d0": "fail"}))
    folder = bench.store.reports / record.matrix_id / "logs"
    assert sorted(path.name for path in folder.iterdir()) == [
        "eager-not-packed.log", "eager-packed.log", "sdpa-not-packed.log", "sdpa-packed.log"
    ]  # fmt: skip
    assert f"replay {record.cells[0].replay_id}" in (folder / "sdpa-not-packed.log").read_text()
    context = context_of(bench.store, record)
    text = as_markdown(matrix_document(record, context))
    assert "| 1 | sdpa | on | failed 1/1 |" in text and not re.search(r"#\d", text), "nothing becomes a link to an issue"
    row = next(line for line in text.splitlines() if line.startswith("| 0 "))
    link = re.search(r"\[log\]\(([^)]+)\) \|$", row)
    assert link and Path(unquote(link[1])).samefile(folder / "sdpa-not-packed.log")
    assert "sdpa-packed.log" in as_text(matrix_document(record, context))
