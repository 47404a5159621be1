"""Replaying in OpenRLHF's DeepSpeed strategy: every ZeRO stage gives the plain Actor's numbers, and inputs stay independent.

Here in one process; `test_actor_parallel.py` has the stages on two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow

Facts = dict[str, Any]
STAGES = ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(cache: Path) -> Facts:
    return run_scenario("alone", cache)[0]


def furthest(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_gives_the_log_probs_and_the_gradient_norm_of_the_plain_actor(alone: Facts, stage: str):
    expected, found = alone["plain"], alone[stage]["runs"][0]
    assert furthest(found["log_probs"], expected["log_probs"]) < 1e-5
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_input_gives_the_same_bits_whatever_ran_between(alone: Facts, stage: str):
    first, other, again = alone[stage]["runs"]
    assert first == again
    assert other["grad_norm"] != first["grad_norm"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_a_number_is_reported_and_changes_no_weight(alone: Facts, stage: str):
    assert alone[stage]["a gradient that is not a number"] == [True, True]


@pytest.mark.parametrize("stage", STAGES)
def test_packing_is_exact_under_every_stage(alone: Facts, stage: str):
    assert furthest(alone[stage]["packed"]["log_probs"], alone[stage]["runs"][0]["log_probs"]) < 1e-5
    assert alone[stage]["packed"]["grad_norm"] == pytest.approx(alone[stage]["runs"][0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_says_which_stage_it_is(alone: Facts, stage: str):
    resolved = alone[stage]["resolved"]
    assert (resolved["zero_stage"], resolved["world_size"], resolved["engine"]) == (int(stage), 1, "training")
    assert alone[stage]["collective"] is False


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_forward_alone_runs_in_the_evaluation_engine(alone: Facts, stage: str):
    found = alone["evaluation"][stage]
    assert found["engine"] == "evaluation"
    assert found["parameters"] == alone["plain"]["parameters"]
    assert found["loss"] is found["grad_norm"] is None
    assert furthest(found["log_probs"], alone["plain"]["log_probs"]) < 1e-5
    assert found["backward"] == "usage"


def test_a_failed_forward_spoils_zero_3_and_no_other_stage(alone: Facts):
    evaluation = alone["evaluation"]
    assert evaluation["0"]["tainted"][1] != "ran"
    assert evaluation["0"]["tainted"][::2] == [False, False]
    assert evaluation["3"]["tainted"][::2] == [False, True]
