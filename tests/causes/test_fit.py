"""Causes fitted to arrays: distributions drawn at random, whose log-probs under a cause are computed here."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from actordbg.causes.bank import BANK, BY_NAME
from actordbg.causes.fit import TokenSample, between, fit, fit_to, refined, rounds_as
from actordbg.document.blocks import UNCHECKED
from actordbg.judge.explain_outputs import told
from actordbg.judge.explained_sides import ExplainedEngine

ROWS, TOKENS, VOCABULARY = 6, 200, 40


@dataclass
class Drawn:
    """Rows of distributions, their sampled tokens, and rounding of a given size."""

    noise: float = 0.01
    seed: int = 0
    curves: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.logits = self.random.normal(0, 2, (ROWS * TOKENS, VOCABULARY))
        gumbel = self.random.gumbel(size=self.logits.shape)
        self.ids = (self.logits + gumbel).argmax(-1)
        own = {"temperature": 1.0, "norm epsilon": 1e-6, "inv_freq in bf16": 0.0, "min-tokens": 0.0}
        tried = BY_NAME["temperature"].tried(1.0)
        self.direction = self.random.normal(0, 1, ROWS * TOKENS)
        first = np.arange(ROWS * TOKENS) % TOKENS == 0
        self.curves |= {
            "temperature": [(size, self.at(size)) for size in tried],
            "norm epsilon": [(size, self.at(1.0) + self.direction * size * 1e3) for size in (1e-5, 1e-4, 1e-3)],
            "min-tokens": [(1.0, self.at(1.0) + 0.2 * first)],
        }
        rows = [(row * TOKENS, (row + 1) * TOKENS) for row in range(ROWS)]
        self.sample = TokenSample(self.healthy(), self.at(1.0), rows, np.stack([self.rounding()]), self.draws(), self.curves, own)

    def at(self, temperature):
        scaled = self.logits / temperature
        return (scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))[np.arange(len(self.ids)), self.ids]

    def rounding(self):
        return self.random.normal(0, self.noise, ROWS * TOKENS)

    def draws(self):
        return np.stack([self.rounding() * 1.3 for _ in range(8)])

    def healthy(self):
        return self.at(1.0) + self.rounding()

    def fitted(self, recorded):
        return fit(replace(self.sample, recorded=recorded))


def names(fitted):
    return [each.name for each in fitted.named]


@pytest.mark.parametrize("noise", [0.01, 1e-6])
@pytest.mark.parametrize("temperature", [0.15, 0.7, 0.985, 1.3])
def test_a_temperature_is_fitted_between_the_tried_ones(noise, temperature):
    drawn = Drawn(noise)
    recorded = drawn.at(temperature) + drawn.rounding()
    best = drawn.fitted(recorded)
    for _ in range(2):  # far from one, tried sizes are far apart: those around a fit are wanted
        drawn.curves["temperature"] += [(size, drawn.at(size)) for _, size in refined(drawn.sample, best)]
        best = drawn.fitted(recorded)
    assert names(best) == ["temperature"]
    assert best.named[0].amount == pytest.approx(temperature, abs=4 * (best.named[0].error or 0), rel=1e-5)
    assert best.named[0].left < 1.6 * noise / min(temperature, 1) < best.before


def test_nothing_is_named_in_what_is_healthy():
    for seed in range(60):
        drawn = Drawn(noise=(0.01, 1e-6)[seed % 2], seed=seed)
        fitted = fit(drawn.sample)
        assert not fitted.named and not fitted.unknown and not fitted.expected and not fitted.placeholders, (seed, fitted)
        assert told(fitted, drawn.sample.own, 1, 1.0).sentences == ()


def test_few_tokens_have_a_distance_and_no_name_and_nobody_is_right_by_them():
    drawn = Drawn()
    recorded = np.full(ROWS * TOKENS, np.nan)
    recorded[:4] = drawn.at(1.0)[:4] - 10
    fitted = drawn.fitted(recorded)
    assert fitted.before == pytest.approx(10) and not fitted.named and not fitted.unknown
    engine = ExplainedEngine("vLLM 1", {"alone": told(fitted, drawn.sample.own, 1, 1.0)}, {})
    assert (
        engine.verdict.word == UNCHECKED and "10 nats from the truth over 3 tokens: these are too few" in engine.verdict.sentence
    )


def test_what_no_token_shows_is_named_by_all_of_them_and_what_is_smaller_is_not():
    drawn = Drawn()
    hidden = drawn.fitted(drawn.at(0.992) + drawn.rounding())
    assert hidden.before < 1.5 * hidden.noise and names(hidden) == ["temperature"]
    (best,) = hidden.named
    assert best.amount == pytest.approx(0.992, abs=4 * (best.error or 0)) and best.z is not None and best.z < -12
    assert "standard errors over 1,194 tokens" in told(hidden, drawn.sample.own, 1, 1.0).sentences[0]
    assert names(drawn.fitted(drawn.at(0.998) + drawn.rounding())) == []


def test_a_real_computation_that_moves_along_a_cause_forbids_its_name():
    """Rounding that is biased along the temperature: a second real computation shows it, and no draw does."""
    drawn = Drawn()
    biased = drawn.at(0.992) - drawn.at(1.0)
    healthy = np.stack([drawn.rounding() + biased, drawn.rounding() - biased])
    sample = replace(drawn.sample, healthy=healthy, recorded=drawn.at(0.992) + drawn.rounding())
    assert not fit(sample).named


def test_a_shift_is_no_other_row_and_other_rows_are_searched_in_all_dumps():
    drawn = Drawn()
    rows = drawn.healthy().reshape(ROWS, TOKENS)
    shifted = drawn.fitted(np.roll(rows, 2, axis=1).ravel())
    assert names(shifted) == ["shift"] and shifted.named[0].amount == -2
    swapped = drawn.fitted(rows[[1, 0, 2, 3, 5, 4]].ravel())
    assert names(swapped) == ["other rows"] and swapped.named[0].amount == 4
    later = drawn.fitted(rows[[5, 0, 1, 2, 3, 4]].ravel())
    assert names(later) == ["other rows"] and later.named[0].amount == 6, "an engine that returns those of the request before"


def test_placeholders_and_a_forbidden_end_token_are_named_beside_a_cause():
    drawn = Drawn()
    recorded = drawn.at(0.7) + drawn.rounding()
    recorded[50::TOKENS] = 0.0
    fitted = drawn.fitted(recorded)
    assert names(fitted) == ["temperature"] and fitted.placeholders == ROWS
    drawn = Drawn(noise=1e-5)
    healthy = drawn.fitted(drawn.curves["min-tokens"][0][1] + drawn.rounding())
    assert names(healthy) == [] and [each.name for each in healthy.expected] == ["min-tokens"]
    assert told(healthy, drawn.sample.own, 1, 1.0).sentences == (
        "recorded log-probs: the first token was sampled without the end token (min_tokens)",
    )


def test_the_first_line_has_a_cause_in_few_words():
    """Beside its side and what is wrong: "WRONG (trainer): recorded log-probs: "."""
    assert not [cause.name for cause in BANK if len(cause.said.split()) > 10]


def test_what_is_nobodys_is_unknown_and_what_cannot_be_told_apart_is_named_together():
    drawn = Drawn()
    nobody = drawn.fitted(drawn.at(1.0) + drawn.random.normal(0, 0.3, ROWS * TOKENS))
    assert nobody.unknown and not nobody.named
    assert told(nobody, drawn.sample.own, 1, 1.0).sentences[0].startswith("recorded log-probs: unknown cause (0.")
    recorded = drawn.at(1.0) + drawn.direction * 0.1 + drawn.rounding()
    assert names(drawn.fitted(recorded)) == ["norm epsilon"]
    drawn.curves["inv_freq in bf16"] = [(1.0, drawn.at(1.0) + drawn.direction * 0.1)]
    assert set(names(drawn.fitted(recorded))) == {"norm epsilon", "inv_freq in bf16"}
    few = replace(drawn.sample, recorded=np.where(np.arange(ROWS * TOKENS) < 12, recorded, np.nan))
    assert fit(few).tokens < 16 and not fit(few).named and not fit(few).unknown


@pytest.mark.parametrize(
    "configured, words",
    [(0.7, "temperature 0.7 was not applied"), (1.0, "the temperature was 1.42"), (None, "the temperature was 1.42")],
)
def test_a_temperature_is_told_in_the_units_that_the_run_was_configured_in(configured, words):
    drawn = Drawn()
    told_ = told(drawn.fitted(drawn.at(1 / 0.7) + drawn.rounding()), drawn.sample.own, 2, configured)
    assert words in told_.sentences[0] and "noise 0.0" in told_.sentences[0]
    assert told_.causes[0].thread == "trl#4159" and "->" in told_.sentences[0]


def test_a_cause_that_leaves_much_more_than_noise_is_not_the_cause_and_a_nearest_one_explains_half():
    """What rounds may flip at some tokens, which is a share of what it does itself, not of another fault that it comes with."""
    drawn = Drawn(noise=1e-6)
    lost, rounding = drawn.random.normal(0, 0.2, ROWS * TOKENS), drawn.random.normal(0, 1e-3, ROWS * TOKENS)
    right = drawn.at(1.0)
    drawn.curves["inv_freq in bf16"] = [(1.0, right + lost + rounding)]
    near = drawn.fitted(right + lost)
    assert near.unknown and near.nearest is not None and near.nearest.name == "inv_freq in bf16"
    drawn.curves["inv_freq in bf16"] = [(1.0, right + 0.02 * lost)]
    assert drawn.fitted(right + lost).unknown and drawn.fitted(right + lost).nearest is None
    flipped = np.where(np.arange(ROWS * TOKENS) % 200 == 1, rounding, 0.0)
    drawn.curves["head in bf16"] = [(1.0, right + rounding)]
    drawn.sample.own["head in bf16"] = 0.0  # type: ignore[index]
    assert names(drawn.fitted(right + rounding + flipped)) == ["head in bf16"]


@pytest.mark.parametrize("seed", range(8))
def test_another_dtype_is_told_by_its_rounding_and_not_by_its_size(seed):
    """A kernel in bf16 shares a part of the rounding of another; a fault of the same size does not. Few tokens leave it open."""
    drawn = Drawn(noise=1e-6, seed=seed)
    right, (rounded, other) = drawn.at(1.0), drawn.random.normal(0, 0.01, (2, ROWS * TOKENS))
    shared = right + 0.5 * rounded + 0.8 * other
    for recorded, known in ((shared, True), (right + other, False), (right + 20 * rounded, False)):
        sample = replace(drawn.sample, recorded=recorded)
        assert rounds_as(sample, fit(sample), right + rounded) is known
    few = replace(drawn.sample, recorded=np.where(np.arange(ROWS * TOKENS) < 60, right + other, np.nan))
    assert rounds_as(few, fit(few), right + rounded) in (None, False)


@pytest.mark.parametrize("noise", [0.01, 1e-6])
def test_a_rollout_is_held_to_the_old_policys_log_probs(noise):
    for seed in range(10):
        drawn = Drawn(noise, seed=seed)
        old = drawn.at(1.0) + drawn.random.normal(0, 0.3, ROWS * TOKENS)
        healthy = fit_to(replace(drawn.sample, recorded=old + drawn.rounding()), old + drawn.rounding())
        assert not healthy.named and not healthy.unknown, seed
        late = np.roll((old + drawn.rounding()).reshape(ROWS, TOKENS), 1, axis=1).ravel()
        assert names(fit_to(replace(drawn.sample, recorded=late), old)) == ["shift"]
    assert fit_to(replace(drawn.sample, recorded=drawn.healthy()), old).unknown


def test_what_an_update_moved_as_well_is_not_named_in_a_rollout():
    """An update sharpens a policy as a temperature does: old log-probs lie on the same side of the truth."""
    drawn = Drawn()
    rollout, old = (drawn.at(1.008) + drawn.rounding() for _ in range(2))
    assert names(drawn.fitted(rollout)) == ["temperature"]
    assert not fit(replace(drawn.sample, recorded=rollout, beside=(old - drawn.at(1.0))[None])).named


def test_interpolation_is_exact_for_a_cubic():
    xs = np.array([-2.0, -1.0, 0.0, 0.5, 3.0])
    cubic = (1.0, -2.0, 0.5, 3.0)
    values = np.polyval(cubic, xs)[:, None]
    assert between(xs, values, 0.3)[0] == pytest.approx(np.polyval(cubic, 0.3))
    assert between(xs, values, -3.0)[0] == pytest.approx(np.polyval(cubic, -3.0))
