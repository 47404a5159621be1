"""The truth is what the model's formula says: each row alone, in fp32 and really in fp64, against a Llama of our own."""

from __future__ import annotations

from typing import Any

import pytest
import truthcases
from actorcases import run_scenario

pytestmark = pytest.mark.slow

Facts = dict[str, Any]
ONE_ULP = 2e-6
"""Of a log-prob between 8 and 16 in float32, which the results are kept in."""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_scenario("truth", tmp_path_factory.mktemp("models"), program=truthcases.__file__)[0]


@pytest.fixture(scope="module")
def session(truth: Facts) -> Facts:
    found: Facts = truth["session"]
    return found


def test_log_probs_and_entropies_are_the_formulas(truth: Facts):
    for case, apart in truth["errors"].items():
        assert apart < (ONE_ULP if case.startswith("fp64") else 2e-5), case
    assert len(truth["errors"]) == 3 * 6


def test_holes_padding_and_empty_rows_have_a_truth_too(truth: Facts):
    assert truth["selected"] == {"actions": 21, "next tokens": 59, "holes": 3 + 7, "actions in holes": 1 + 5}
    assert set(truth["outside"]) == {0.0}, "nothing outside of the mask"


def test_fp64_is_fp64_in_every_operation(truth: Facts):
    assert truth["logits"] < 1e-11 and truth["logits' dtype"] == "torch.float64"
    assert all(notes == [] for notes in truth["notes"].values())


def test_weights_are_rounded_first(truth: Facts):
    rounded, whole = truth["resolved"]["fp64 of bf16"], truth["resolved"]["fp64"]
    assert (rounded["dtype"], rounded["oracle"], rounded["attn"]) == ("bf16", "fp64", "eager")
    assert (whole["dtype"], whole["oracle"]) == ("fp32", "fp64")


def test_the_loss_and_its_gradient_are_those_of_the_whole_batch(truth: Facts):
    found = truth["gradient"]
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-12)
    assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-12)
    assert found["left"] == 0


def test_what_has_no_truth_is_refused_with_the_reason(session: Facts):
    refusals = {"orphan": "no model predicts it", "numbered": "0 and 1", "images": "pixel_values", "packed": "packed_seq_lens"}
    assert [name for name, said in refusals.items() if said not in session["refused"][name]] == []


def test_gradients_are_kept_as_the_backends_keep_them(session: Facts):
    assert {"log_probs", "mask", "grad/lm_head.weight"} <= session["kept"].keys()
    assert set(session["kept"].values()) == {"torch.bool", "torch.float32"}
    assert session["sizes"] == [4096 * 64, 65_536]
    assert session["norms"][0] == pytest.approx(session["norms"][1], rel=1e-12)


def test_the_truth_drops_nothing_and_says_so(session: Facts):
    found = session["dropout"]
    assert found["equal"] and found["training"] is False
    assert "dropout 0.25" in found["notes"][0][0] and found["notes"][1] == []
