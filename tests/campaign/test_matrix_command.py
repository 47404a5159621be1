"""`actordbg matrix` as typed, over scripted workers, and a real one: shared cells give, bit for bit, what fresh processes
give."""

import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import commandline
import pytest
from amounts import first_or_all
from casefiles import json_cases
from matrixcases import FOUR, Bench, in_cell
from replaycases import PlannedRow, publish
from roots import SUPPORT, json_of
from safetensors.torch import load_file, save_file

from actordbg.base.errors import ActordbgError, Conflict, MachineFault, UsageError
from actordbg.base.units import new_replay_id
from actordbg.campaign import run_matrix as matrices
from actordbg.campaign.cell_outcomes import context_of, regressions, require_common
from actordbg.campaign.matrix_document import MatrixContext, matrix_document
from actordbg.campaign.runner import claimed
from actordbg.document.blocks import verdict_in
from actordbg.document.page import as_html
from actordbg.document.renderings import as_markdown, as_text
from actordbg.records.journal import read_events, read_results
from actordbg.replay.supervise import load_spec, run_replay
from actordbg.store.layout import Store


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def invoke(store, typed, *more):
    return commandline.invoke(store, "matrix", *typed.split(), *more)


def test_the_plan_says_what_is_unavailable_and_what_shares_a_load(store):
    publish(store, 2)
    asked = "--dry-run --attn flash_attention_2,sdpa --packing both"
    said = invoke(store, asked).stdout
    assert "4 cells on 2 dumps" in said and "#0 flash, not packed: unavailable (flash_attention_2 was requested" in said
    assert "#3 sdpa, packed: to be run" in said and "load 1: #2, #3" in said
    plan = json_of(invoke(store, asked, "--json"))
    assert (plan["dumps"], len(plan["cells"]), plan["loads"]) == (2, 4, [[2, 3]])


