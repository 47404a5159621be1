"""From rows to a Summary: counts add up, steady is steady, and nothing is pooled that may not be."""

from __future__ import annotations

from reportcases import NOW, dump_id, given, replay, result

from actordbg.base.units import letter_of
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.summary import restrict, summarise
from actordbg.replay.replay_data import ReplayData


def summary_of(data: ReplayData, **options) -> ReplaySummary:
    return summarise([data], selection="one replay", now=NOW, **options).replays[0]


def test_the_counts_add_up_to_the_inputs_of_the_plan():
    inputs = [given(i, 200) for i in range(6)]
    results = [result(0), result(1, status="failed"), result(2, status="crashed"), result(3, status="hung")]
    counts = summary_of(replay(inputs, results)).counts
    assert (counts.passed, counts.failed, counts.crashed, counts.hung, counts.not_run) == (1, 1, 1, 1, 2)
    assert counts.inputs == 6


def test_a_report_of_nothing_is_a_report():
    summary = summarise([], selection="the last replay", now=NOW)
    assert summary.replays == ()
    assert summary.totals.inputs == 0
    assert summary.comparison is None


def test_the_configuration_is_the_one_that_the_workers_resolved():
    one = summary_of(replay([given(0, 200)], [result(0)], attn="eager"))
    assert one.asked["attn"] is None
    assert one.resolved["attn"] == "eager"


def test_the_first_measured_input_of_every_worker_start_is_no_steady_input():
    inputs = [given(i, 200) for i in range(5)]
    results = [
        result(0, forward_s=None, status="failed"),  # nothing measured: the next one is the first
        result(1, forward_s=30.0),
        result(2, forward_s=1.0),
        result(3, forward_s=20.0, attempt=2),
        result(4, forward_s=3.0, attempt=2),
    ]
    one = summary_of(replay(inputs, results))
    assert one.forward.count == 2
    assert one.forward.median == 2.0
    assert one.warm_up.first_inputs == 2
    assert one.warm_up.first_forward.largest == 30.0


def test_each_worker_has_its_own_first_input():
    results = [
        result(0, worker=0, forward_s=9.0),
        result(1, worker=1, forward_s=8.0),
        result(2, worker=1, forward_s=1.0),
    ]
    one = summary_of(replay([given(i, 200) for i in range(3)], results))
    assert one.warm_up.first_inputs == 2
    assert one.forward.median == 1.0


def test_inputs_that_compiled_a_graph_are_told_apart():
    results = [
        result(0, forward_s=30.0, graphs=1),
        result(1, forward_s=1.0, graphs=0),
        result(2, forward_s=12.0, graphs=1),
    ]
    one = summary_of(replay([given(i, 200) for i in range(3)], results))
    assert one.forward.median == 1.0
    assert one.warm_up.compiling_inputs == 1
    assert one.warm_up.compiling_forward.median == 12.0
    assert one.compiled is not None
    assert (one.compiled.graphs, one.compiled.graph_breaks) == (2, 0)


def test_without_a_steady_input_there_is_no_steady_figure():
    one = summary_of(replay([given(0, 200)], [result(0, forward_s=7.0)]))
    assert one.forward.median is None
    assert one.tokens_per_s.total is None
    assert [slow.forward_s for slow in one.slowest] == [7.0]
    assert not one.slowest_are_steady


def test_tokens_per_second_has_a_median_over_inputs_and_a_total():
    inputs = [given(0, 100), given(1, 100), given(2, 400), given(3, 300)]
    results = [result(0), result(1, forward_s=1.0), result(2, forward_s=2.0), result(3, forward_s=1.0)]
    one = summary_of(replay(inputs, results))
    assert one.tokens_per_s.median == 200.0  # 100, 200, 300
    assert one.tokens_per_s.total == 200.0  # 800 tokens in 4 s


