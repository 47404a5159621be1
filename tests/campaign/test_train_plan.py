"""A training check before and after its workers: which cells, which micro-batches, whose verdict, and the ancestor's
variables."""

import pickle
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import commandline
import pytest
import torch
from casefiles import cases_of
from matrixcases import training_check
from ownercases import give_away
from replaycases import publish
from roots import json_of

from actordbg.actor.backends.training import AdamSteps, Training
from actordbg.actor.training_checkpoints import Checkpoints
from actordbg.actor.training_session import TrainingSession
from actordbg.base.errors import Refused, StoreProblem, Unsupported, UsageError, WhereError
from actordbg.campaign.run_train_check import CHECK, folder_of, write_trainer_log
from actordbg.campaign.train_document import is_good, train_document, verdicts
from actordbg.campaign.train_engine import STEP, TrainEngine
from actordbg.campaign.train_plan import SKIPS, batch_of, configurations, log_name, name_of_cell, read_names, schedule
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, verdict_in
from actordbg.dumps.checking import check
from actordbg.records.journal import Journal, read_results
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    BROKEN,
    IMPOSSIBLE,
    NOISE,
    OPEN,
    TRAINED,
    TrainCell,
    TrainStep,
)
from actordbg.records.replay_record import ReplayInput, ReplaySpec, ResultRecord
from actordbg.store import payload

FOUR = ReplayConfig(nproc=4)


def invoke(store, typed, *more):
    return commandline.invoke(store, "train-check", *typed.split(), *more)


def steps(*figures):
    return tuple(TrainStep(number, *values) for number, values in enumerate(figures, 1))


def checked(asked, noise=0.0, dtype="fp32"):
    """A check of four steps with a baseline, noise that is `noise` away from it, and one configuration."""
    base = steps(*((6.0 - 0.1 * n, 2.0, 0.5) for n in range(4)))
    away = tuple(
        replace(one, loss=one.loss * (1 + noise), grad_norm=2.0 * (1 + noise), update_norm=0.5 * (1 + noise)) for one in base
    )
    cells = [
        TrainCell(index, role, role, ReplayConfig().to_dict(), f"{role}.log", TRAINED, steps=found)
        for index, (role, found) in enumerate(((BASELINE, base), (NOISE, away), (ASKED, asked)))
    ]
    record = training_check(cells, [], 4, Path("/logs"), dtype=dtype)
    return replace(record, check_id="20261122T080000-abcdef", status="complete", dump_ids=("a", "b"))


def test_every_cell_takes_the_same_micro_batches_in_each_step_and_accumulates_what_it_has_no_lanes_for():
    configs = configurations(FOUR, {})
    told = ", ".join(f"{one.backend} {one.nproc} {one.lanes}" for one in configs)
    assert told == "plain 1 1, deepspeed 4 4, fsdp2 4 4, fsdp2 4 2, fsdp2 4 2, fsdp2 4 1"
    assert [one.packing for one in configs if one.ring > 1] == [True, True]
    assert (batch_of(configs, 1), batch_of(configs, 3), batch_of(configs[:1], 2)) == (4, 12, 2)
    inputs = [ReplayInput(f"d{n}", f"p{n}", 0, 2, 8, 16) for n in range(3)]
    work = schedule(inputs, steps=2, batch=4)
    assert [one.path for one in work] == ["p0", "p1", "p2", "p0", "p1", "p2", "p0", "p1"]
    assert len({one.dump_id for one in work}) == 8 and work[4].dump_id == "s0002-m01-d1"
    assert [one.path for one in schedule(inputs, 1, 4, reverse=True)] == ["p0", "p2", "p1", "p0"]
    stage = ReplayConfig(backend="deepspeed", zero_stage=3)
    names = [log_name(configs[-1], configs), log_name(stage, [*configs, stage]), log_name(stage, [stage])]
    assert names == ["fsdp2_tp2_ring2_test.log", "deepspeed_zero3_test.log", "deepspeed_test.log"]


CASES = cases_of("partings")


