"""From rows to a Summary: counts add up, steady is steady, nothing is pooled that may not be; and replays side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from reportcases import NOW, dump_id, given, replay, result

from actordbg.actor.signatures import known_failures
from actordbg.base.units import letter_of
from actordbg.judge.report_model import Against, ReplaySummary, SideBySide
from actordbg.judge.summary import compare, summarise
from actordbg.records.replay_record import ResultRecord, bucket_of, percentile, spread, weighted_mean


def of(*results: ResultRecord, lengths: Sequence[int] = (200,) * 6) -> ReplaySummary:
    """What a report says of a replay of inputs of these lengths, input i of rank i, with these results."""
    inputs = [given(index, seq_len, rank=index) for index, seq_len in enumerate(lengths)]
    return summarise([replay(inputs, list(results))], selection="one replay", now=NOW).replays[0]


def test_the_counts_add_up_to_the_inputs_of_the_plan():
    counts = of(result(0), result(1, status="failed"), result(2, status="crashed"), result(3, status="hung")).counts
    assert (counts.passed, counts.failed, counts.crashed, counts.hung, counts.not_run, counts.inputs) == (1, 1, 1, 1, 2, 6)
    nothing = summarise([], selection="the last replay", now=NOW)
    assert (nothing.replays, nothing.totals.inputs, nothing.comparison) == ((), 0, None)


def test_the_first_measured_input_of_every_worker_start_is_no_steady_input():
    again = of(
        result(0, forward_s=None, status="failed"),  # nothing measured: the next one is the first
        result(1, forward_s=30.0), result(2, forward_s=1.0), result(3, forward_s=20.0, attempt=2), result(4, forward_s=3.0, attempt=2),
    )  # fmt: skip
    assert (again.forward.count, again.forward.median) == (2, 2.0)
    assert (again.warm_up.first_inputs, again.warm_up.first_forward.largest) == (2, 30.0)
    two = of(result(0, worker=0, forward_s=9.0), result(1, worker=1, forward_s=8.0), result(2, worker=1))
    assert (two.warm_up.first_inputs, two.forward.median) == (2, 1.0)
    none = of(result(0, forward_s=7.0))
    assert (none.forward.median, none.tokens_per_s.total, none.slowest_are_steady) == (None, None, False)
    assert [slow.forward_s for slow in none.slowest] == [7.0]


def test_inputs_that_compiled_a_graph_are_told_apart():
    one = of(result(0, forward_s=30.0, graphs=1), result(1, graphs=0), result(2, forward_s=12.0, graphs=1))
    assert one.forward.median == 1.0
    assert (one.warm_up.compiling_inputs, one.warm_up.compiling_forward.median) == (1, 12.0)
    assert one.compiled is not None and (one.compiled.graphs, one.compiled.graph_breaks) == (2, 0)


def test_tokens_per_second_has_a_median_over_inputs_and_a_total():
    speed = of(result(0), result(1), result(2, forward_s=2.0), result(3), lengths=(100, 100, 400, 300)).tokens_per_s
    assert (speed.median, speed.total) == (200.0, 200.0)  # 100, 200, 300; 800 tokens in 4 s


def test_buckets_hold_every_result_and_the_largest_peak():
    results = [result(i, forward_s=float(i), peak_memory_bytes=i * 2**20) for i in range(4)]
    buckets = of(*results, lengths=(100, 300, 500, 2000)).buckets
    assert [(b.label, b.inputs, b.steady) for b in buckets] == [("0-127", 1, 0), ("256-511", 2, 2), ("1024-2047", 1, 1)]
    assert [b.peak_memory_bytes for b in buckets] == [0, 2 * 2**20, 3 * 2**20]
    assert buckets[1].forward.median == 1.5


def test_the_slowest_inputs_are_by_forward_plus_backward():
    slowest = of(result(0), result(1, forward_s=5.0), result(2, backward_s=9.0), result(3)).slowest
    assert [(slow.dump_id, slow.rank) for slow in slowest[:2]] == [(dump_id(2), 2), (dump_id(1), 1)]


def test_log_probs_are_weighted_by_their_tokens_and_nonfinite_ones_are_counted():
    logprobs = of(
        result(0, logprob_mean=-1.0, logprob_count=10, logprob_min=-3.0, logprob_max=-0.1),
        result(1, logprob_mean=-4.0, logprob_count=20, logprob_min=-8.0, logprob_max=-0.2, nonfinite=3, status="failed"),
    ).logprobs
    assert logprobs is not None
    assert (logprobs.mean, logprobs.lowest, logprobs.highest, logprobs.nonfinite) == (-3.0, -8.0, -0.1, 3)


def test_failures_with_one_signature_are_one_group_with_its_explanation_and_the_first_cause_by_time():
    known = next(iter(known_failures().values()))
    results = [result(i, status="failed", signature=known.id, error=f"error {i}", error_class="X") for i in (3, 0, 1, 2, 4)]
    (group,) = of(*results).failures
    assert (group.name, group.count, group.known) == (known.id, 5, True)
    assert (group.cause, group.explanation, group.ways_out) == ("error 0", known.explanation, known.ways_out)
    assert group.examples == (dump_id(0), dump_id(1), dump_id(2))


def test_unknown_failures_that_differ_in_figures_only_are_one_group():
    groups = of(
        result(0, status="failed", error_class="RuntimeError", error="size 12 at 0xffee"),
        result(1, status="failed", error_class="RuntimeError", error="size 13 at 0x1234"),
        result(2, status="failed", error_class="ValueError", error="size 13 at 0x1234"),
        result(3, status="hung"),
        result(4, status="failed", nonfinite=2),
    ).failures
    assert [(g.name, g.count) for g in groups] == [
        ("RuntimeError", 2), ("ValueError", 1), ("non-finite log-probs", 1), ("timed out", 1)
    ]  # fmt: skip


def test_labels_go_on_behind_z():
    assert [letter_of(i) for i in (0, 25, 26, 702)] == ["A", "Z", "AA", "AAA"]


INPUTS = [given(index, 200) for index in range(4)]


def reported(ours: dict[str, object], theirs: dict[str, object]) -> SideBySide:
    """Two replays of one input whose workers reported these settings."""
    return compare([replay(INPUTS[:1], [result(0)], **ours), replay(INPUTS[:1], [result(0)], "r2", **theirs)], ["A", "B"])


def against(ours: list[ResultRecord], theirs: list[ResultRecord]) -> Against:
    """The second of two replays beside the first."""
    return compare([replay(INPUTS, ours), replay(INPUTS, theirs, "r2")], ["A", "B"]).rows[1]


def test_only_settings_that_differ_are_named():
    comparison = reported({}, {"attn": "eager"})
    assert [row.differs for row in comparison.rows] == [{"attn": "sdpa"}, {"attn": "eager"}]
    assert comparison.shared["model"] == "tiny" and "attn" not in comparison.shared
    assert reported({"load_s": 1.0, "rank": 0}, {"load_s": 2.0, "rank": 1}).rows[1].differs == {}, "always another one"


def test_what_a_replay_did_not_report_differs_in_none():
    """No worker of the first one became ready; the third is a truth, without an Actor's file."""
    inputs = INPUTS[:1]
    began = replay(inputs, [result(0)], "r2", actor_path="/actor.py", engine=None, parameters=7)
    truth = replay(inputs, [result(0)], "r3", parameters=7, model_path="/llama.py")
    comparison = compare([replace(replay(inputs, []), resolved={}), began, truth], list("ABC"))
    names = {name for row in comparison.rows for name in row.differs}
    assert not names & {"actor_path", "engine", "parameters", "model_path"}
    assert (comparison.shared["parameters"], comparison.shared["engine"]) == (7, None)


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


@settings(deadline=None)  # the first example pays for numpy's import, others for a busy machine
@hypothesis_given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_a_percentile_is_numpys_default(values: list[float], percent: float):
    assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), abs=1e-6)


def test_a_spread_leaves_out_what_is_missing_and_nothing_measured_is_none_not_zero():
    some, empty = spread([1.0, None, 3.0]), spread([None, math.nan, math.inf])
    assert (some.median, some.total) == (2.0, 4.0)
    assert (empty.count, empty.median, empty.p95, empty.largest) == (0, None, None, None)
    assert weighted_mean([(None, 3), (2.0, 0)]) is None and weighted_mean([(1.0, 1), (4.0, 2)]) == 3.0


@pytest.mark.parametrize(
    ("seq_len", "bucket"),
    [(0, (0, 127)), (127, (0, 127)), (128, (128, 255)), (255, (128, 255)), (1861, (1024, 2047)), (2048, (2048, 4095))],
)
def test_buckets_are_powers_of_two_from_128(seq_len: int, bucket: tuple[int, int]):
    assert bucket_of(seq_len) == bucket