def test_buckets_hold_every_result_and_the_largest_peak():
    inputs = [given(0, 100), given(1, 300), given(2, 500), given(3, 2000)]
    results = [result(i, forward_s=float(i), peak_memory_bytes=i * 2**20) for i in range(4)]
    buckets = summary_of(replay(inputs, results)).buckets
    assert [(b.label, b.inputs, b.steady) for b in buckets] == [("0-127", 1, 0), ("256-511", 2, 2), ("1024-2047", 1, 1)]
    assert [b.peak_memory_bytes for b in buckets] == [0, 2 * 2**20, 3 * 2**20]
    assert buckets[1].forward.median == 1.5


def test_the_slowest_inputs_are_by_forward_plus_backward():
    inputs = [given(i, 200, rank=i) for i in range(4)]
    results = [result(0), result(1, forward_s=5.0), result(2, forward_s=1.0, backward_s=9.0), result(3)]
    slowest = summary_of(replay(inputs, results), slowest=2).slowest
    assert [(slow.dump_id, slow.rank) for slow in slowest] == [(dump_id(2), 2), (dump_id(1), 1)]


def test_log_probs_are_weighted_by_their_tokens_and_nonfinite_ones_are_counted():
    results = [
        result(0, logprob_mean=-1.0, logprob_count=10, logprob_min=-3.0, logprob_max=-0.1),
        result(1, logprob_mean=-4.0, logprob_count=20, logprob_min=-8.0, logprob_max=-0.2, nonfinite=3, status="failed"),
    ]
    logprobs = summary_of(replay([given(0, 200), given(1, 200)], results)).logprobs
    assert logprobs is not None
    assert (logprobs.mean, logprobs.lowest, logprobs.highest, logprobs.nonfinite) == (-3.0, -8.0, -0.1, 3)


def test_golden_drift_names_the_worst_input_and_is_absent_where_nothing_was_recorded():
    inputs = [given(0, 200), given(1, 200)]
    drift = [result(0, golden_count=5, golden_max_abs=0.5, golden_mean_abs=0.1), result(1)]
    golden = summary_of(replay(inputs, drift)).golden
    assert golden is not None
    assert (golden.results, golden.max_abs, golden.worst_dump) == (1, 0.5, dump_id(0))
    assert summary_of(replay(inputs, [result(0), result(1)])).golden is None


def test_failures_with_one_signature_are_one_group_with_its_explanation():
    results = [result(i, status="failed", signature="known", error=f"error {i}", error_class="RuntimeError") for i in range(5)]
    one = summary_of(
        replay([given(i, 200) for i in range(5)], results),
        explain=lambda name: ("because", ("do this",)) if name == "known" else None,
    )
    (group,) = one.failures
    assert (group.name, group.count, group.known) == ("known", 5, True)
    assert (group.cause, group.explanation, group.ways_out) == ("error 0", "because", ("do this",))
    assert group.examples == (dump_id(0), dump_id(1), dump_id(2))


def test_unknown_failures_that_differ_in_figures_only_are_one_group():
    results = [
        result(0, status="failed", error_class="RuntimeError", error="size 12 at 0xffee"),
        result(1, status="failed", error_class="RuntimeError", error="size 13 at 0x1234"),
        result(2, status="failed", error_class="ValueError", error="size 13 at 0x1234"),
        result(3, status="hung"),
        result(4, status="failed", nonfinite=2),
    ]
    groups = summary_of(replay([given(i, 200) for i in range(5)], results)).failures
    assert [(g.name, g.count) for g in groups] == [
        ("RuntimeError", 2), ("ValueError", 1), ("non-finite log-probs", 1), ("timed out", 1)
    ]  # fmt: skip


def test_the_first_cause_is_the_first_by_time():
    results = [
        result(3, status="failed", error="second", signature="s"),
        result(1, status="failed", error="first", signature="s"),
    ]
    (group,) = summary_of(replay([given(1, 200), given(3, 200)], results)).failures
    assert group.cause == "first"


def test_restricting_keeps_inputs_and_results_together():
    data = restrict(replay([given(i, 200) for i in range(4)], [result(0), result(1)]), {dump_id(1), dump_id(3)}.__contains__)
    assert summary_of(data).counts.inputs == 2
    assert summary_of(data).counts.not_run == 1


def test_labels_go_on_behind_z():
    assert [letter_of(i) for i in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
