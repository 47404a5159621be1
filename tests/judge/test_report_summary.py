"""From rows to a Summary: counts add up, steady is steady, nothing is pooled that may not be; replays side by side, and ranks."""

import json
import math
from dataclasses import asdict, replace
from functools import reduce
from typing import Any

import numpy
import pytest
from casefiles import cases_of
from reportcases import NOW, dump_id, given, replay, result

from actordbg.actor.signatures import known_failures
from actordbg.base.units import letter_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.command_result import as_json_text
from actordbg.document.renderings import as_text
from actordbg.judge.agreement import agreement_of, ranks_in_words
from actordbg.judge.replay_document import document
from actordbg.judge.replay_findings import Judged
from actordbg.judge.summary import compare, summarise
from actordbg.judge.verdicts import replay_verdict
from actordbg.records.replay_record import ResultRecord, percentile, spread, weighted_mean
from actordbg.replay.work_order import LaneBook, answer_fields, differing

CASES = cases_of("summaries")


def summary_lines(lines, paths):
    """Values of a summary at paths such as `replays.0.forward.median`. lines: of `summaries.test`."""
    lengths, replays = [200] * 6, dict[str, tuple[dict[str, Any], list[ResultRecord]]]()
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "lengths":
            lengths = json.loads(rest)
        elif name == "replay":
            name, _, resolved = rest.partition(" ")
            replays[name] = json.loads(resolved or "{}"), []
        else:
            index, _, fields = rest.partition(" ")
            replays[name][1].append(result(int(index), name, **json.loads(fields or "{}")))
    inputs = [given(index, length, rank=index) for index, length in enumerate(lengths)]
    made = [replay(inputs, results, name, **resolved) for name, (resolved, results) in replays.items()]
    summary = json.loads(as_json_text(asdict(summarise(made, selection="one replay", now=NOW))))
    return [f"{path} {json.dumps(reduce(_within, path.split('.'), summary))}" for path in paths]


def _within(data, part):
    if part.isdigit():
        return data[int(part)]
    return [each[part] for each in data] if isinstance(data, list) else data[part]


@pytest.mark.parametrize("case", CASES)
def test_figures_of_replays_are_of_what_is_steady_and_groups_of_what_is_alike(case):
    expected = CASES[case].expected
    assert summary_lines(CASES[case].given, [line.split()[0] for line in expected]) == expected


def test_labels_go_on_behind_z():
    assert [letter_of(i) for i in (0, 25, 26, 702)] == ["A", "Z", "AA", "AAA"]


def test_a_known_failure_has_its_explanation_and_the_first_cause_by_time():
    name, known = next(iter(known_failures().items()))
    results = [result(i, status="failed", signature=name, error=f"error {i}", error_class="X") for i in (3, 0, 1, 2, 4)]
    inputs = [given(index, 200) for index in range(5)]
    (group,) = summarise([replay(inputs, results)], selection="one replay", now=NOW).replays[0].failures
    assert (group.name, group.count, group.known) == (name, 5, True)
    assert (group.cause, group.explanation, group.ways_out) == ("error 0", known.explanation, known.ways_out)
    assert group.examples == (dump_id(0), dump_id(1), dump_id(2))


def test_what_a_replay_did_not_report_differs_in_none():
    """No worker of the first one became ready; the third is a truth, without an Actor's file."""
    inputs = [given(0, 200)]
    began = replay(inputs, [result(0)], "r2", actor_path="/actor.py", engine=None, parameters=7)
    truth = replay(inputs, [result(0)], "r3", parameters=7, model_path="/llama.py")
    comparison = compare([replace(replay(inputs, []), resolved={}), began, truth], list("ABC"))
    names = {name for row in comparison.rows for name in row.differs}
    assert not names & {"actor_path", "engine", "parameters", "model_path"}
    assert (comparison.shared["parameters"], comparison.shared["engine"]) == (7, None)


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


def lane(index, found, **figures):
    return result(index, extra={} if found is None else {"lane": found}, **figures)


def words(*records, config=SAME):
    return ranks_in_words(agreement_of(records, config))


@pytest.mark.parametrize(
    "records, said",
    [
        ([lane(0, AGREED), lane(1, AGREED)], ["2 ranks agree on 2 inputs, log-probs bit for bit"]),
        ([lane(0, AGREED), lane(1, None)],
         ["2 ranks agree on 1 input, log-probs bit for bit; not every rank reported on 1 input"]),
        ([lane(0, None)], ["not compared: not every rank of a group of 2 reported"]),
        ([lane(0, AGREED), lane(1, DIFFERS)],
         ["ranks differ on 1 of 2 inputs", f"{dump_id(1)}: rank 1 has other log-probs than rank 0 (moved: their mean -0.25)"]),
    ],
)  # fmt: skip
def test_whether_ranks_agree_is_said_with_how_far_that_was_checked(records, said):
    assert words(*records) == said
    assert words(*records, config=ReplayConfig(nproc=2)) == []


def test_the_report_shows_it_and_not_all_of_many():
    data = replay([given(0, 100), given(1, 100)], [lane(index, DIFFERS) for index in range(9)])
    data = replace(data, spec=replace(data.spec, config=SAME))
    text = " ".join(as_text(document(summarise([data], selection="r1", now=NOW))).split())
    assert "ranks: ranks differ on 9 of 9 inputs" in text and "... and 4 more" in text


def test_ranks_that_differ_make_a_bad_answer_where_just_that_was_asked():
    for found, asked, good in ((DIFFERS, True, False), (DIFFERS, False, True), (AGREED, True, True)):
        config = SAME if asked else ReplayConfig(nproc=2, tp=2, backend="fsdp2")
        data = replay([given(0, 100)], [lane(0, found)])
        (summary,) = summarise([replace(data, spec=replace(data.spec, config=config))], selection="r1", now=NOW).replays
        assert summary.ranks is not None and (replay_verdict(Judged(summary)).word != "WRONG") is good


def test_log_probs_agree_to_the_bit_and_gradient_norms_within_rounding():
    record = result(0, output_digest="d", loss=2.0, grad_norm=1.0)
    same = {"output_digest": "d", "loss": 2.0, "grad_norm": 1.0 + 1e-8}
    assert differing(record, {1: same}) == {}
    for other in ({"output_digest": "e"}, {"grad_norm": 1.001}, {"grad_norm": None}, {"loss": 2.1}):
        assert set(differing(record, {1: same | other, 2: same})) == {"1"}


def test_what_a_follower_tells_is_json_and_leaves_out_the_rest():
    told = answer_fields({"status": "failed", "loss": float("nan"), "grad_norm": 1.5, "forward_s": 2.0, "error": "no"})
    assert told == {"status": "failed", "grad_norm": 1.5, "error": "no"}


def test_a_followers_failure_stands_whichever_rank_is_through_first():
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