@pytest.mark.parametrize("name", CASES)
def test_a_training_parts_at_the_first_step_and_figure_that_is_further_away_than_rounding(name):
    step, figure, value = name.replace("=", " ").split()
    base = list(checked(()).cells[0].steps)
    base[int(step) - 1] = replace(base[int(step) - 1], **{figure: float(value)})
    record, expected = checked(tuple(base)), CASES[name].expected
    parting = verdicts(record)[2].parting
    assert is_good(record) is not bool(expected) and bool(parting) is bool(expected)
    if parting is not None:
        assert (parting.step, parting.figure) == (int(step), figure)
        assert expected[0] in (parting.looks_like or "nothing")


def test_what_reordering_moves_is_no_parting_and_a_loss_that_does_not_fall_is_not_good():
    near = tuple(replace(one, loss=one.loss * 1.0003) for one in checked(()).cells[0].steps)
    for about, word in (({}, "DIVERGES"), ({"noise": 1e-4}, "agrees"), ({"dtype": "bf16"}, "agrees")):
        assert verdicts(checked(near, **about))[2].word == word
    flat = checked(steps(*[(6.0, 2.0, 0.5)] * 4))
    level = replace(flat, cells=tuple(replace(one, steps=flat.cells[2].steps) for one in flat.cells))
    assert verdicts(level)[2].word == "loss not falling" and not is_good(level)
    failed = replace(flat, cells=(*flat.cells[:2], replace(flat.cells[2], status="unavailable", steps=())))
    assert not is_good(failed), "nothing that could run is not a success"


def kept(store, record):
    """Its file in the store."""
    path = folder_of(store, record.check_id) / CHECK
    store.create().publish_text(path, record.to_json())
    return path


def test_a_training_of_nothing_but_nan_is_answered_in_every_format(store, tmp_path):
    kept(store, replace(checked((TrainStep(1, None, None, None),) * 4), log_dir=str(tmp_path)))
    told = invoke(store, "--show last --json")
    one = json_of(told)["verdicts"][2]
    assert told.exit_code == 1 and (one["word"], one["largest"]["loss"], one["parting"]["by"]) == ("DIVERGES", None, None)
    text = " ".join(invoke(store, "--show last").stdout.split())
    assert "asked: at step 1 the loss is NaN or infinite, here or in the baseline" in text and "nan nan nan step 1" in text


def test_a_step_that_is_not_finite_fails_with_its_figures_and_its_result_can_be_written(tmp_path):
    """The worker died of it: its journal takes no NaN."""
    item = ReplayInput("s0001-m01-d", "p", 0, 1, 8, 8)
    engine = TrainEngine(tmp_path, ReplaySpec("r", "2026-11-22T08:00:00Z", ReplayConfig(), (item,)), 0)
    norms = float("inf"), float("nan")
    engine._session = cast(Any, SimpleNamespace(micro_batch=lambda loaded: (2.0, 0.1), step=lambda: norms))
    engine._training, engine._done = Training(), 0
    result = ResultRecord("r", item.dump_id, **engine.run(item, cast(Any, None), recorded=True))
    assert (result.status, result.error) == ("failed", "not finite: gradient norm, update norm") and engine.tainted
    journal = Journal(tmp_path / "rank0.jsonl")
    journal.append("end", **result.to_dict())
    journal.close()
    assert read_results(tmp_path)[item.dump_id].extra[STEP]["update_norm"] is None


def verdict_of(record):
    verdict = verdict_in(train_document(record, {}))
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    "also, word, agree",
    [(IMPOSSIBLE, RIGHT, "1 of 2"), (OPEN, UNCHECKED, "1 of 2"), (BROKEN, FAILED, "1 of 2"), (TRAINED, RIGHT, "2 of 2")],
)
def test_a_page_counts_as_agreeing_only_what_was_trained_and_agrees(also, word, agree):
    sound = checked(checked(()).cells[0].steps)
    other = replace(sound.cells[2], index=3, name="ZeRO 2", status=also, steps=sound.cells[2].steps if also == TRAINED else ())
    verdict = verdict_of(replace(sound, cells=(*sound.cells, other)))
    assert (verdict.word, verdict.figures[0][1]) == (word, agree)
    *unrun, shared = [left.text for left in verdict.not_checked]
    assert unrun == [f"ZeRO 2: {also}"] * (also in (IMPOSSIBLE, OPEN)) and "actordbg check" in shared


