"""`actordbg step`: a recorded step repeats to rounding, each known fault is named by what it changes, and other weights are said."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from casefiles import cases_of
from commandline import invoke
from stepcases import RecordedRun

import actordbg
from actordbg.base.errors import EnvironmentProblem, NothingToDo, Unsupported, UsageError
from actordbg.base.imports import is_there
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.run_files import MET_WEIGHTS
from actordbg.steps import recorded_step as recording, run_step
from actordbg.steps.recorded_step import recorded_step
from actordbg.steps.run_step import StepFigures
from actordbg.steps.step_sessions import _Objective
from actordbg.steps.step_verdict import causes_of, step_data, verdict_of
from actordbg.store.layout import Store


def figures_of(tmp_path, lost=lambda record: False, moved=0.0, **wrong):
    """A recorded step, replayed by the test itself instead of by workers. lost: losses that were not recorded."""
    run = RecordedRun(Store(tmp_path / "store").create(), tmp_path / "model", **wrong)
    run.write(moved, publishes=lambda record: not lost(record))
    step, whole = recorded_step(run.store, None, 4), run.reference
    kept = [
        at for at in range(run.places * run.ranks) if not lost(DumpRecord("", "", at % run.ranks, "", 1, 1, 1, monotonic_ns=at))
    ]
    whole = replace(whole, figures=tuple(whole.figures[at] for at in kept), log_probs=tuple(whole.log_probs[at] for at in kept))
    factor = run.places * run.ranks
    replayed = replace(whole, figures=tuple(each | {"loss": each["loss"] * factor} for each in whole.figures))
    return StepFigures(step, ReplayConfig(model=str(run.model)), replayed, whole)


def with_norm(side, norm):
    """A side whose gradient has this norm."""
    return replace(side, figures=(*side.figures[:-1], side.figures[-1] | {"grad_norm": norm}))


def record_norm(figures, norm):
    """Let the step have this norm on record."""
    last = figures.step.micro_batches[-1].loss
    last.__dict__["fact"] = lambda name, own=last.fact: norm if name == "grad_norm" else own(name)


LOST = {
    "nothing": lambda record: False,
    "rank 1": lambda record: record.rank == 1,
    "the first": lambda record: record.monotonic_ns == 0,
    "the first of both ranks": lambda record: record.monotonic_ns < 2,
    "one between others": lambda record: record.monotonic_ns in (2, 3),
    "the last": lambda record: record.monotonic_ns > 3,
}
LOSSES = {"negated": lambda terms: -terms, "squared": lambda terms: terms**2}
CASES = cases_of("steps")


def judged_lines(tmp_path, lines):
    """The verdict on a step, and what explains it. lines: of `steps.test`."""
    wrong = {name: json.loads(value) for name, _, value in (line.partition(" ") for line in lines)}
    lost, met = LOST[wrong.pop("lost", "nothing")], wrong.pop("weights", {})
    if "loss" in wrong:
        wrong["loss"] = LOSSES[wrong["loss"]]
    figures = figures_of(tmp_path, lost, **wrong)
    if met:
        figures = replace(figures, replayed=replace(figures.replayed, resolved={MET_WEIGHTS: met}))
    factor = wrong.get("dp_size", 2) / 2 / wrong.get("tokens", 1.0)  # what these arguments make of loss and norm
    if "applied" not in wrong and (factor != 1.0 or "engine" in wrong):  # as recorded, the norm follows from its wrong loss
        record_norm(figures, factor * figures.reference.grad_norm * (2 / wrong.get("engine", 2)))
    verdict, causes = verdict_of(figures), [cause.rule.name for cause in causes_of(figures)]
    if verdict.word == "RIGHT" and not lost(DumpRecord("", "", 1, "", 1, 1, 1, monotonic_ns=0)):
        assert abs(figures.step.applied - figures.step.expected) < 1e-6 * figures.step.size
    left = [f"not checked: {each.said.partition(':')[0]}" for each in verdict.not_checked]
    assert verdict.word != "WRONG" or verdict.sentence.startswith("WRONG (trainer): step 4")
    assert not figures.step.missing or "add up" not in verdict.said
    others = [other for cause in causes_of(figures) for _, _, other in [cause.said.partition("; ")] if other.startswith("it is")]
    return [" ".join([verdict.word, *causes]), *others, *left]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_right_wrong_for_a_known_reason_or_not_checked(tmp_path, case):
    assert judged_lines(tmp_path, CASES[case].given) == CASES[case].expected


@pytest.mark.parametrize("applied", ["last", "first twice", "clipped", "scaled", "a third"])
def test_a_replay_that_repeats_a_wrong_norm_does_not_make_it_right(tmp_path, applied):
    figures = figures_of(tmp_path, applied=applied)
    known = [cause.said for cause in causes_of(figures)]
    repeated = replace(figures, replayed=with_norm(figures.replayed, figures.step.grad_norm))
    verdict, named = verdict_of(repeated), [cause.said for cause in causes_of(repeated)]
    assert named == ([] if applied == "a third" else known) and "right as" not in verdict.said
    assert verdict.word == "WRONG"


def test_the_gradients_of_all_modules_of_a_name_that_are_lost_are_named(tmp_path):
    """As those of an adapter, or of a group that the optimizer was not given; in a bf16 model nothing else shows it."""
    figures = figures_of(tmp_path, applied="all but a parameter")
    own = figures.reference.squares
    others, lost = (own.pop("0"), own.pop("2")), own.pop("1")
    for at, other in enumerate(others):
        own |= {f"layers.{at}.attn.weight": other, f"layers.{at}.mlp.weight": (1 + at) * lost / 3}
    [cause] = causes_of(figures)
    assert cause.rule.name == "lost gradient" and "of mlp is lost" in cause.said


def gradient_of(attributes, **tensors):
    """The gradient of a recorded loss by its formula, of rows with one action."""
    facts, own = {f"context.loss.{name}": value for name, value in attributes.items()}, torch.zeros(2, 1).requires_grad_()
    loss = SimpleNamespace(
        record=SimpleNamespace(arguments=facts, batch_size=2), tensors=tensors | {"action_mask": torch.ones(2, 1)}
    )
    objective = _Objective(loss, SimpleNamespace(tokens=2, rows=2), torch.float32, own.device)
    for row, each in enumerate(own):
        objective(row, torch.arange(1), each, each).backward()
    return own.grad.flatten().tolist()


def test_what_is_clipped_follows_from_the_recorded_log_probs():
    known, one = {"policy_loss_type": "ppo", "clip_eps_low": 0.2, "clip_eps_high": 0.2}, torch.ones(2, 1)
    assert gradient_of(known, log_probs=0.19 * one, old_log_probs=0 * one, advantages=one) == [0.0, 0.0]


def test_the_gradient_of_preferences_is_that_of_pairs_also_where_the_policy_is_its_reference():
    known, one = {"policy_loss_type": "dpo", "beta": 0.4, "label_smoothing": 0.1, "token_level_loss": False}, torch.ones(2, 1)
    assert gradient_of(known, log_probs=-one, base_action_log_probs=-one) == pytest.approx([-0.16, 0.16])


def test_a_step_that_a_resumed_job_recorded_again_is_judged_once(tmp_path):
    figures_of(tmp_path)
    run = RecordedRun(Store(tmp_path / "store"), tmp_path / "model")
    run.write(process=1000)
    step = recorded_step(run.store, "ppo", 4)
    assert {each.loss.record.pid for each in step.micro_batches} == {5711, 5712}
    run.write(process=2000, publishes=lambda record: record.rank == 0)
    assert "more often" in recorded_step(run.store, "ppo", 4).missing


@pytest.mark.parametrize("facts", [{"loss.formula_of": "PolicyLoss"}, {}], ids=("an adapter", "dynamic batches"))
def test_a_step_in_which_recording_began_is_not_whole_although_nothing_counts_its_micro_batches(tmp_path, monkeypatch, facts):
    monkeypatch.setattr(recording, "STARTED", 9)
    facts |= {"dynamic_batch": True}
    assert not figures_of(tmp_path / "whole", facts=facts).step.missing
    figures = figures_of(tmp_path / "late", LOST["the first of both ranks"], facts=facts, applied="all")
    assert verdict_of(figures).word == "NOT CHECKED" and "may have begun" in figures.step.missing


def test_a_norm_without_its_auxiliary_loss_is_not_checked_and_no_norm_ends_in_an_error(tmp_path):
    figures = figures_of(tmp_path / "experts", facts={"aux_loss_coef": 0.01}, applied="twice")
    left = verdict_of(figures).not_checked[0].said
    assert verdict_of(figures).word == "NOT CHECKED" and "what backward gets" in left and "auxiliary" in left
    late = figures_of(tmp_path / "late", facts={"accumulation": None}, applied="twice")
    assert verdict_of(late).word == "NOT CHECKED" and "settings are unknown" in verdict_of(late).not_checked[0].said
    figures = figures_of(tmp_path / "odd")
    for recorded, whole in (
        (0.0, 1.0),
        (-1.0, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
        (1.0, 0.0),
        (1.0, math.inf),
        (1.0, math.nan),
    ):
        record_norm(figures, recorded)
        causes = causes_of(replace(figures, reference=with_norm(figures.reference, whole)))
        assert [(cause.rule.name, bool(cause.todo)) for cause in causes] == [("unknown", True)]


def test_the_loss_of_another_trainer_is_refused_before_anything_runs(tmp_path):
    run = RecordedRun(Store(tmp_path / "store").create(), tmp_path / "model", function="trl.trainer:GRPO._compute_loss")
    run.write()
    with pytest.raises(Unsupported, match="only losses of openrlhf"):
        recorded_step(run.store, None, 4)


def test_after_a_failed_replay_no_reference_runs(tmp_path, monkeypatch):
    ran = []
    figures = figures_of(tmp_path)

    def failing(store, spec, *more, folder, **named):
        ran.append(folder.name)
        return SimpleNamespace(results={}, resolved=None, folder=folder)

    monkeypatch.setattr(run_step, "run_replay", failing)
    monkeypatch.setattr("actordbg.api.desk.require_model", lambda *what: None)
    answer = actordbg.open(tmp_path / "store").step(4, model=figures.config.model)
    assert answer.verdict == "FAILED" and ran == ["replay"]


@pytest.mark.parametrize("times, apart, word", [(1.0008, 0.0, "RIGHT"), (1.005, 0.0, "WRONG"), (1.005, 2e-3, "RIGHT")])
def test_a_norm_is_held_to_what_rounding_costs_where_the_replay_repeats_the_run(tmp_path, times, apart, word):
    """In bf16, with log-probs that rounding takes 0.01 nats from fp32's. apart: of the replay's log-probs from the run's."""
    figures = figures_of(tmp_path)
    for each in figures.step.micro_batches:
        each.loss.record = replace(each.loss.record, model_dtype="bfloat16")
    record_norm(figures, times * figures.reference.grad_norm)
    rounded = tuple(each + 0.01 for each in figures.reference.log_probs)
    replayed = replace(
        figures.replayed,
        log_probs=tuple(each + apart for each in figures.replayed.log_probs),
        resolved={MET_WEIGHTS: {"same": [4], "other": {}, "unknown": 0}},
    )
    figures = replace(figures, replayed=replayed, reference=replace(figures.reference, log_probs=rounded))
    assert verdict_of(figures).word == word, verdict_of(figures).sentence


