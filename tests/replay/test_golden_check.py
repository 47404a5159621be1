"""What the run recorded of its own results against the replay's: figures, reasons not to compare, and the words for both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reportcases import NOW, dump_id, given, replay, result

from actordbg.actor.forward_outcome import ForwardOutcome
from actordbg.actor.randomness import Randomness
from actordbg.document.renderings import as_text
from actordbg.formats.dump_record import DumpRecord
from actordbg.judge.agreement import against_the_run, generators_of, golden_of, not_compared_of
from actordbg.judge.replay_document import document
from actordbg.judge.summary import summarise
from actordbg.records.replay_record import ResultRecord
from actordbg.replay.output_figures import against_golden, log_probs_of, of_the_masked
from actordbg.store.payload import Dump

VALUES = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
MASK = torch.tensor([[True, True, False], [True, False, True]])
ENTROPY = torch.tensor([[9.0, 9.0, 1.0, 2.0, 3.0], [9.0, 9.0, 4.0, 5.0, 6.0]])
"""Of all next tokens, as OpenRLHF returns it: S is 6, and the mask is over the last three."""


def dump(**outputs: torch.Tensor) -> Dump:
    """A dump of S = 6 with these outputs."""
    record = DumpRecord("d", "r", 0, "2025-06-19T05:26:08.430740Z", batch_size=2, seq_len=6, tokens=12)
    return Dump(record, {f"output.{name}": tensor for name, tensor in outputs.items()})


def outcome(**changes: Any) -> ForwardOutcome:
    return ForwardOutcome(**({"log_probs": VALUES, "mask": MASK, "forward_s": 1.0, "entropy": ENTROPY[:, 2:]} | changes))


def test_log_probs_are_compared_token_by_token_under_the_mask() -> None:
    golden = VALUES + torch.tensor([[0.5, 0.0, 9.0], [-0.25, 9.0, 0.0]])
    found = against_golden(dump(action_log_probs=golden), outcome(), own_model=True)
    assert found.fields == {"golden_count": 4, "golden_max_abs": 0.5, "golden_mean_abs": 0.75 / 4}
    assert found.not_compared == {}


def test_entropies_of_all_next_tokens_are_compared_where_the_log_probs_are() -> None:
    off = ENTROPY + torch.tensor([8.0, 8.0, 0.5, 0.0, 0.0])
    found = against_golden(dump(entropy=off), outcome(), own_model=True)
    assert found.fields == {
        "golden_entropy_count": 4, "golden_entropy_max_abs": 0.5, "golden_entropy_mean_abs": 1.0 / 4
    }  # fmt: skip
    same = against_golden(dump(entropy=ENTROPY[:, 2:]), outcome(), own_model=True)
    assert same.fields["golden_entropy_max_abs"] == 0.0, "entropies that are the actions' only"


def test_the_entropies_of_a_call_without_an_action_mask_are_taken_whole() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert of_the_masked(ENTROPY, mask, seq_len=6) is not None
    assert torch.equal(of_the_masked(ENTROPY, mask, seq_len=6), ENTROPY)


def test_a_value_that_is_not_finite_equals_the_same_value_only() -> None:
    nan, inf = math.nan, math.inf
    ours = torch.tensor([[nan, -inf, 0.0], [1.0, 0.0, 1.0]])
    again = against_golden(dump(log_probs=ours.clone()), outcome(log_probs=ours), own_model=True).fields
    assert (again["golden_max_abs"], again["golden_mean_abs"]) == (0.0, 0.0), "the replay has the run's own NaN"
    for value in (nan, inf, 1.0):
        theirs = torch.tensor([[value, -inf, 0.0], [1.0, 0.0, 1.0]])
        fields = against_golden(dump(log_probs=theirs), outcome(log_probs=ours), own_model=True).fields
        assert math.isfinite(fields["golden_max_abs"]) == math.isnan(value)
        record = ResultRecord("r", "d", "failed", **fields).to_dict()
        assert record["golden_count"] == 4 and (record["golden_max_abs"] is None) != math.isnan(value)


@pytest.mark.parametrize(
    ("outputs", "changes", "own_model", "said"),
    [
        ({"log_probs": VALUES}, {}, False, {"log-probs": "the embedded tiny model is not the run's"}),
        ({"log_probs": VALUES[:, :2]}, {}, True, {"log-probs": "the run's are [2, 2], the replay's [2, 3]"}),
        ({"entropy": ENTROPY[:, 1:]}, {}, True, {"entropies": "the run's are [2, 4], the replay's [2, 3]"}),
        ({"entropy": ENTROPY}, {"entropy": None}, True, {"entropies": "the replayed call returned no entropies"}),
        ({}, {"randomness": Randomness(("cpu",), True)}, False, {"generators": "the embedded tiny model"}),
        ({}, {"randomness": Randomness(("cpu",), None, "so it is")}, True, {"generators": "so it is"}),
    ],
)
def test_what_was_recorded_and_cannot_be_compared_is_said_with_its_reason(
    outputs: dict[str, torch.Tensor], changes: dict[str, Any], own_model: bool, said: dict[str, str]
) -> None:
    found = against_golden(dump(**outputs), outcome(**changes), own_model=own_model)
    assert found.fields == {} and found.not_compared.keys() == said.keys()
    assert all(found.not_compared[what].startswith(reason) for what, reason in said.items())


def test_nothing_is_said_of_what_was_not_recorded() -> None:
    for own_model in (True, False):
        found = against_golden(dump(), outcome(), own_model=own_model)
        assert (found.fields, found.not_compared) == ({}, {})


@pytest.mark.parametrize("match", [True, False])
def test_whether_the_generators_ended_as_the_runs_did_is_a_field(match: bool) -> None:
    found = against_golden(dump(), outcome(randomness=Randomness(("cpu",), match)), own_model=True)
    assert (found.fields, found.not_compared) == ({"rng_match": match}, {})


def test_the_log_probs_are_those_of_the_actions_where_the_call_had_a_mask() -> None:
    actions, every = VALUES[:, -2:], VALUES
    assert log_probs_of({"action_log_probs": actions, "entropy": every}) is actions
    assert log_probs_of({"log_probs": every}) is every
    assert log_probs_of({"entropy": every}) is None


RESULTS = [
    result(0, golden_count=5, golden_max_abs=0.0, golden_mean_abs=0.0, golden_entropy_count=5, golden_entropy_max_abs=0.0,
           golden_entropy_mean_abs=0.0, rng_match=True, extra={"restored": ["cpu", "cuda:3"]}),
    result(1, golden_count=5, golden_max_abs=0.5, golden_mean_abs=0.1, rng_match=False, extra={"restored": ["cpu"]}),
    result(2, golden_count=5, golden_max_abs=None, golden_mean_abs=None,
           extra={"not_compared": {"entropies": "no", "generators": "no"}}),
    result(3, extra={"not_compared": {"entropies": "no"}}),
]  # fmt: skip


def test_figures_over_results_tell_equal_different_and_not_finite_apart() -> None:
    golden = golden_of(RESULTS, "golden")
    assert golden is not None
    assert (golden.results, golden.equal, golden.nonfinite, golden.count) == (3, 1, 1, 15)
    assert (golden.max_abs, golden.mean_abs, golden.worst_dump) == (0.5, 0.05, dump_id(1))
    drawn = generators_of(RESULTS)
    assert drawn is not None
    assert (drawn.restored, drawn.devices, drawn.matched, drawn.differed) == (2, ("cpu", "cuda"), 1, 1)
    assert drawn.example == dump_id(1)
    assert [(one.what, one.count) for one in not_compared_of(RESULTS)] == [("entropies", 2), ("generators", 1)]
    assert (golden_of([result(0)], "golden"), generators_of([result(0)]), not_compared_of([result(0)])) == (
        None, None, (),
    )  # fmt: skip


def test_the_words_name_the_difference_and_the_reason() -> None:
    lines = against_the_run(
        golden_of(RESULTS, "golden"), golden_of(RESULTS, "golden_entropy"), generators_of(RESULTS),
        not_compared_of(RESULTS),
    )  # fmt: skip
    assert lines == [
        f"log-probs: 3 inputs, 15 tokens; 1 input equal, |difference| mean 0.05, largest 0.5 nats in {dump_id(1)}; "
        "1 input with a token that is finite on one side only",
        "entropies: 1 input, 5 tokens; all equal",
        f"generators: cpu, cuda set to the recorded states for 2 inputs; 1 ended in the run's own, 1 in others, e.g. {dump_id(1)}",
        "entropies of 2 inputs, generators of 1 input not compared: no",
    ]


def test_a_report_says_it_under_numbers_and_beside_the_configuration() -> None:
    inputs = [given(i, 200) for i in range(4)]
    again = [result(i, "r2") for i in range(4)]
    data = [replay(inputs, RESULTS), replay(inputs, again, "r2", attn="eager")]
    text = " ".join(as_text(document(summarise(data, selection="two", now=NOW))).split())
    assert "against the run's own entropies: 1 input, 5 tokens; all equal" in text
    assert "log-probs at most 0.5 nats from the run's own (1 input not finite on one side)" in text
