"""Limits that rounding sets: small faults in bf16 are red, what is right is green, and a green verdict says what it excludes.

Gradients are judged wherever a backward ran: over lanes, parameter by parameter, and what was not checked is said first.
"""

import math

import torch
from comparecases import given, write_replay

from actordbg.campaign.cell_outcomes import judged
from actordbg.campaign.matrix_document import MatrixContext, matrix_document, verdict_word
from actordbg.compare.comparing import compare
from actordbg.document.renderings import as_text
from actordbg.judge.comparison_document import document
from actordbg.records.comparison_record import MATCH, MISMATCH, NoiseRecord
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store

INPUTS, THREE = [given(index, batch=24) for index in range(4)], [given(index) for index in range(3)]
ROUNDING = 0.01


def off(size, seed, shift=0.0):
    """Log-probs that are off by Gaussian errors of this size, and by `shift`."""

    def change(index, made):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        made["log_probs"] += shift + size * torch.randn(made["log_probs"].shape, generator=generator)
        return made

    return change


def written(store, size=ROUNDING, shift=0.0, inputs=INPUTS):
    """A bf16 replay `r-03` against the truth `r-01`, where rounding in bf16 is `ROUNDING` (`r-02`)."""
    write_replay(store, "r-01", inputs, truth="fp32", dtype="bf16")
    write_replay(store, "r-02", inputs, truth="bf16", dtype="bf16", change=off(ROUNDING, 1))
    write_replay(store, "r-03", inputs, dtype="bf16", change=off(size, 2, shift))
    return compare(store, "r-03", "r-01", rounding="r-02")


def first_lines(record):
    return " ".join(as_text(document(record, 10)).split("Dumps, the worst")[0].split())


def test_flat_limits_are_said_and_rounding_is_not_claimed(store):
    assert "matches the truth to bf16 rounding" in first_lines(written(store))
    said = first_lines(compare(store, "r-03", "r-01"))
    assert "not checked: the gradients" not in said and "rounding on these inputs (fixed" in said
    assert "the truth to bf16 rounding" not in said


def test_what_a_green_verdict_excludes_would_really_have_been_red(store, tmp_path):
    record = written(store)
    token, tokens = record.excludes["token"], record.excludes["tokens"]
    assert token is not None and tokens is not None and tokens < token < 0.2
    assert f"any one log-prob wrong by {token:.2g} nats" in first_lines(record)
    assert "run in fp32 first" in first_lines(record)
    noise = NoiseRecord("n-1", "", "r-03", {}, "label", "bf16", (), (), {"max_abs": 0.5})
    excused = compare(store, "r-03", "r-01", rounding="r-02", noise=noise)
    assert (excused.excludes["token"] or 0) > 0.5 and excused.excludes["tokens"] == tokens, "what noise excuses is not excluded"
    for sign in (1, -1):
        shifted = written(Store(tmp_path / f"shifted{sign}").create(), shift=sign * 1.01 * tokens)
        assert shifted.verdict == MISMATCH

        def one(index, made, sign=sign):
            made = off(ROUNDING, 2)(index, made)
            made["log_probs"][0, index] += sign * 1.01 * token
            return made

        write_replay(store, f"r-{5 + sign}", INPUTS, dtype="bf16", change=one)
        assert {dump.verdict for dump in compare(store, f"r-{5 + sign}", "r-01", rounding="r-02").dumps} == {MISMATCH}


def test_planted_faults_say_which_size_would_have_been_noticed(store):
    def with_faults(index, made):
        made = off(ROUNDING, 1)(index, made)
        shifts = {"matrix/0.001": 0.0, "matrix/0.01": 0.3, "matrix/0.1": 3.0, "attention/0.1": 0.001}
        return made | {f"planted/{name}": made["log_probs"] + shift for name, shift in shifts.items()}

    written(store)
    write_replay(store, "r-04", INPUTS, truth="bf16", dtype="bf16", planted=True, change=with_faults)
    record = compare(store, "r-03", "r-01", rounding="r-04")
    assert (record.excludes["matrix"], record.excludes["attention"]) == (0.01, None)
    said = first_lines(record)
    assert "one weight matrix x (1 + 0.01)" in said
    assert "Would have missed errors, of every size tried, in attention scores." in said


