"""Replays side by side: what differs, how much faster, and whether the outputs are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reportcases import given, replay, result

from actordbg.judge.report_model import Against, SideBySide
from actordbg.judge.summary import compare
from actordbg.records.replay_record import ResultRecord

INPUTS = [given(index, 200) for index in range(4)]


def settings(ours: dict[str, object], theirs: dict[str, object]) -> SideBySide:
    """Two replays of one input whose workers reported these settings."""
    return compare([replay(INPUTS[:1], [result(0)], **ours), replay(INPUTS[:1], [result(0)], "r2", **theirs)], ["A", "B"])


def against(ours: list[ResultRecord], theirs: list[ResultRecord]) -> Against:
    """The second of two replays beside the first."""
    return compare([replay(INPUTS, ours), replay(INPUTS, theirs, "r2")], ["A", "B"]).rows[1]


def test_only_settings_that_differ_are_named():
    comparison = settings({}, {"attn": "eager"})
    assert [row.differs for row in comparison.rows] == [{"attn": "sdpa"}, {"attn": "eager"}]
    assert comparison.shared["model"] == "tiny" and "attn" not in comparison.shared
    assert settings({"load_s": 1.0, "rank": 0}, {"load_s": 2.0, "rank": 1}).rows[1].differs == {}, "always another one"


def test_what_a_replay_did_not_report_differs_in_none():
    """No worker of the first one became ready; the third is a truth, without an Actor's file."""
    inputs = INPUTS[:1]
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
    ours = [result(index, forward_s=took) for index, took in enumerate((9.0, 1.0, 2.0, 100.0))]
    row = against(ours, [result(index, forward_s=took) for index, took in enumerate((9.0, 2.0, 8.0))])
    assert (row.common, row.timed) == (3, 2)
    assert row.forward_ratio == pytest.approx(3.0)  # 2 and 4


def test_outputs_are_compared_where_both_passed():
    row = against(
        [result(0), result(1, logprob_mean=-3.0), result(2), result(3, output_digest=None)],
        [
            result(0, logprob_mean=-2.5),
            result(1, logprob_mean=-3.25, output_digest="other"),
            result(2, status="failed"),
            result(3),
        ],
    )
    assert (row.digests_equal, row.digests_differ, row.mean_moved) == (1, 1, pytest.approx(0.5))
    assert against([result(0)], [result(0)]).mean_moved == 0
    assert against([result(0, logprob_mean=float("inf"))], [result(0)]).mean_moved is None


def test_replays_that_have_nothing_in_common_did_not_agree_and_have_no_ratio():
    row = against([result(0)], [result(1)])
    assert (row.common, row.timed, row.forward_ratio, row.mean_moved) == (0, 0, None, None)
    assert (row.digests_equal, row.digests_differ) == (0, 0)