def test_a_loss_that_nobody_knows_to_fall_is_not_green_and_the_first_sentence_says_so(store, tmp_path):
    """A rise from 10.28 to 10.43 over inputs that never came again agreed, with exit code 0."""
    rises = steps(*((10.28 + 0.05 * n, 2.0, 0.5) for n in range(4)))
    record = replace(checked(rises), batch=1, dump_ids=tuple("abcd"), log_dir=str(tmp_path))
    record = replace(record, cells=tuple(replace(one, steps=rises) for one in record.cells))
    kept(store, record)
    assert (verdicts(record)[2].word, verdicts(record)[2].falls) == ("agrees", "?")
    shown = invoke(store, "--show last --format md")
    first = "1 configuration, 4 steps, 1 micro-batch in each, over 4 inputs: 1 agrees. Whether the loss falls was not checked: no round"
    assert shown.exit_code == 1 and first in shown.stdout and "use --steps 8" in shown.stdout
    verdict = verdict_of(record)
    assert verdict.word == UNCHECKED and [left.text for left in verdict.not_checked][:-1] == [
        "whether the loss falls: too few steps, or too noisy (asked)"
    ]


@pytest.mark.parametrize("given, taken", [("--steps 5", 8), ("--max-inputs 24", 24)])
def test_as_many_inputs_are_taken_as_the_steps_take_twice(store, given, taken):
    publish(store, 30)
    told = json_of(invoke(store, f"--dry-run --json {given}"))
    assert len(told["dump_ids"]) == len(told["options"]["inputs"]) == taken


def test_sizes_of_the_ancestor_that_do_not_divide_the_processes_are_a_usage_error_that_names_them(store, monkeypatch):
    publish(store, 1)
    monkeypatch.setenv("TP_SIZE", "3")
    monkeypatch.setenv("NUM_GPUS", "4")
    with pytest.raises(UsageError, match="fsdp2, tp 3 needs groups of 3; fsdp2, tp 3, ring 2 needs groups of 6") as caught:
        invoke(store, "--dry-run")
    assert "--nproc" in str(caught.value.hint)


@pytest.mark.parametrize("at", range(1, 6))
def test_each_skip_of_the_ancestor_leaves_out_its_configuration_and_sizes_and_logs_are_taken(at):
    names = read_names({list(SKIPS)[at - 1]: "1", "RING_SIZE": "4", "LOG_DIR": "logs"}, set())
    left = [name_of_cell(config) for config in configurations(ReplayConfig(nproc=8), {}, names.skips)]
    every = ["plain", "ZeRO 2", "fsdp2", "fsdp2, tp 2", "fsdp2, ring 2", "fsdp2, tp 2, ring 2"]
    assert left == every[:at] + every[at + 1 :] and names.values == {"ring": 4, "log_dir": "logs"}


def test_the_ancestors_variables_are_taken_and_told_and_a_flag_wins(store, monkeypatch):
    publish(store, 3)
    for name, value in {"NUM_GPUS": "2", "MAX_SAMPLES": "2", "SKIP_DEEPSPEED": "1", "SKIP_COMBINED": "1", "DATASET": "x"}.items():
        monkeypatch.setenv(name, value)
    done = invoke(store, "--dry-run --json --max-inputs 3")
    told = json_of(done)
    assert [one["name"] for one in told["cells"]][2:] == ["plain", "fsdp2", "fsdp2, tp 2", "fsdp2, ring 2"]
    assert len(told["dump_ids"]) == 3 and {one["config"]["nproc"] for one in told["cells"][3:]} == {2}
    assert told["names"] == {"NUM_GPUS": "2", "SKIP_DEEPSPEED": "1", "SKIP_COMBINED": "1"}
    assert "MAX_SAMPLES has no effect: --max-inputs was given" in done.stderr and "DATASET has no effect" in done.stderr
    monkeypatch.setenv("DEBUG_DISABLE_FSDP", "1")
    done = invoke(store, "--dry-run --json")
    assert [one["name"] for one in json_of(done)["cells"]][2:] == ["plain"]
    assert "from the environment: DEBUG_DISABLE_FSDP=1" in done.stderr
    with pytest.raises(UsageError, match="DEBUG_DISABLE_FSDP is set, and --backend lists fsdp2"):
        invoke(store, "--dry-run --backend fsdp2")
    monkeypatch.setenv("MAX_LEN", "1")
    with pytest.raises(WhereError, match="unmatched"):
        invoke(store, "--dry-run --where", "rank=0) or (1=1")
    with pytest.raises(UsageError, match="NUM_GPUS='many'"):
        read_names({"NUM_GPUS": "many"}, set())
    assert not (store.root / "trainchecks").exists()


