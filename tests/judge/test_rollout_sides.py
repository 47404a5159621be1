"""Which side is wrong, from what was found on each: the sentence, and the figures that dashboards have."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from casefiles import cases_of

from actordbg.compare.same_weights import WeightsMet, weights_met
from actordbg.judge import explained_sides
from actordbg.judge.explained_sides import ExplainedRollout, field_figures
from actordbg.records.comparison_record import ExplainedOutputs, NamedCause
from actordbg.store.layout import Store

ADAPTER = NamedCause("adapter", "the adapter was not applied", "merge it", "", left=0.011)
SIDES = {
    "right": ExplainedOutputs(0.010, 0.010, 500, 2),
    "wrong": ExplainedOutputs(0.31, 0.010, 500, 2, (ADAPTER,)),
    "unknown": ExplainedOutputs(0.2, 0.010, 500, 2, unknown=True),
}
RIGHT = SIDES["right"]
WEIGHTS = {
    "same": WeightsMet(True, "same", True),
    "others": WeightsMet(False, "others", True),
    "unsure": WeightsMet(None, "unsure"),
}
CASES = cases_of("sides")


def told(lines):
    """What is said of rollout, trainer and engine. lines: of `sides.test`."""
    known = dict(line.split() for line in lines)
    sides = {name: SIDES[known[name]] for name in ("rollout", "trainer", "engine") if name in known}
    weights = WEIGHTS.get(known.get("weights", ""))
    explained = ExplainedRollout(apart=float(known.get("apart", 0.3)), dashboards={}, weights=weights, **sides)
    assert ("merge it" in str(explained.blocks)) == ("wrong" in known.values())
    verdict = explained.verdict
    if verdict.findings:
        assert "nats" not in verdict.headline and "nats" in verdict.details[0], "figures are read below the first line"
    return [verdict.sentence]


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_says_which_side_is_wrong_unless_weights_are_others(case):
    assert told(CASES[case].given) == CASES[case].expected


@pytest.mark.parametrize("case", cases_of("weights_met"))
def test_weights_are_known_by_log_probs_far_below_rounding(case):
    """Log-probs that are equal need no excuse; else another dtype than the run's says nothing."""
    (given,), (same,) = (list(map(json.loads, part)) for part in cases_of("weights_met")[case])
    met = weights_met({}, **given)
    assert met.same is same and "nan" not in met.words


def test_tokens_that_the_loss_leaves_out_are_explained_on_no_side(monkeypatch):
    """Forwards of other trainers also count tool output, and prompts beside longer ones; the rollout has 0.0 there."""
    said, asked = np.array([[0.0, -1.0, -2.0]], "f4"), {}
    record = SimpleNamespace(training=False)
    loss = SimpleNamespace(active=np.array([[False, True, True]]), fact=lambda _: 1.0, fp32=True, record=record)
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


def test_figures_have_the_fields_names_and_signs():
    rollout, run = np.array([-1.0, -2.0]), np.array([-1.0, -1.5])
    now = np.array([-1.0, -2.5])
    figures = field_figures(rollout, now, run)
    assert figures["vllm_kl"] == pytest.approx(-0.25), "positive where the rollout is more certain"
    assert figures["mismatch_kl"] == pytest.approx((math.exp(-0.5) - 0.5) / 2), "of the update itself"
    assert figures["token_mult_prob_error"] == pytest.approx((1 + math.exp(0.5)) / 2)
    assert figures["rollout_probs_diff_mean"] == pytest.approx((math.exp(-1.5) - math.exp(-2)) / 2)
    assert field_figures(run, run, run)["rollout_is_eff_sample_size"] == pytest.approx(1.0)
