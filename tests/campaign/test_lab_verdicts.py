"""A cell's verdict against a truth that is not about every dump."""

from __future__ import annotations

from typing import Any

from comparecases import given, write_replay

from actordbg.campaign.cell_verdicts import judged
from actordbg.campaign.matrix_document import MatrixContext, matrix_document
from actordbg.document.renderings import as_text
from actordbg.records.comparison_record import MATCH
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(3)]


def test_a_good_cell_says_which_part_of_it_the_truth_is_not_about(store: Store) -> None:
    def refused(index: int) -> dict[str, Any]:
        return {"status": "failed", "signature": "images"} if index == 1 else {}

    truth = write_replay(store, "r-01", INPUTS, result=refused, truth="fp32")
    write_replay(store, "r-02", INPUTS)
    found, name = judged(store, MatrixCell(0, "sdpa", {}, "passed", {}, "r-02"), "fp32")
    assert (found.verdict, name) == (MATCH, truth) and found.good
    assert found.reason == "not judged against the truth: 1 of 3 dumps: B: it failed (images)"
    record = MatrixRecord("m-01", "", "complete", {}, (found,), tuple(one.dump_id for one in INPUTS))
    said = " ".join(as_text(matrix_document(record, MatrixContext())).split())
    assert "In part" in said and f"cell 0: {found.reason}" in said


def test_gradients_that_were_averaged_over_other_inputs_are_said_to_be_unjudged(store: Store) -> None:
    trained = {"loss": 2.0, "grad_norm": 4.0, "backward_s": 0.5}
    over = {"extra": {"temperature": 1.0, "gradient_over": [one.dump_id for one in INPUTS[:2]]}}
    write_replay(store, "r-01", INPUTS, result=lambda index: trained, truth="fp32")
    write_replay(store, "r-02", INPUTS, result=lambda index: trained | (over if index < 2 else {}))
    write_replay(store, "r-03", INPUTS)
    averaged, _ = judged(store, MatrixCell(0, "sdpa", {}, "passed", {}, "r-02"), "fp32")
    assert averaged.verdict == MATCH
    assert averaged.reason.startswith(
        "not judged against the truth: the gradients of 2 of 3 dumps: A's gradient is over 2 inputs, B's over 1"
    )
    forward, _ = judged(store, MatrixCell(0, "sdpa", {}, "passed", {}, "r-03"), "fp32")
    assert (forward.verdict, forward.reason) == (MATCH, ""), "without a backward there was nothing to judge"
