"""What a result keeps of an input's outputs, and what the run recorded of its own against them: figures, reasons, and words."""

import hashlib
import math

import pytest
import torch
from reportcases import dump_id, result

from actordbg.actor.forward_outcome import ForwardOutcome
from actordbg.actor.randomness import Randomness
from actordbg.formats.dump_record import DumpRecord
from actordbg.judge.agreement import against_the_run, generators_of, golden_of, not_compared_of
from actordbg.records.replay_record import ResultRecord
from actordbg.replay.output_figures import against_golden, summarise
from actordbg.store.payload import Dump

VALUES = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
MASK = torch.tensor([[True, True, False], [True, False, True]])
ENTROPY = torch.tensor([[9.0, 9.0, 1.0, 2.0, 3.0], [9.0, 9.0, 4.0, 5.0, 6.0]])
"""Of all next tokens, as OpenRLHF returns it: S is 6, and the mask is over the last three."""


def dump(**outputs):
    """A dump of S = 6 with these outputs."""
    record = DumpRecord("d", "r", 0, "2025-06-19T05:26:08.430740Z", batch_size=2, seq_len=6, tokens=12)
    return Dump(record, {f"output.{name}": tensor for name, tensor in outputs.items()})


def outcome(**changes):
    return ForwardOutcome(**({"log_probs": VALUES, "mask": MASK, "forward_s": 1.0, "entropy": ENTROPY[:, 2:]} | changes))


def figures(prefix, count, largest, mean):
    return {f"{prefix}_count": count, f"{prefix}_max_abs": largest, f"{prefix}_mean_abs": mean}


GOLDEN = VALUES + torch.tensor([[0.5, 0.0, 9.0], [-0.25, 9.0, 0.0]])
RNG = {"randomness": Randomness(("cpu",), True)}


@pytest.mark.parametrize(
    "outputs, changes, fields",
    [
        ({"action_log_probs": GOLDEN}, {}, figures("golden", 4, 0.5, 0.75 / 4)),
        # the actions', where it had a mask
        ({"log_probs": GOLDEN, "action_log_probs": VALUES}, {}, figures("golden", 4, 0.0, 0.0)),
        # of all next tokens, and those of the actions only
        ({"entropy": ENTROPY + torch.tensor([8.0, 8.0, 0.5, 0.0, 0.0])}, {}, figures("golden_entropy", 4, 0.5, 0.25)),
        ({"entropy": ENTROPY[:, 2:]}, {}, figures("golden_entropy", 4, 0.0, 0.0)),
        ({}, RNG, {"rng_match": True}),
        ({}, {"randomness": Randomness(("cpu",), False)}, {"rng_match": False}),
        ({}, {}, {}),
    ],
)
def test_what_was_recorded_is_compared_token_by_token_under_the_mask(outputs, changes, fields):
    assert against_golden(dump(**outputs), outcome(**changes), own_model=True) == (fields, {})


def test_a_value_that_is_not_finite_equals_the_same_value_only():
    nan, inf = math.nan, math.inf
    ours = torch.tensor([[nan, -inf, 0.0], [1.0, 0.0, 1.0]])
    again, _ = against_golden(dump(log_probs=ours.clone()), outcome(log_probs=ours), own_model=True)
    assert (again["golden_max_abs"], again["golden_mean_abs"]) == (0.0, 0.0), "the replay has the run's own NaN"
    for value in (nan, inf, 1.0):
        theirs = torch.tensor([[value, -inf, 0.0], [1.0, 0.0, 1.0]])
        fields, _ = against_golden(dump(log_probs=theirs), outcome(log_probs=ours), own_model=True)
        assert math.isfinite(fields["golden_max_abs"]) == math.isnan(value)
        record = ResultRecord("r", "d", "failed", **fields).to_dict()
        assert record["golden_count"] == 4 and (record["golden_max_abs"] is None) != math.isnan(value)


