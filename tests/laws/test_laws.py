"""Laws asked of real models through OpenRLHF's Actor: healthy families stay green, planted faults are red in fp32 and in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lawcases
import pytest
from actorcases import run_scenario

from actordbg.config.replay_config import ReplayConfig
from actordbg.judge.law_summary import laws_of
from actordbg.records.replay_record import PASSED, LawAnswer, ResultRecord, in_words, violations

pytestmark = pytest.mark.slow

BAD = ("broken", "nondeterministic")
WAITED_FOR = {
    "qwen3.5 packed": {"neighbour", "jacobian"},
    "positions run on, llama": {"neighbour", "jacobian"},
    "positions run on, mistral": {"neighbour", "jacobian"},
    "noise": {"rerun", "normalisation"},
    "log-softmax in bf16": {"normalisation"},
    "temperature": {"normalisation"},
    "rows leak": {"neighbour", "jacobian"},
    "padding": {"padding", "jacobian"},
    "future": {"future", "jacobian"},
    "gradients left over": {"additivity"},
    "mask shifted": {"rerun"},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("law-models")


@pytest.fixture(scope="module")
def alone(cache: Path) -> dict[str, Any]:
    return run_scenario("healthy,broken", cache, program=lawcases.__file__)[0]


@pytest.fixture(scope="module")
def broken(alone: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = alone["broken"]
    return found


def test_a_state_that_runs_on_over_packed_rows_is_seen_in_bf16_as_in_fp32(broken: dict[str, Any]) -> None:
    for dtype in ("fp32", "bf16"):
        answers = broken[f"qwen3.5 packed {dtype}"]
        assert "row 2 sees row 0 (24 of 24 tokens); row 2 sees row 1 (16 of 16 tokens)" in answers["jacobian"]["words"]
        assert answers["neighbour"]["verdict"] == "broken" and answers["neighbour"]["words"] == "row 1 sees row 0"
        assert answers["rerun"]["verdict"] == "kept"


@pytest.mark.parametrize("fault", WAITED_FOR)
def test_a_fault_breaks_the_laws_that_it_violates(broken: dict[str, Any], fault: str) -> None:
    for dtype in ("fp32", "bf16") if fault in lawcases.IN_BOTH else ("bf16",):
        answers = broken[f"{fault} {dtype}"]
        assert {law for law, one in answers.items() if one["verdict"] in BAD} >= WAITED_FOR[fault]


def test_a_mask_that_is_shifted_is_not_taken_for_noise(broken: dict[str, Any]) -> None:
    found = broken["mask shifted bf16"]["rerun"]
    assert found["verdict"] == "broken" and "the Actor masks other tokens than were selected" in found["words"]


@pytest.mark.parametrize("fault", ["log-softmax in bf16", "temperature", "gradients left over", "mask shifted"])
def test_a_fault_breaks_no_law_that_it_has_nothing_to_do_with(broken: dict[str, Any], fault: str) -> None:
    assert {law for law, one in broken[f"{fault} bf16"].items() if one["verdict"] in BAD} == WAITED_FOR[fault]


def test_a_law_whose_forward_raises_has_failed_and_forbids_a_green_verdict(broken: dict[str, Any]) -> None:
    answers = [LawAnswer.from_dict(one) for one in broken["fails again bf16"].values()]
    (failed,) = violations(answers)
    assert in_words(failed) == "rerun failed: RuntimeError: no kernel"
    assert {one.words for one in answers if one is not failed} >= {"rerun failed"}
    result = ResultRecord("r", "d", PASSED, extra={"laws": list(broken["fails again bf16"].values())})
    summary = laws_of([result], ReplayConfig(laws=1))
    assert summary is not None and not summary.good and not summary.broken and "FAILED rerun" in summary.headline


def test_healthy_models_keep_every_law(alone: dict[str, Any]) -> None:
    found = alone["healthy"]
    red = {case: one for case, laws in found.items() for one in laws.values() if one["verdict"] in BAD}
    assert red == {}
    both = found["llama bf16 packed: both"]
    assert {one["verdict"] for one in both.values()} <= {"kept", "within-rounding"}, "nothing is left unchecked here"
    assert found["llama bf16 packed: one row"]["neighbour"]["verdict"] == "not-checked"
    assert all(laws["jacobian"]["verdict"] == "kept" for laws in found.values())


def test_ranks_that_compute_together_stay_in_step_whatever_their_inputs_can_answer(cache: Path) -> None:
    for rank, found in enumerate(run_scenario("together", cache, world=2, program=lawcases.__file__)):
        for name in lawcases.TOGETHER:
            healthy = found[f"{name}, nothing"]
            assert [one for one in healthy.values() if one["verdict"] in BAD] == [], name
            assert healthy["jacobian"]["verdict"] == "kept" and not found[f"{name}, tainted"]
            if rank == 0:
                assert healthy["additivity"]["verdict"] == "within-rounding"
            if rank == 0 and f"{name}, positions_run_on" in found:
                broken = found[f"{name}, positions_run_on"]
                assert broken["neighbour"]["verdict"] == broken["jacobian"]["verdict"] == "broken"
    assert found["ZeRO 3, nothing"]["neighbour"]["words"] == "the input has one row"
