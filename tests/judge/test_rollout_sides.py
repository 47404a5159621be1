"""Which side is wrong, from what was found on each: the sentence, and the figures that dashboards have."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from actordbg.compare.same_weights import WeightsMet, weights_met
from actordbg.judge import explained_sides
from actordbg.judge.explained_sides import ExplainedRollout, field_figures
from actordbg.records.comparison_record import ExplainedOutputs, NamedCause
from actordbg.store.layout import Store

RIGHT = ExplainedOutputs(0.010, 0.010, 500, 2)
WRONG = ExplainedOutputs(0.31, 0.010, 500, 2, (NamedCause("adapter", "the adapter was not applied", "merge it", "", left=0.011),))
UNKNOWN = ExplainedOutputs(0.2, 0.010, 500, 2, unknown=True)


@pytest.mark.parametrize(
    ("rollout", "trainer", "wrong", "begins"),
    [
        (RIGHT, RIGHT, (), "RIGHT: rollout and trainer are both right: 0.01 and 0.01 nats from the truth over 500 tokens"),
        (WRONG, RIGHT, ("rollout",), "WRONG (rollout; trainer right): rollout log-probs: the adapter was not applied (0.31 -> "),
        (RIGHT, UNKNOWN, ("trainer",), "WRONG (trainer; rollout right): trainer log-probs: unknown cause (0.2 nats"),
        (WRONG, UNKNOWN, ("rollout", "trainer"), "WRONG (rollout and trainer): rollout log-probs"),
    ],
)  # fmt: skip
def test_the_sentence_says_which_side_is_wrong(
    rollout: ExplainedOutputs, trainer: ExplainedOutputs, wrong: tuple[str, ...], begins: str
) -> None:
    explained = ExplainedRollout(rollout, trainer, 0.3, {"vllm_kl": 0.024})
    assert explained.wrong == wrong and explained.verdict.sentence.startswith(begins)
    assert explained.verdict.good == (not wrong)
    alike = replace(explained, apart=0.01).verdict  # the replayed model may have other settings than the run
    assert not explained.verdict.not_checked and len(alike.not_checked) == any(wrong)
    assert ("merge it" in str(explained.blocks)) == ("rollout" in wrong)


@pytest.mark.parametrize(
    ("engine", "begins"),
    [
        (RIGHT, "WRONG (rollout; trainer and engine right): rollout log-probs: the adapter"),
        (WRONG, "WRONG (rollout and engine; trainer right): rollout log-probs"),
    ],
)
def test_a_server_is_a_third_side(engine: ExplainedOutputs, begins: str) -> None:
    explained = ExplainedRollout(WRONG, RIGHT, 0.3, {}, engine)
    assert explained.verdict.sentence.startswith(begins)


KNOWN, OTHERS, UNSURE = WeightsMet(True, "same", True), WeightsMet(False, "others", True), WeightsMet(None, "unsure")


@pytest.mark.parametrize(
    ("rollout", "trainer", "weights", "word"),
    [
        (RIGHT, RIGHT, KNOWN, "RIGHT"),
        (RIGHT, UNKNOWN, KNOWN, "WRONG"),
        (RIGHT, RIGHT, OTHERS, "NOT CHECKED"),
        (WRONG, UNKNOWN, OTHERS, "NOT CHECKED"),
        (RIGHT, RIGHT, UNSURE, "NOT CHECKED"),
        (RIGHT, UNKNOWN, UNSURE, "NOT CHECKED"),
        (WRONG, RIGHT, UNSURE, "WRONG"),
    ],
)
def test_no_side_is_judged_by_other_weights(
    rollout: ExplainedOutputs, trainer: ExplainedOutputs, weights: WeightsMet, word: str
) -> None:
    verdict = ExplainedRollout(rollout, trainer, 0.3, {}, weights=weights).verdict
    assert verdict.word == word and (weights is KNOWN or weights.words in [left.said for left in verdict.not_checked])


@pytest.mark.parametrize(
    ("fp32", "as_recorded", "apart", "rounding", "same"),
    [
        (False, True, 2.7e-4, 1e-2, True), (False, True, 9.9e-3, 1e-2, None), (False, True, 0.0, 0.0, True),
        (True, True, 1e-6, 5e-7, True), (True, True, 1e-4, 1e-6, None), (True, True, float("nan"), 1e-2, None),
        (False, False, 2.7e-4, 1e-2, None), (False, False, 8e-7, 1e-2, True),
    ],
)  # fmt: skip
def test_weights_are_known_by_log_probs_far_below_rounding(
    fp32: bool, as_recorded: bool, apart: float, rounding: float, same: bool | None
) -> None:
    """Log-probs that are equal need no excuse; else another dtype than the run's says nothing."""
    met = weights_met({}, fp32=fp32, as_recorded=as_recorded, apart=apart, rounding=rounding)
    assert met.same is same and "nan" not in met.words


def test_tokens_that_the_loss_leaves_out_are_explained_on_no_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards of other trainers also count tool output, and prompts beside longer ones; the rollout has 0.0 there."""
    said, asked = np.array([[0.0, -1.0, -2.0]], "f4"), {}
    loss = SimpleNamespace(active=np.array([[False, True, True]]), fact=lambda _: 1.0, fp32=True)
    loss.log_probs = lambda: {"rollout_log_probs": said, "log_probs": said - 0.5}
    config = SimpleNamespace(backend="plain")
    values = SimpleNamespace(log_probs=said - 0.5)
    replay = SimpleNamespace(spec=SimpleNamespace(config=config), read=lambda _: values, resolved={}, dtype_of=lambda _: "fp32")
    for name, value in {"_losses": lambda *_: [("d", loss)], "open_replay": lambda *_: replay}.items():
        monkeypatch.setattr(explained_sides, name, value)
    monkeypatch.setattr(explained_sides.query, "open_fresh", lambda _: None)
    monkeypatch.setattr(
        explained_sides, "explain_sides", lambda *given, **_: asked.update(given[2]) or dict.fromkeys(given[2], RIGHT)
    )
    explained = explained_sides.explain_rollout(Store(Path("unused")), "r")
    assert explained.apart == 0.5 and {*asked} == {"rollout", "trainer"} and explained.weights.same
    assert all(np.isnan(side["d"]).tolist() == [[True, False, False]] for side in asked.values())


def test_figures_have_the_fields_names_and_signs() -> None:
    rollout, run = np.array([-1.0, -2.0]), np.array([-1.0, -1.5])
    now = np.array([-1.0, -2.5])
    figures = field_figures(rollout, now, run)
    assert figures["vllm_kl"] == pytest.approx(-0.25), "positive where the rollout is more certain"
    assert figures["mismatch_kl"] == pytest.approx((math.exp(-0.5) - 0.5) / 2), "of the update itself"
    assert figures["token_mult_prob_error"] == pytest.approx((1 + math.exp(0.5)) / 2)
    assert figures["rollout_probs_diff_mean"] == pytest.approx((math.exp(-1.5) - math.exp(-2)) / 2)
    assert field_figures(run, run, run)["rollout_is_eff_sample_size"] == pytest.approx(1.0)