def test_zero_3_has_no_state_of_the_optimizer_and_a_right_step_says_so(tmp_path):
    figures = figures_of(tmp_path)
    figures.step.micro_batches[0].loss.record.actor["zero_stage"] = 3
    assert verdict_of(figures).word == "RIGHT" and "optimizer's update: DeepSpeed" in verdict_of(figures).sentence


def test_the_toy_model_is_named_where_its_weights_are_not_the_step_s(tmp_path):
    figures = figures_of(tmp_path, moved=0.05)
    assert "(--model)" in verdict_of(replace(figures, config=replace(figures.config, model="tiny"))).sentence


def test_a_configuration_that_changes_the_norm_is_wrong(tmp_path):
    figures = figures_of(tmp_path)
    other = replace(figures, replayed=with_norm(figures.replayed, 0.5 * figures.reference.grad_norm))
    assert verdict_of(other).word == "WRONG" and "not under this configuration" in verdict_of(other).said
    assert json.dumps(step_data(other))


def test_a_step_that_was_not_recorded_or_an_unknown_run_is_refused(tmp_path):
    store = Store(tmp_path).create()
    with pytest.raises(NothingToDo, match="no loss of step 9"):
        invoke(store, "step --step 9")
    RecordedRun(store, tmp_path / "model").write(step=5)
    with pytest.raises(NothingToDo, match="step is 5 to 5") as refused:
        invoke(store, "step --step 9")
    assert "--calls" not in str(refused.value.hint), "losses were recorded"
    with pytest.raises(UsageError, match="name of a run"):
        invoke(store, "step --step 9 --run", "a' or '1'='1")


def test_a_step_says_at_once_that_the_trainer_of_its_loss_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="the loss of a step needs openrlhf, which is not installed"):
        run_step.run_step(None, SimpleNamespace(micro_batches=[]), None, print)


@pytest.mark.forked
@pytest.mark.skipif(not is_there("openrlhf"), reason="needs openrlhf")
def test_a_recorded_step_is_replayed_with_the_trainers_loss_and_as_one_batch(tmp_path):
    run = RecordedRun(Store(tmp_path / "store").create(), tmp_path / "model", real=True, kl="right")
    run.write()
    answer = actordbg.open(run.store.root).step(4, model=run.model, dtype="fp32")
    assert answer.verdict == "RIGHT", answer.sentence
    norms = answer["grad_norm"]
    assert norms["recorded"] == pytest.approx(run.reference.grad_norm, rel=1e-5)
    assert norms["replayed"] == pytest.approx(norms["recorded"], rel=1e-5) == norms["reference"]
    assert not any((run.store.root / "cache" / "steps").iterdir())
