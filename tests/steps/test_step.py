"""`actordbg step`: a recorded step repeats to rounding, each known fault is named by what it changes, and other weights are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import invoke
from stepcases import RecordedRun

import actordbg
from actordbg.base.errors import NothingToDo, UsageError
from actordbg.base.imports import is_there
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.page import as_html
from actordbg.steps.recorded_step import recorded_step
from actordbg.steps.run_step import StepFigures
from actordbg.steps.step_document import step_data, step_page
from actordbg.steps.step_verdict import causes_of, verdict_of
from actordbg.store.layout import Store


def figures_of(tmp_path: Path, moved: float = 0.0, **wrong: Any) -> StepFigures:
    """A recorded step, replayed by the test itself instead of by workers."""
    run = RecordedRun(Store(tmp_path / "store").create(), tmp_path / "model", **wrong)
    run.write(moved)
    step, whole = recorded_step(run.store, None, 4), run.reference
    factor = run.places * run.ranks
    replayed = replace(whole, figures=tuple(each | {"loss": each["loss"] * factor} for each in whole.figures))
    return StepFigures(step, ReplayConfig(model=str(run.model)), replayed, whole)


@pytest.mark.parametrize("shape", [{}, {"ranks": 1}, {"places": 1}, {"kl": "right"}])
def test_a_right_step_adds_up_on_any_number_of_ranks_and_micro_batches(tmp_path: Path, shape: dict[str, Any]):
    figures = figures_of(tmp_path, **shape)
    step, verdict = figures.step, verdict_of(figures)
    assert verdict.word == "RIGHT" and not causes_of(figures), verdict.sentence
    assert abs(step.applied - step.expected) < 1e-6 * step.size


FAULTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dp_size": ({"dp_size": 1}, ["dp_size"]),
    "a wrong accumulation factor": ({"tokens": 2.0}, ["accumulation"]),
    "a wrong token count": ({"tokens": 1.3}, ["token count"]),
    "DeepSpeed's accumulation": ({"engine": 8}, ["engine accumulation"]),
    "only the last micro-batch": ({"applied": "last"}, ["last micro-batch"]),
    "a gradient applied twice": ({"applied": "twice"}, ["gradient twice"]),
    "no clipping": ({"clipped": False}, ["formula"]),
    "no KL term": ({"kl": "missing"}, ["KL term"]),
    "a loss added twice": ({"doubled": True}, ["doubled loss"]),
    "no gradient clipping": ({"facts": {"engine_max_norm": 0.0}}, ["gradient clipping"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(tmp_path: Path, fault: str):
    wrong, named = FAULTS[fault]
    figures = figures_of(tmp_path, **wrong)
    factor = wrong.get("dp_size", 2) / 2 / wrong.get("tokens", 1.0)  # what these arguments make of loss and norm
    if factor != 1.0 or "engine" in wrong:  # as recorded, the norm follows from its wrong loss
        step = figures.step
        norm = {"grad_norm": factor * figures.reference.grad_norm * (2 / wrong.get("engine", 2))}
        step.micro_batches[-1].loss.__dict__["fact"] = lambda name, own=step.micro_batches[-1].loss.fact: norm.get(
            name, own(name)
        )
    names = [cause.name for cause in causes_of(figures)]
    assert names[:1] == named and verdict_of(figures).word == "WRONG", names


def test_the_norm_is_not_checked_with_other_weights_or_without_a_recorded_one(tmp_path: Path):
    for at, (moved, wrong) in enumerate(((0.05, {}), (0.0, {"applied": "missing"}))):
        verdict = verdict_of(figures_of(tmp_path / str(at), moved, **wrong))
        assert verdict.word == "NOT CHECKED" and any("norm" in left or "optimizer step" in left for left in verdict.not_checked)


def test_a_configuration_that_changes_the_norm_is_wrong(tmp_path: Path):
    figures = figures_of(tmp_path)
    last = figures.replayed.figures[-1] | {"grad_norm": 0.5 * figures.reference.grad_norm}
    other = replace(figures, replayed=replace(figures.replayed, figures=(*figures.replayed.figures[:-1], last)))
    assert verdict_of(other).word == "WRONG" and "not under this configuration" in verdict_of(other).said


def test_the_page_has_the_tokens_with_all_figures_and_the_mismatch_with_its_noise(tmp_path: Path):
    figures = figures_of(tmp_path)
    text = as_html(step_page(figures, [each.loss for each in figures.step.micro_batches]))
    assert "Token map" in text and "advantage" in text and "Mismatch by position" in text
    assert json.dumps(step_data(figures))


def test_a_step_that_was_not_recorded_or_an_unknown_run_is_refused(tmp_path: Path):
    store = Store(tmp_path).create()
    with pytest.raises(NothingToDo, match="no loss of step 9"):
        invoke(store, "step", "--step", "9")
    with pytest.raises(UsageError, match="name of a run"):
        invoke(store, "step", "--step", "9", "--run", "a' or '1'='1")


@pytest.mark.slow
@pytest.mark.skipif(not is_there("openrlhf"), reason="needs openrlhf")
def test_a_recorded_step_is_replayed_with_the_trainers_loss_and_as_one_batch(tmp_path: Path):
    run = RecordedRun(Store(tmp_path / "store").create(), tmp_path / "model", real=True, kl="right")
    run.write()
    answer = actordbg.open(run.store.root).step(4, model=run.model, dtype="fp32")
    assert answer.verdict == "RIGHT", answer.sentence
    norms = answer["grad_norm"]
    assert norms["recorded"] == pytest.approx(run.reference.grad_norm, rel=1e-5)
    assert norms["replayed"] == pytest.approx(norms["recorded"], rel=1e-5) == norms["reference"]
    assert not any((run.store.root / "cache" / "steps").iterdir())
