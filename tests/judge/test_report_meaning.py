"""What a comparison says in words about A: how near the truth it is, or what it has that B has not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actordbg.config.as_ran import as_ran, label, telling
from actordbg.config.replay_config import ReplayConfig
from actordbg.judge.comparison_document import meaning
from actordbg.records.comparison_record import MATCH, MISMATCH, WITHIN_NOISE, ComparisonRecord, SideInfo


def side(replay_id: str, **settings: Any) -> SideInfo:
    values = as_ran(ReplayConfig(attn="sdpa", **settings))
    return SideInfo("replay", replay_id, label(values), values["dtype"], telling(values))


PACKED = side("r-01", dtype="bf16", packing=True)
PADDED = side("r-02", dtype="fp32", packing=False)
TRUTH = SideInfo("truth", "r-03", "TOY MODEL (tiny), the truth in fp32 of bf16 weights", "fp32")


FLAT = "A is within what bf16 does to any model; whether it is within what bf16 does to this one is not known."


def said(a: SideInfo, b: SideInfo, verdict: str, noise: str | None = None, rounding: str | None = "r-04") -> str:
    return meaning(ComparisonRecord("c-01", "", a, b, {}, verdict, (), noise_id=noise, rounding_id=rounding))


@pytest.mark.parametrize("verdict", [MATCH, WITHIN_NOISE])
def test_beside_the_truth_a_good_verdict_says_that_it_is_right(verdict: str) -> None:
    assert said(PACKED, TRUTH, verdict) == "A is as near the truth as bf16 allows."
    assert said(PACKED, TRUTH, verdict, rounding=None) == FLAT, "only what was measured is claimed"


def test_beside_the_truth_a_mismatch_is_more_than_rounding() -> None:
    assert said(PACKED, TRUTH, MISMATCH).startswith("A is further from the truth than bf16 explains: more than rounding")
    assert "and than its own noise floor" in said(PACKED, TRUTH, MISMATCH, "n-01")


def test_thresholds_of_somebodys_own_are_not_taken_for_what_the_dtype_allows() -> None:
    def own(verdict: str) -> str:
        source = "defaults for bf16; max_abs from flags"
        return meaning(ComparisonRecord("c-01", "", PACKED, TRUTH, {}, verdict, (), thresholds_from=source))

    assert own(MATCH) == "A is as near the truth as the thresholds ask."
    assert own(MISMATCH) == "A is further from the truth than the thresholds allow."
    assert own(WITHIN_NOISE) == FLAT


def test_two_replays_are_told_apart_by_their_settings() -> None:
    assert said(PACKED, PADDED, MATCH) == "A is bf16, packed, B fp32, not packed; no log-prob moves beyond the thresholds."
    wrong = said(PACKED, PADDED, MISMATCH)
    assert wrong.startswith("A is bf16, packed, B fp32, not packed.")
    assert "`actordbg compare r-01 truth`" in wrong
    assert said(PACKED, PACKED, MATCH).startswith("Both are configured alike")
    compiled = side("r-03", dtype="bf16", packing=True, compile=True)
    assert said(PACKED, compiled, MATCH).startswith("A is not compiled, B compiled; ")


def test_a_comparison_of_an_earlier_version_has_labels_only() -> None:
    old, other = replace(PACKED, settings={}), replace(PADDED, settings={})
    assert said(old, other, MATCH).startswith(
        "A is TOY MODEL (tiny) bf16 sdpa, packed, plain; B is TOY MODEL (tiny) fp32 sdpa, not packed, plain;"
    )
    assert said(old, old, MATCH).startswith("Both are configured alike;")