def test_below_a_launcher_one_process_runs_it_with_as_many_workers(store, monkeypatch):
    """Nothing can run: the exit code is 1, the table says why; and it cannot continue when its dump is gone."""
    publish(store, 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert invoke(store, "--dry-run").stdout == ""
    monkeypatch.setenv("RANK", "0")
    done = invoke(store, "--attn flash_attention_2 --packing off --compile off")
    assert done.exit_code == 1 and not store.replays.exists()
    assert "1 cell on 1 dump: 1 unavailable" in done.stdout and "try: --attn sdpa" in done.stdout
    assert [cell.config["nproc"] for cell in matrices.load(store, "last").cells] == [2]
    again = invoke(store, "--show last --format md")
    assert again.exit_code == 1 and "| # | combination | result |" in again.stdout
    for path in store.iter_dumps():
        path.unlink()
    with pytest.raises(ActordbgError, match=r"no dump|gone"):
        invoke(store, "--resume last")


def figures(record):
    return record.status, record.output_digest, record.loss, record.grad_norm, record.entropy_mean


@pytest.mark.forked
class TestARealOne:
    """Four cells on one loaded Actor: sdpa and eager, compiled or not, packed, with backward."""

    GIVEN = "--attn sdpa,eager --compile off,on --compile-backend eager --packing on --backward --no-laws --json"

    @pytest.fixture(scope="class")
    def store(self, tmp_path_factory):
        store = Store(tmp_path_factory.mktemp("real") / "store").create()
        publish(store, 1, length=48, arguments={"return_output": True, "return_entropy": True})
        return store

    @pytest.fixture(scope="class")
    def record(self, store):
        done = invoke(store, f"--quiet {self.GIVEN}")
        assert done.exit_code == 0, done.stderr
        answer = json_of(done)
        record = matrices.load(store, "last")
        assert answer["good"] is True and answer["matrix"]["matrix_id"] == record.matrix_id
        return record

    def test_every_cell_is_right_the_actor_was_built_once_and_each_ran_what_it_was_asked_for(self, store, record):
        assert [(cell.status, cell.verdict) for cell in record.cells] == [("passed", "match")] * 4
        assert all(cell.max_abs is not None and cell.max_abs < 1e-4 for cell in record.cells)
        assert record.loads == 1 and [cell.shared_with for cell in record.cells] == [None, 0, 0, 0]
        assert record.cells[0].load_s and record.truth_id
        for cell in record.cells:
            events = read_events(store.replays / str(cell.replay_id) / "supervisor.jsonl")
            resolved = next(event["resolved"] for event in events if event["event"] == "resolved")
            asked = ("attn", "compile", "packing")
            assert [resolved[name] for name in asked] == [cell.settings[name] for name in asked]
            graphs = [one.graphs for one in read_results(store.replays / str(cell.replay_id)).values()]
            assert graphs == [None] if not cell.settings["compile"] else sum(graphs) >= 1

    @pytest.mark.parametrize("index", first_or_all([2, 1]))
    def test_a_shared_cell_gives_what_a_fresh_process_gives(self, store, record, index):
        """2: the attention was changed after a compiled cell or before; 1: compiled after two that were not."""
        shared = record.cells[index]
        fresh = run_replay(store, replace(load_spec(store, str(shared.replay_id)), replay_id=new_replay_id()))
        assert "load_shared_with" not in fresh.resolved and fresh.resolved["load_s"] > 0
        there = read_results(store.replays / str(shared.replay_id))
        assert {one: figures(result) for one, result in there.items()} == {
            one: figures(result) for one, result in fresh.results.items()
        }
        assert [there[one].graphs for one in there] == [fresh.results[one].graphs for one in there]

    def test_against_a_baseline_with_other_numbers_a_cell_has_regressed(self, store, record):
        cell = record.cells[3]

        def against(replay_id):
            return regressions(store, cell, replace(record, cells=(replace(cell, replay_id=replay_id),)))

        first = str(record.cells[0].replay_id)
        assert regressions(store, cell, record) == () and against(first) == (), "within what compare allows"
        (found,) = against(shifted(store, first))
        assert found.startswith("numbers differ from the baseline: 20250619T0526")
        (found,) = against(shifted(store, first, temperature=0.5))
        assert found.startswith("numbers cannot be compared with the baseline: ") and "temperature" in found


def shifted(store, replay_id, temperature=1.0):
    """A copy of a replay whose log-probs are 0.5 nats higher, and were computed at another temperature, as it says."""
    spec = load_spec(store, replay_id)
    copy = replace(spec, replay_id=new_replay_id())
    shutil.copytree(store.replays / replay_id, store.replays / copy.replay_id)
    folder = store.replays / copy.replay_id
    (folder / "spec.json").write_text(copy.to_json())
    journal = folder / "rank0.jsonl"
    text = journal.read_text().replace(replay_id, copy.replay_id)
    text = re.sub(r'"output_digest":"..', '"output_digest":"__', text)
    journal.write_text(text.replace('"temperature":1.0', f'"temperature":{temperature}'))
    for path in (folder / "tensors").iterdir():
        tensors = load_file(path)
        save_file(tensors | {"log_probs": tensors["log_probs"] + 0.5}, path)
    return copy.replay_id


ONE = {"attn": "sdpa", "compile": "off", "packing": "off"}


@pytest.fixture
def bench(store, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    return Bench(store)


def statuses(record):
    return [cell.status for cell in record.cells]


def shown(record):
    return as_text(matrix_document(record, MatrixContext()))


def test_cells_that_can_share_load_once_and_each_is_a_replay_of_its_own(bench):
    record = bench.run(bench.new(FOUR))
    assert statuses(record) == ["passed"] * 4 and record.status == "complete" and record.good
    assert (record.loads, len(bench.sessions), bench.left_running()) == (1, 1, [])
    assert [(cell.loads, cell.load_s, cell.shared_with) for cell in record.cells] == [(1, 1.0, None), *[(0, 0.0, 0)] * 3]
    for cell in record.cells:
        spec = load_spec(bench.store, str(cell.replay_id))
        assert (spec.config.attn, spec.config.packing) == (cell.settings["attn"], cell.settings["packing"])
        assert len(read_results(bench.store.replays / spec.replay_id)) == 3
        assert read_events(bench.store.replays / spec.replay_id / "supervisor.jsonl")[-1]["status"] == "complete"
    assert matrices.load(bench.store, "last") == record
    again = bench.run(record)
    assert replace(again, finished_at="") == replace(record, finished_at="") and len(bench.sessions) == 1
    shutil.rmtree(bench.store.replays / str(record.cells[1].replay_id))
    text = " ".join(as_text(matrix_document(record, context_of(bench.store, record))).split())
    assert f"0: {record.cells[0].replay_id}, 1: {record.cells[1].replay_id} (gone)" in text


@pytest.mark.parametrize("action, status, signature", [("kill", "crashed", "killed"), ("fail", "failed", "shape-mismatch")])
def test_a_bad_cell_does_not_harm_its_neighbours_and_its_log_is_named(bench, action, status, signature):
    record = bench.run(bench.new(FOUR), in_cell("sdpa", True, {"d1": action}))
    assert statuses(record) == ["passed", "failed", "passed", "passed"] and not record.good
    bad, crashed = record.cells[1], status == "crashed"
    assert (bad.counts, bad.signature, bool(bad.error)) == ({"passed": 2, status: 1}, signature, True)
    assert record.loads == 1 + crashed and [cell.shared_with for cell in record.cells[2:]] == [int(crashed)] * 2
    assert bench.left_running() == []
    outside = replace(record, cells=(replace(bad, log=str(SUPPORT / "roots.py")),))
    assert context_of(bench.store, outside).logs == {}, "a record names no file outside of its replay"
    context = context_of(bench.store, record)
    text = as_text(matrix_document(record, context))
    assert f"cell 1, sdpa, packed: {signature}" in text and str(bad.log) in text
    markdown = as_markdown(matrix_document(record, context))
    assert "| 1 | sdpa | on | failed 1/3 |" in markdown and not re.search(r"#\d", markdown), "nothing becomes a link to an issue"
    assert Path(context.logs[1]).samefile(bench.store.root / str(bad.log))


def test_a_full_disk_ends_the_matrix_and_its_cell_is_run_again(bench):
    record, script = bench.new(FOUR), in_cell("sdpa", True, {"d1": "full"})
    with pytest.raises(MachineFault, match="No space left on device") as caught:
        bench.run(record, script)
    assert caught.value.hint == f"fix that, then `actordbg matrix --resume {record.matrix_id}` continues"
    left = matrices.load(bench.store, record.matrix_id)
    assert (left.status, statuses(left)) == ("failed", ["passed", "not run", "not run", "not run"]) and bench.left_running() == []
    (bench.store.root / "room").touch()
    assert statuses(bench.run(left, script)) == ["passed"] * 4


def test_an_actor_that_cannot_be_built_and_ranks_that_differ_are_failed_cells(bench):
    built = bench.new({"dtype": "bf16,fp32", "attn": "sdpa"}, inputs=1)
    record = bench.run(built, lambda config: {"open": "fail"} if config.dtype == "bf16" else {})
    assert statuses(record) == ["failed", "passed"]
    bad = record.cells[0]
    assert (bad.signature, bad.counts) == ("shape-mismatch", {"not run": 1}) and "rank0.log" in str(bad.log)
    same = bench.new({"packing": "both", "attn": "sdpa"}, align="same", nproc=2)
    record = bench.run(same, in_cell("sdpa", True, {"d1": "differ"}))
    assert statuses(record) == ["passed", "failed"] and not record.good
    bad = record.cells[1]
    assert (bad.signature, bad.counts, "0/3" in shown(record)) == ("ranks-differ", {"passed": 3}, False)
    assert (bad.error or "").startswith("on 1 of 3 inputs; d1: rank 1 has other log-probs than rank 0")
    assert (bench.store.root / str(bad.log)).is_file()


def test_cells_that_call_for_other_ranks_than_were_captured_are_said_so_and_the_rest_goes_on(bench):
    """Three dumps of rank 0 alone, so two processes have no whole call; then two calls, of which one lacks a rank."""
    record = bench.run(bench.new({"nproc": "1,2", "attn": "sdpa"}, align="rank"))
    assert statuses(record) == ["passed", "unavailable"] and record.status == "complete"
    assert "no call is complete for 2 processes" in record.cells[1].reason and "try: select all" in record.cells[1].reason
    calls = (("d0", 0, 0), ("d1", 1, 0), ("d2", 0, 1))
    rows = [PlannedRow(name, f"dumps/{name}", rank=rank, call_index=call) for name, rank, call in calls]
    bench.rows = lambda inputs: rows[:inputs]  # type: ignore[method-assign]
    record = bench.run(bench.new({"nproc": "1,2", "attn": "sdpa"}, align="rank"))
    assert [(cell.status, cell.reason) for cell in record.cells] == [
        ("passed", ""), ("passed", "1 of 3 dumps skipped: incomplete calls")
    ]  # fmt: skip
    assert "cell 1: 1 of 3 dumps skipped" in shown(record)


def test_ctrl_c_keeps_what_is_done_ends_every_process_and_resume_does_the_rest(bench):
    """Stopped after the first input of the second cell."""

    def interrupt(words, steps):
        if steps and words.startswith("#1 "):
            kept = matrices.load(bench.store, "last")  # what a killed command would leave
            assert (kept.status, statuses(kept)[:2], bool(kept.cells[1].replay_id)) == ("running", ["passed", "not run"], True)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.new(FOUR), lambda config: {"takes": 0.2}, on_progress=interrupt)
    before = matrices.load(bench.store, "last")
    assert bench.left_running() == [] and before.status == "interrupted"
    assert statuses(before) == ["passed", "not run", "not run", "not run"] and "unfinished" in shown(before)
    begun = read_results(bench.store.replays / str(before.cells[1].replay_id))
    after = bench.run(before)
    assert statuses(after) == ["passed"] * 4 and after.status == "complete"
    assert [cell.replay_id for cell in after.cells[:2]] == [cell.replay_id for cell in before.cells[:2]]
    ended = read_results(bench.store.replays / str(after.cells[1].replay_id))
    assert all(ended[dump_id] == result for dump_id, result in begun.items()) and len(ended) == 3
    assert after.cells[0] == before.cells[0] and after.loads == 2


def test_a_matrix_that_another_process_runs_is_refused(bench):
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


def test_what_got_worse_than_in_the_baseline_is_a_regression(bench):
    """A dump that failed, a forward that is slower than allowed, a cell that cannot run here."""
    held = bench.run(bench.new(FOUR))
    for slower, changed, regressed in (
        (None, {"d2": "fail"}, "passed in the baseline, not here: d2"),
        (1.5, {"forward_s": 0.02}, "forward takes 2.00x the baseline's time"),
        (3.0, {"forward_s": 0.02}, ""),
    ):
        record = bench.run(bench.new(FOUR, baseline=held, slower=slower), in_cell("eager", False, changed), held)
        assert [cell.regressed for cell in record.cells] == [(), (), (regressed,) if regressed else (), ()]
        assert record.good is not bool(regressed) and ("REGRESSED" in shown(record)) is bool(regressed)
    one = held.cells[:1]
    require_common(bench.store, held, replace(held, cells=one))
    for other, why in (
        (replace(held, dump_ids=("another",)), "has passed none of these dumps"),
        (bench.new({"attn": "sdpa,eager"}, num_layers=1), "no cell in common"),
    ):
        with pytest.raises(UsageError, match=why):
            require_common(bench.store, held, other)
    absent = replace(one[0], status="unavailable", reason="no CUDA")
    (found,) = regressions(bench.store, absent, held)
    assert found == "passed in the baseline, and is unavailable here: no CUDA"
    failed = replace(held.cells[1], status="failed")
    assert regressions(bench.store, failed, replace(held, cells=one)) == ("failed, and did not run in the baseline",)
    assert regressions(bench.store, failed, replace(held, cells=(failed,))) == (), "what failed there may fail here"
    mixed = replace(held, cells=(*one, failed))
    assert replace(mixed, baseline="before").good and not mixed.good


RIGHT = {"status": "passed", "verdict": "match", "laws": "asked", "replay_id": "r"}


@pytest.mark.parametrize("last, about, result", json_cases("matrix_verdicts"))
def test_a_matrix_is_as_good_as_its_worst_cell_and_says_so(bench, last, about, result):
    good, word, said = result
    done = replace(bench.new(FOUR), status="complete")
    cells = [replace(cell, **(RIGHT | (last if cell.index == 3 else {}))) for cell in done.cells]
    record = replace(done, **({"cells": tuple(cells)} | about))
    document = matrix_document(record, MatrixContext())
    verdict = verdict_in(document)
    assert verdict is not None and verdict.word == word and record.good is good
    assert said in " ".join(as_text(document).split()) and f">{verdict.heading}</strong>" in as_html(document)


def test_a_cell_whose_laws_raised_has_not_passed(bench):
    raised = {"law": "rerun", "verdict": "not-checked", "words": "RuntimeError: no kernel", "raised": True}
    left = [{"law": "future", "verdict": "not-checked", "words": "rerun failed"}]
    bench.run(bench.new(ONE, inputs=1), in_cell("sdpa", False, {"laws": [raised, *left]}))
    said = " ".join(invoke(bench.store, "--show last").stdout.split())
    assert "law-failed (1 passed)" in said and "cause: rerun failed: RuntimeError: no kernel in d0" in said


def test_a_table_fits_eighty_columns_whatever_its_axes(bench):
    axes = ("attn=sdpa,eager", "packing=both", "compile=both", "backend=plain,deepspeed", "zero_stage=0,3", "dtype=fp32,bf16")
    for given in (dict(axis.split("=") for axis in axes), {}):
        assert max(len(line) for line in shown(bench.new(given)).splitlines()[1:-1]) <= 80
