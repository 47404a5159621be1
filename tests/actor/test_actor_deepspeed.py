"""Replaying in OpenRLHF's DeepSpeed strategy: every ZeRO stage gives the plain Actor's numbers, and inputs stay independent.

Here in one process; `test_actor_parallel.py` has the stages on two.
"""

from __future__ import annotations

from typing import Any

import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_scenario("alone", tmp_path_factory.mktemp("models"))[0]


def furthest(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("stage", ("0", "1", "2", "3"))
def test_a_stage_gives_the_plain_actors_numbers_packed_or_not_and_the_same_bits_whatever_ran_between(alone: Facts, stage: str):
    expected, found = alone["plain"], alone[stage]
    first, other, again = found["runs"]
    for run in (first, found["packed"]):
        assert furthest(run["log_probs"], expected["log_probs"]) < 1e-5
        assert run["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert first == again and other["grad_norm"] != first["grad_norm"]
    assert found["a gradient that is not a number"] == [True, True], "it is reported, and changes no weight"
    resolved = found["resolved"]
    assert (resolved["zero_stage"], resolved["world_size"], resolved["engine"]) == (int(stage), 1, "training")
    assert found["collective"] is False


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