@pytest.mark.slow
def test_gradient_checkpointing_computes_layers_again_and_changes_no_figure(store, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    item, calls, forward = publish(store, 1, length=16)[0], [], LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: (calls.append(1), forward(self, x))[1])
    told = json_of(invoke(store, "--gradient-checkpointing --dry-run --json"))["training"]
    assert told["gradient_checkpointing"] is True

    def trained(checkpoints, dump):
        calls.clear()
        config, training = ReplayConfig(dtype="fp32", backward=True), Training(gradient_checkpointing=checkpoints)
        with closing(TrainingSession(config, dump.record, tmp_path, training)) as session:
            loss, _ = session.micro_batch(dump)
            return loss, session.step(), len(calls)

    dump = payload.load(store.root / item.path)
    (loss, norms, once), (again, same, twice) = trained(False, dump), trained(True, dump)
    assert (loss, norms, 2 * once) == (again, same, twice) and once > 0
    with pytest.raises(Unsupported, match="recorded in eval mode"):
        trained(True, replace(dump, record=replace(dump.record, training=False)))


class Code:
    def __reduce__(self):
        return pytest.fail, ("code ran",)


def test_a_checkpoint_that_is_not_of_this_training_is_refused(tmp_path):
    """It counts when all ranks wrote it; the last two stay; a pickle in its place is not loaded, nor another shape."""
    checkpoints, steps = Checkpoints(str(tmp_path)), AdamSteps([torch.nn.Parameter(torch.ones(3))], Training())
    for step in (1, 2, 3):
        checkpoints.save(step, 0, steps.stepped.state())
    assert [checkpoints.newest(ranks, most) for ranks, most in ((1, 9), (1, 2), (1, 1), (2, 9))] == [3, 2, 0, 0]
    for step in (9998, 9999, 10000):
        checkpoints.save(step, 1, steps.stepped.state())
    there = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert there == [f"step-{name}.safetensors" for name in ("0002/rank-0", "0003/rank-0", "10000/rank-1", "9999/rank-1")]
    for held in ({}, {"weight.0": torch.ones(1)}, {"weight.0": torch.ones(3), "exp_avg.0": torch.ones(4)}):
        with pytest.raises(ValueError, match=r"weight.0 is missing|not the shape"):
            steps.stepped.load(held)
    (tmp_path / "step-0003" / "rank-0.safetensors").write_bytes(pickle.dumps(Code()))
    with pytest.raises(StoreProblem, match="is not a checkpoint"):
        checkpoints.load(3, 0)
    (tmp_path / "file").touch()
    with pytest.raises(StoreProblem, match="NotADirectory"):
        Checkpoints(str(tmp_path / "file")).save(1, 0, {})


def test_going_on_with_anothers_check_is_confirmed(store, monkeypatch, tmp_path):
    record = replace(checked(checked(()).cells[0].steps), log_dir=str(tmp_path))
    path = kept(store, record)
    assert invoke(store, "--show last").exit_code == 0
    logs = replace(record, log_dir=str(path.parent / "logs"))
    write_trainer_log(record.cells[0], logs)
    assert [one for one in check(store) if "trainchecks" in str(one.place)] == []
    give_away(path, monkeypatch)
    with pytest.raises(Refused, match="wrote training check 20261122T080000-abcdef"):
        invoke(store, "--resume last")
