"""From rows to a Summary: counts add up, steady is steady, and nothing is pooled that may not be."""

from __future__ import annotations

from collections.abc import Sequence

from reportcases import NOW, dump_id, given, replay, result

from actordbg.base.units import letter_of
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.summary import restrict, summarise
from actordbg.records.replay_record import ResultRecord


def of(*results: ResultRecord, lengths: Sequence[int] = (200,) * 6, **options) -> ReplaySummary:
    """What a report says of a replay of inputs of these lengths, input i of rank i, with these results."""
    inputs = [given(index, seq_len, rank=index) for index, seq_len in enumerate(lengths)]
    return summarise([replay(inputs, list(results))], selection="one replay", now=NOW, **options).replays[0]


def test_the_counts_add_up_to_the_inputs_of_the_plan():
    counts = of(result(0), result(1, status="failed"), result(2, status="crashed"), result(3, status="hung")).counts
    assert (counts.passed, counts.failed, counts.crashed, counts.hung, counts.not_run, counts.inputs) == (1, 1, 1, 1, 2, 6)


def test_a_report_of_nothing_is_a_report():
    summary = summarise([], selection="the last replay", now=NOW)
    assert (summary.replays, summary.totals.inputs, summary.comparison) == ((), 0, None)


def test_the_configuration_is_the_one_that_the_workers_resolved():
    data = replay([given(0, 200)], [result(0)], attn="eager")
    summary = summarise([data], selection="one", now=NOW).replays[0]
    assert (summary.asked["attn"], summary.resolved["attn"]) == (None, "eager")


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
    slowest = of(result(0), result(1, forward_s=5.0), result(2, backward_s=9.0), result(3), slowest=2).slowest
    assert [(slow.dump_id, slow.rank) for slow in slowest] == [(dump_id(2), 2), (dump_id(1), 1)]


def test_log_probs_are_weighted_by_their_tokens_and_nonfinite_ones_are_counted():
    logprobs = of(
        result(0, logprob_mean=-1.0, logprob_count=10, logprob_min=-3.0, logprob_max=-0.1),
        result(1, logprob_mean=-4.0, logprob_count=20, logprob_min=-8.0, logprob_max=-0.2, nonfinite=3, status="failed"),
    ).logprobs
    assert logprobs is not None
    assert (logprobs.mean, logprobs.lowest, logprobs.highest, logprobs.nonfinite) == (-3.0, -8.0, -0.1, 3)


def test_failures_with_one_signature_are_one_group_with_its_explanation_and_the_first_cause_by_time():
    order = (3, 0, 1, 2, 4)
    results = [result(i, status="failed", signature="known", error=f"error {i}", error_class="RuntimeError") for i in order]
    (group,) = of(*results, explain=lambda name: ("because", ("do this",)) if name == "known" else None).failures
    assert (group.name, group.count, group.known) == ("known", 5, True)
    assert (group.cause, group.explanation, group.ways_out) == ("error 0", "because", ("do this",))
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


def test_restricting_keeps_inputs_and_results_together():
    data = restrict(replay([given(i, 200) for i in range(4)], [result(0), result(1)]), {dump_id(1), dump_id(3)}.__contains__)
    assert ([one.dump_id for one in data.spec.inputs], [one.dump_id for one in data.results]) == (
        [dump_id(1), dump_id(3)],
        [dump_id(1)],
    )


def test_labels_go_on_behind_z():
    assert [letter_of(i) for i in (0, 25, 26, 27, 701, 702)] == ["A", "Z", "AA", "AB", "ZZ", "AAA"]
