"""From rows to a Summary: counts add up, steady is steady, nothing is pooled that may not be; replays side by side, and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
from reportcases import NOW, dump_id, given, replay, result

from actordbg.actor.signatures import known_failures
from actordbg.api.reports import is_good
from actordbg.base.units import letter_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.renderings import as_text
from actordbg.judge.agreement import agreement_of, ranks_in_words
from actordbg.judge.replay_document import document
from actordbg.judge.report_model import Against, ReplaySummary, SideBySide
from actordbg.judge.summary import compare, summarise
from actordbg.records.replay_record import ResultRecord, percentile, spread, weighted_mean
from actordbg.replay.work_order import LaneBook, answer_fields, differing


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


def test_steady_inputs_give_speeds_the_buckets_and_the_slowest_by_forward_plus_backward():
    results = [result(i, forward_s=float(i), peak_memory_bytes=i * 2**20, backward_s=9.0 if i == 1 else 2.0) for i in range(4)]
    one = of(*results, lengths=(127, 256, 511, 1861))
    assert (one.tokens_per_s.median, one.tokens_per_s.total) == (256.0, 438.0)  # 256, 255.5, 620.3; 2,628 tokens in 6 s
    assert [(b.label, b.inputs, b.steady, b.forward.median, b.peak_memory_bytes) for b in one.buckets] == [
        ("0-127", 1, 0, None, 0), ("256-511", 2, 2, 1.5, 2 * 2**20), ("1024-2047", 1, 1, 3.0, 3 * 2**20)
    ]  # fmt: skip
    assert [(slow.dump_id, slow.rank) for slow in one.slowest[:2]] == [(dump_id(1), 1), (dump_id(3), 3)]


def test_log_probs_are_weighted_by_their_tokens_and_nonfinite_ones_are_counted():
    logprobs = of(
        result(0, logprob_mean=-1.0, logprob_count=10, logprob_min=-3.0, logprob_max=-0.1),
        result(1, logprob_mean=-4.0, logprob_count=20, logprob_min=-8.0, logprob_max=-0.2, nonfinite=3, status="failed"),
    ).logprobs
    assert logprobs is not None
    assert (logprobs.mean, logprobs.lowest, logprobs.highest, logprobs.nonfinite) == (-3.0, -8.0, -0.1, 3)


def test_failures_with_one_signature_are_one_group_with_its_explanation_and_the_first_cause_by_time():
    name, known = next(iter(known_failures().items()))
    results = [result(i, status="failed", signature=name, error=f"error {i}", error_class="X") for i in (3, 0, 1, 2, 4)]
    (group,) = of(*results).failures
    assert (group.name, group.count, group.known) == (name, 5, True)
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
    nothing = vars(against([result(0)], [result(1)]))
    assert nothing == nothing | dict.fromkeys(("common", "timed", "digests_equal", "digests_differ"), 0)
    assert nothing["forward_ratio"] is nothing["mean_moved"] is None


def test_a_spread_is_of_what_was_measured_with_numpys_percentiles_and_of_nothing_none():
    values = [float(value**3 % 97) for value in range(40)]
    some, empty = spread([*values, None]), spread([None, math.nan, math.inf])
    assert (some.median, some.total) == (float(numpy.median(values)), sum(values))
    assert percentile(values, 95) == some.p95 == pytest.approx(float(numpy.percentile(values, 95)))
    assert (empty.count, empty.median, empty.p95, empty.largest) == (0, None, None, None)
    assert weighted_mean([(None, 3), (2.0, 0)]) is None and weighted_mean([(1.0, 1), (4.0, 2)]) == 3.0


SAME = ReplayConfig(nproc=2, align="same")
AGREED = {"ranks": [0, 1], "differ": {}}
DIFFERS = {"ranks": [0, 1], "differ": {"1": {"output_digest": "other", "logprob_mean": -2.25, "loss": None}}}


def lane(index: int, found: dict[str, Any] | None, **figures: Any) -> ResultRecord:
    return result(index, extra={} if found is None else {"lane": found}, **figures)


def words(*records: ResultRecord, config: ReplayConfig = SAME) -> list[str]:
    return ranks_in_words(agreement_of(records, config))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([lane(0, AGREED), lane(1, AGREED)], ["2 ranks agree on 2 inputs, log-probs bit for bit"]),
        ([lane(0, AGREED), lane(1, None)],
         ["2 ranks agree on 1 input, log-probs bit for bit; not every rank reported on 1 input"]),
        ([lane(0, None)], ["not compared: not every rank of a group of 2 reported"]),
        ([lane(0, AGREED), lane(1, DIFFERS)],
         ["ranks differ on 1 of 2 inputs", f"{dump_id(1)}: rank 1 has other log-probs than rank 0 (moved: their mean -0.25)"]),
    ],
)  # fmt: skip
def test_whether_ranks_agree_is_said_with_how_far_that_was_checked(records: list[ResultRecord], said: list[str]) -> None:
    assert words(*records) == said
    assert words(*records, config=ReplayConfig(nproc=2)) == []


def test_the_report_shows_it_and_not_all_of_many() -> None:
    data = replay([given(0, 100), given(1, 100)], [lane(index, DIFFERS) for index in range(9)])
    data = replace(data, spec=replace(data.spec, config=SAME))
    text = " ".join(as_text(document(summarise([data], selection="r1", now=NOW))).split())
    assert "ranks: ranks differ on 9 of 9 inputs" in text and "... and 4 more" in text


def test_ranks_that_differ_make_a_bad_answer_where_just_that_was_asked() -> None:
    for found, asked, good in ((DIFFERS, True, False), (DIFFERS, False, True), (AGREED, True, True)):
        config = SAME if asked else ReplayConfig(nproc=2, tp=2, backend="fsdp2")
        data = replay([given(0, 100)], [lane(0, found)])
        (summary,) = summarise([replace(data, spec=replace(data.spec, config=config))], selection="r1", now=NOW).replays
        assert summary.ranks is not None and is_good(summary, config) is good


def test_log_probs_agree_to_the_bit_and_gradient_norms_within_rounding() -> None:
    record = result(0, output_digest="d", loss=2.0, grad_norm=1.0)
    same = {"output_digest": "d", "loss": 2.0, "grad_norm": 1.0 + 1e-8}
    assert differing(record, {1: same}) == {}
    for other in ({"output_digest": "e"}, {"grad_norm": 1.001}, {"grad_norm": None}, {"loss": 2.1}):
        assert set(differing(record, {1: same | other, 2: same})) == {"1"}


def test_what_a_follower_tells_is_json_and_leaves_out_the_rest() -> None:
    told = answer_fields({"status": "failed", "loss": float("nan"), "grad_norm": 1.5, "forward_s": 2.0, "error": "no"})
    assert told == {"status": "failed", "grad_norm": 1.5, "error": "no"}


def test_a_followers_failure_stands_whichever_rank_is_through_first() -> None:
    good = result(0, worker=0)
    told = {"dump_id": good.dump_id, "rank": 1, "attempt": 1, "slot": 0, "output_digest": "d"}
    told |= {"status": "failed", "error_class": "ValueError", "error": "no"}
    follower_first, leader_first, own = (LaneBook("r1", 2) for _ in range(3))
    said, again = follower_first.take_answer(told), follower_first.take_result(good)
    assert said is not None and (said.status, said.worker) == ("failed", 1) and "on rank 1" in (said.error or "")
    assert again is not None and again.status == "failed", "the first rank's own result must not hide it"
    assert leader_first.take_result(good) is None
    later = leader_first.take_answer(told)
    assert later is not None and later.status == "failed"
    assert own.take_result(result(0, worker=0, status="failed")) is None
    assert own.take_answer(told) is None, "the first rank's own failure has the figures"
