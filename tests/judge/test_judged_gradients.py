"""Gradients are judged wherever a backward ran: over lanes, parameter by parameter, and what was not judged is said first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparecases import Tensors, given, write_replay

from actordbg.campaign.cell_outcomes import judged
from actordbg.campaign.matrix_document import MatrixContext, matrix_document, verdict_word
from actordbg.document.renderings import as_text
from actordbg.judge.comparing import compare
from actordbg.judge.comparison_document import document
from actordbg.records.comparison_record import MATCH, MISMATCH
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.replay.output_figures import nonfinite_outside, summarise, verdict_of
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(3)]
NAMES = {"q_proj": 64, "input_layernorm": 8, "lm_head": 512}


def gradient(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    return {name: torch.randn(size, generator=generator) for name, size in NAMES.items()}


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(one.double().norm()) ** 2 for one in gradients.values()))


def trained(gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"loss": 2.0, "grad_norm": norm(gradients), "backward_s": 0.5}


def lone(index: int) -> dict[str, Any]:
    """The result of one input by itself."""
    return trained(gradient(index))


def by_norm(store: Store) -> Any:
    """The comparison of two replays of which each has the norms only."""
    write_replay(store, "r-01", INPUTS, result=lone, truth="fp32")
    write_replay(store, "r-02", INPUTS, result=lone)
    return compare(store, "r-02", "r-01")


def write_truth(store: Store) -> str:
    return write_replay(store, "r-01", INPUTS, gradients=gradient, result=lone, truth="fp32", backward=True)


def mean(*indices: int) -> dict[str, torch.Tensor]:
    return {name: torch.stack([gradient(index)[name] for index in indices]).mean(0) for name in NAMES}


def write_lanes(store: Store, name: str, factor: float = 1.0) -> str:
    """Two lanes: the first two inputs together, then the third one with the first again, as a filler."""
    over = [(0, 1), (0, 1), (0, 2)]

    def averaged(index: int) -> dict[str, torch.Tensor]:
        return {key: factor * value for key, value in mean(*over[index]).items()}

    def result(index: int) -> dict[str, Any]:
        ids = [INPUTS[one].dump_id for one in over[index]]
        return trained(averaged(index)) | {"extra": {"temperature": 1.0, "gradient_over": sorted(ids)}}

    return write_replay(store, name, INPUTS, gradients=averaged, result=result, backend="deepspeed", nproc=2)


def first_line(store: Store, record: Any) -> str:
    return as_text(document(record, 10)).splitlines()[0]


def test_gradients_over_several_inputs_are_judged_against_the_mean_of_the_same_inputs(store: Store) -> None:
    truth = write_truth(store)
    right = compare(store, write_lanes(store, "r-02"), truth)
    assert right.verdict == MATCH and right.unjudged == ()
    assert all(one.gradients is not None and (one.gradients.distance or 0.0) < 1e-6 for one in right.dumps)
    assert all(one.grad_norm_rel is not None and one.grad_norm_rel < 1e-6 for one in right.dumps)
    assert first_line(store, right) == "match: A agrees with B within the thresholds"
    alone = write_replay(store, "r-03", INPUTS, gradients=gradient, result=lone)
    for a, b in ((alone, "r-02"), (alone, truth), (write_lanes(store, "r-04"), "r-02")):
        assert compare(store, a, b).unjudged == (), "with averages and with lone inputs, on either side"
    doubled = compare(store, write_lanes(store, "r-05", factor=2.0), truth)
    assert doubled.verdict == MISMATCH and {one.verdict for one in doubled.dumps} == {MISMATCH}
    assert "grad_norm_rel 1 is above 0.001" in doubled.dumps[0].reasons


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("parameter", ["q_proj", "input_layernorm"])
def test_a_parameter_without_a_gradient_is_a_mismatch_in_any_dtype(store: Store, dtype: str, parameter: str) -> None:
    def zeroed(index: int) -> dict[str, torch.Tensor]:
        return gradient(index) | {parameter: torch.zeros(NAMES[parameter])}

    write_replay(store, "r-02", INPUTS, gradients=zeroed, result=lone, dtype=dtype)
    record = compare(store, "r-02", write_truth(store))
    assert not record.good and any(f"({parameter})" in reason for reason in record.dumps[0].reasons)


def test_a_parameter_whose_gradient_is_rounding_only_is_no_mismatch(store: Store) -> None:
    def noise(index: int, size: float) -> dict[str, torch.Tensor]:
        return gradient(index) | {
            "k_bias": size * torch.randn(16, generator=torch.Generator().manual_seed(index + int(1e9 * size)))
        }

    write_replay(store, "r-01", INPUTS, gradients=lambda i: noise(i, 1e-9), result=lone, truth="fp32")
    write_replay(store, "r-02", INPUTS, gradients=lambda i: noise(i, 3e-8), result=lone)
    assert compare(store, "r-02", "r-01").verdict == MATCH


def test_what_was_not_judged_stands_in_the_first_line(store: Store) -> None:
    record = by_norm(store)
    assert record.verdict == MATCH
    assert first_line(store, record) == (
        "match: A agrees with B within the thresholds; not judged: the gradients of 3 of 3 dumps, but for their norm "
        "(--keep-gradients keeps them)"
    )
    over = {"extra": {"temperature": 1.0, "gradient_over": [one.dump_id for one in INPUTS[:2]]}}
    write_replay(store, "r-03", INPUTS, result=lambda index: lone(index) | over)
    averaged = compare(store, "r-03", "r-01")
    assert "not judged: the gradients of 3 of 3 dumps: A's gradient is over 2 inputs, B's over 1" in first_line(store, averaged)


def test_a_cell_that_was_judged_in_part_is_not_plainly_green(store: Store) -> None:
    by_norm(store)
    cell, _ = judged(store, MatrixCell(0, "sdpa", {}, "passed", {}, "r-02"), "fp32")
    assert cell.good and verdict_word(cell) == "in part"
    record = MatrixRecord("m-01", "", "complete", {}, (cell,), tuple(one.dump_id for one in INPUTS))
    lines = as_text(matrix_document(record, MatrixContext())).splitlines()
    assert any(line.startswith("1 cell on 3 dumps: 1 in part") for line in lines)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_outside_the_mask_is_no_match(store: Store, value: float) -> None:
    def odd(index: int, made: Tensors) -> Tensors:
        made["log_probs"][1, -1] = value
        return made

    write_replay(store, "r-01", INPUTS[:1], truth="fp32")
    write_replay(store, "r-02", INPUTS[:1], change=odd)
    (one,) = compare(store, "r-02", "r-01").dumps
    assert one.verdict == MISMATCH
    assert one.reasons == ("1 log-probs outside the mask are not finite on one side only: a product with the mask keeps them",)


def test_a_replay_whose_log_probs_are_not_finite_outside_the_mask_fails() -> None:
    log_probs, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    log_probs[0, 3], mask[0, 3] = math.nan, False
    found = verdict_of(summarise(log_probs, mask, None), None, None, nonfinite_outside(log_probs, mask))
    assert (found["status"], found["error"]) == ("failed", "1 log-probs outside the mask are not finite")
