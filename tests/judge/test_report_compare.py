"""Replays side by side: what differs, how much faster, and whether the outputs are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reportcases import given, replay, result

from actordbg.judge.summary import compare


def test_only_settings_that_differ_are_named():
    inputs = [given(0, 200)]
    comparison = compare([replay(inputs, [result(0)]), replay(inputs, [result(0, "r2")], "r2", attn="eager")], ["A", "B"])
    assert comparison.rows[0].differs == {"attn": "sdpa"}
    assert comparison.rows[1].differs == {"attn": "eager"}
    assert comparison.shared["model"] == "tiny"
    assert "attn" not in comparison.shared


def test_what_a_replay_did_not_report_differs_in_none():
    """No worker of the first one became ready; the third is a truth, without an Actor's file."""
    inputs = [given(0, 200)]
    began = replay(inputs, [result(0)], "r2", actor_path="/actor.py", engine=None, parameters=7)
    truth = replay(inputs, [result(0)], "r3", parameters=7, model_path="/llama.py")
    for replays in ([replace(replay(inputs, []), resolved={}), began, truth], [began, truth]):
        comparison = compare(replays, list("ABC")[: len(replays)])
        names = {name for row in comparison.rows for name in row.differs}
        assert not names & {"actor_path", "engine", "parameters", "model_path"}
        assert (comparison.shared["parameters"], comparison.shared["engine"]) == (7, None)
    other = replay(inputs, [result(0)], "r4", parameters=8)
    assert [row.differs.get("parameters") for row in compare([began, truth, other], list("ABC")).rows] == [7, 7, 8]


def test_the_ratio_is_taken_input_by_input_over_what_is_steady_in_both():
    inputs = [given(i, 200) for i in range(4)]
    ours = [result(0, forward_s=9.0), result(1, forward_s=1.0), result(2, forward_s=2.0), result(3, forward_s=100.0)]
    theirs = [result(0, "r2", forward_s=9.0), result(1, "r2", forward_s=2.0), result(2, "r2", forward_s=8.0)]
    row = compare([replay(inputs, ours), replay(inputs, theirs, "r2")], ["A", "B"]).rows[1]
    assert (row.common, row.timed) == (3, 2)
    assert row.forward_ratio == pytest.approx(3.0)  # 2 and 4


def test_replays_of_different_inputs_have_no_ratio():
    row = compare([replay([given(0, 200)], [result(0)]), replay([given(1, 200)], [result(1, "r2")], "r2")], ["A", "B"]).rows[1]
    assert (row.common, row.timed, row.forward_ratio) == (0, 0, None)


def test_digests_are_compared_where_both_passed():
    inputs = [given(i, 200) for i in range(4)]
    ours = [result(0), result(1), result(2), result(3, output_digest=None)]
    theirs = [
        result(0, "r2"),
        result(1, "r2", output_digest="other"),
        result(2, "r2", status="failed"),
        result(3, "r2"),
    ]
    row = compare([replay(inputs, ours), replay(inputs, theirs, "r2")], ["A", "B"]).rows[1]
    assert (row.digests_equal, row.digests_differ) == (1, 1)


def test_how_far_mean_log_probs_moved_is_told_where_both_passed():
    inputs = [given(i, 200) for i in range(3)]
    ours = [result(0, logprob_mean=-2.0), result(1, logprob_mean=-3.0), result(2, logprob_mean=-1.0)]
    theirs = [result(0, "r2", logprob_mean=-2.5), result(1, "r2", logprob_mean=-3.25), result(2, "r2", status="failed")]
    rows = compare([replay(inputs, ours), replay(inputs, theirs, "r2")], ["A", "B"]).rows
    assert rows[1].mean_moved == pytest.approx(0.5)
    assert rows[0].mean_moved == 0


def test_replays_that_have_nothing_in_common_did_not_agree():
    rows = compare([replay([given(0, 9)], [result(0)]), replay([given(1, 9)], [result(1, "r2")], "r2")], ["A", "B"]).rows
    assert (rows[1].mean_moved, rows[1].digests_equal, rows[1].digests_differ) == (None, 0, 0)


def test_what_always_differs_between_two_workers_is_no_setting():
    inputs = [given(0, 200)]
    comparison = compare(
        [replay(inputs, [result(0)], load_s=1.0, rank=0), replay(inputs, [result(0, "r2")], "r2", load_s=2.0, rank=1)],
        ["A", "B"],
    )
    assert comparison.rows[1].differs == {}