def test_a_cell_of_a_matrix_shows_the_smallest_error_of_a_token_that_it_sees(store):
    written(store)
    cell, _ = judged(store, MatrixCell(0, "sdpa", {}, "passed", {"dtype": "bf16"}, "r-03"), "fp32")
    assert cell.good and "locate r-03" in cell.reason and cell.excludes["token"], "nobody looked at its model"
    record = MatrixRecord("m-01", "", "complete", {}, (cell,), tuple(one.dump_id for one in INPUTS), options={"power": True})
    text = " ".join(as_text(matrix_document(record, MatrixContext())).split())
    for told in (
        " detects ",
        "Smaller errors are lost in bf16 rounding: run in fp32 first",
        f"any one log-prob wrong by {cell.excludes['token']:.2g} nats",
    ):
        assert told in text


NAMES = {"q_proj": 64, "input_layernorm": 8, "lm_head": 512}


def gradient(index):
    generator = torch.Generator().manual_seed(100 + index)
    return {name: torch.randn(size, generator=generator) for name, size in NAMES.items()}


def norm(gradients):
    return math.sqrt(sum(float(one.double().norm()) ** 2 for one in gradients.values()))


def trained(gradients):
    return {"loss": 2.0, "grad_norm": norm(gradients), "backward_s": 0.5}


def lone(index):
    """The result of one input on its own."""
    return trained(gradient(index))


def write_truth(store):
    return write_replay(store, "r-01", THREE, gradients=gradient, result=lone, truth="fp32", backward=True)


def mean(*indices):
    return {name: torch.stack([gradient(index)[name] for index in indices]).mean(0) for name in NAMES}


def write_lanes(store, name, factor=1.0):
    """Two lanes: the first two inputs together, then the third one with the first again, as a filler."""
    over = [(0, 1), (0, 1), (0, 2)]

    def averaged(index):
        return {key: factor * value for key, value in mean(*over[index]).items()}

    def result(index):
        ids = [THREE[one].dump_id for one in over[index]]
        return trained(averaged(index)) | {"extra": {"temperature": 1.0, "gradient_over": sorted(ids)}}

    return write_replay(store, name, THREE, gradients=averaged, result=result, backend="deepspeed", nproc=2)


def test_gradients_over_several_inputs_are_judged_against_the_mean_of_the_same_inputs(store):
    truth = write_truth(store)
    right = compare(store, write_lanes(store, "r-02"), truth)
    assert right.verdict == MATCH and [one.said for one in right.unjudged] == [*right.left]
    assert all(one.gradients is not None and (one.gradients.distance or 0.0) < 1e-6 for one in right.dumps)
    assert all(one.grad_norm_rel is not None and one.grad_norm_rel < 1e-6 for one in right.dumps)
    assert "gradients of" not in first_lines(right)
    alone = write_replay(store, "r-03", THREE, gradients=gradient, result=lone)
    for a, b in ((alone, "r-02"), (alone, truth), (write_lanes(store, "r-04"), "r-02")):
        found = compare(store, a, b)
        assert [one.said for one in found.unjudged] == [*found.left], "with averages and with lone inputs, on either side"
    doubled = compare(store, write_lanes(store, "r-05", factor=2.0), truth)
    assert doubled.verdict == MISMATCH and {one.verdict for one in doubled.dumps} == {MISMATCH}
    assert doubled.dumps[0].reasons[0].startswith("gradient_distance 1 is above 0.001 (")
    assert {finding.what for finding in doubled.differing} == {"gradients differ from plain PyTorch's (the truth)"}


def test_what_was_not_judged_stands_in_the_first_line_and_a_cell_of_it_is_not_plainly_green(store):
    write_replay(store, "r-01", THREE, result=lone, truth="fp32")
    write_replay(store, "r-02", THREE, result=lone)
    record = compare(store, "r-02", "r-01")
    assert record.verdict == MATCH
    assert "not checked: the gradients of 3 of 3 dumps, but for their norm (--keep-gradients keeps them)" in first_lines(record)
    over = {"extra": {"temperature": 1.0, "gradient_over": [item.dump_id for item in THREE[:2]]}}
    write_replay(store, "r-03", THREE, result=lambda index: lone(index) | over)
    averaged = first_lines(compare(store, "r-03", "r-01"))
    assert "not checked: the gradients of 3 of 3 dumps: A's gradient is over 2 inputs, B's over 1" in averaged
    cell, _ = judged(store, MatrixCell(0, "sdpa", {}, "passed", {}, "r-02"), "fp32")
    assert cell.good and verdict_word(cell) == "partial"
    matrix = MatrixRecord("m-01", "", "complete", {}, (cell,), tuple(item.dump_id for item in THREE))
    lines = as_text(matrix_document(matrix, MatrixContext())).splitlines()
    assert any(": 1 cell on 3 dumps: 1 partial" in line for line in lines)