@pytest.mark.parametrize(
    "outputs, changes, own_model, said",
    [
        ({"log_probs": VALUES}, {}, False, {"log-probs": "the embedded tiny model is not the run's"}),
        ({"log_probs": VALUES[:, :2]}, {}, True, {"log-probs": "the run's are [2, 2], the replay's [2, 3]"}),
        ({"entropy": ENTROPY[:, 1:]}, {}, True, {"entropies": "the run's are [2, 4], the replay's [2, 3]"}),
        ({"entropy": ENTROPY}, {"entropy": None}, True, {"entropies": "the replayed call returned no entropies"}),
        ({}, RNG, False, {"generators": "the embedded tiny model"}),
        ({}, {}, False, {}),
        ({}, {"randomness": Randomness(("cpu",), None, "so it is")}, True, {"generators": "so it is"}),
    ],
)
def test_what_was_recorded_and_cannot_be_compared_is_said_with_its_reason(outputs, changes, own_model, said):
    fields, not_compared = against_golden(dump(**outputs), outcome(**changes), own_model=own_model)
    assert fields == {} and not_compared.keys() == said.keys()
    assert all(not_compared[what].startswith(reason) for what, reason in said.items())


RESULTS = [
    result(0, golden_count=5, golden_max_abs=0.0, golden_mean_abs=0.0, golden_entropy_count=5, golden_entropy_max_abs=0.0,
           golden_entropy_mean_abs=0.0, rng_match=True, extra={"restored": ["cpu", "cuda:3"]}),
    result(1, golden_count=5, golden_max_abs=0.5, golden_mean_abs=0.1, rng_match=False, extra={"restored": ["cpu"]}),
    result(2, golden_count=5, golden_max_abs=None, golden_mean_abs=None,
           extra={"not_compared": {"entropies": "no", "generators": "no"}}),
    result(3, extra={"not_compared": {"entropies": "no"}}),
]  # fmt: skip


def test_the_words_name_the_difference_and_the_reason():
    lines = against_the_run(
        golden_of(RESULTS, "golden"), golden_of(RESULTS, "golden_entropy"), generators_of(RESULTS),
        not_compared_of(RESULTS),
    )  # fmt: skip
    assert lines == [
        f"log-probs: 3 inputs, 15 tokens; 1 input equal, |difference| mean 0.05, largest 0.5 nats in {dump_id(1)}; "
        "1 input with a token that is finite on one side only",
        "entropies: 1 input, 5 tokens; all equal",
        f"RNG states: cpu, cuda restored for 2 inputs; 1 ended in the run's state, 1 in another state, e.g. {dump_id(1)}",
        "entropies of 2 inputs, generators of 1 input not compared: no",
    ]
    alone = [result(0)]
    assert (golden_of(alone, "golden"), generators_of(alone), not_compared_of(alone)) == (None, None, ())


NAN = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, math.nan, -6.0]])


def test_figures_are_over_the_masked_tokens_and_the_digest_over_all_bytes_in_c_order():
    entropy = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 6.0]])
    fields = summarise(outcome(log_probs=VALUES, entropy=entropy))
    digest = hashlib.sha256(VALUES.numpy().tobytes()).hexdigest()
    assert fields == {
        "logprob_count": 4, "nonfinite": 0, "output_digest": digest, "entropy_mean": 3.0,
        "logprob_mean": -3.25, "logprob_min": -6.0, "logprob_max": -1.0, "logprob_std": pytest.approx(3.6875**0.5), "status": "passed",
    }  # fmt: skip
    assert summarise(outcome(log_probs=VALUES.T.contiguous().T))["output_digest"] == digest
    assert summarise(outcome(log_probs=VALUES + 1e-6))["output_digest"] != digest


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"mask": ~MASK & MASK}, None),  # without a single token there is nothing to say
        ({"log_probs": NAN, "mask": MASK | True, "loss": 1.0, "grad_norm": 1.0}, "1 of 6 log-probs are not finite"),
        ({"log_probs": NAN}, "1 log-probs outside the mask are not finite"),
        ({"loss": math.nan, "grad_norm": 1.0}, "the loss is not finite"),
        ({"loss": 1.0, "grad_norm": math.inf}, "the gradient norm is not finite"),
    ],
)
def test_a_run_that_ends_with_a_figure_that_is_not_finite_has_failed(changes, said):
    verdict = summarise(outcome(**changes))
    assert (verdict["status"], verdict.get("error")) == ("failed" if said else "passed", said)
    assert verdict.get("signature") == ("non-finite-output" if said else None)
