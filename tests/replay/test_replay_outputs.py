"""What a result keeps of an input's outputs."""

from __future__ import annotations

import hashlib

import pytest
import torch

from actordbg.replay.output_figures import summarise, verdict_of

VALUES = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, float("nan"), -6.0]])
MASK = torch.tensor([[True, True, False], [True, False, True]])


def test_figures_are_over_the_masked_tokens_only() -> None:
    fields = summarise(VALUES, MASK, None)
    chosen = torch.tensor([-1.0, -2.0, -4.0, -6.0], dtype=torch.float64)
    assert fields["logprob_count"] == 4 and fields["nonfinite"] == 0
    assert fields["logprob_mean"] == pytest.approx(float(chosen.mean()))
    assert fields["logprob_std"] == pytest.approx(float(chosen.std(correction=0)))
    assert (fields["logprob_min"], fields["logprob_max"]) == (-6.0, -1.0)
    assert verdict_of(fields, None, None) == {"status": "passed"}


def test_the_digest_is_over_all_float32_bytes_in_c_order() -> None:
    expected = hashlib.sha256(VALUES.numpy().tobytes()).hexdigest()
    assert summarise(VALUES, MASK, None)["output_digest"] == expected
    assert summarise(VALUES.T.contiguous().T, MASK, None)["output_digest"] == expected
    assert summarise(VALUES + 1e-6, MASK, None)["output_digest"] != expected


def test_a_run_that_ends_with_a_nan_among_its_tokens_has_failed() -> None:
    fields = summarise(VALUES, torch.ones_like(MASK), None)
    assert fields["nonfinite"] == 1 and fields["logprob_mean"] == pytest.approx(-16 / 5)
    verdict = verdict_of(fields, 1.0, 1.0)
    assert verdict["status"] == "failed" and verdict["signature"] == "non-finite-output"
    assert verdict["error"] == "1 of 6 log-probs are not finite"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_or_gradient_norm_that_is_not_finite_is_a_failure(bad: float) -> None:
    fields = summarise(VALUES, MASK, None)
    assert verdict_of(fields, bad, 1.0)["error"] == "the loss is not finite"
    assert verdict_of(fields, 1.0, bad)["error"] == "the gradient norm is not finite"


def test_an_input_without_a_single_token_passes_with_nothing_to_say() -> None:
    fields = summarise(VALUES, torch.zeros_like(MASK), None)
    assert fields["logprob_count"] == 0 and "logprob_mean" not in fields
    assert verdict_of(fields, None, None)["status"] == "passed"


def test_entropy_is_averaged_over_the_same_tokens() -> None:
    entropy = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 6.0]])
    assert summarise(VALUES, MASK, entropy)["entropy_mean"] == pytest.approx(3.0)
