"""Whether ranks that ran the same input agree: figures and words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reportcases import NOW, dump_id, given, replay, result

from actordbg.cli.replay_work import is_good
from actordbg.config.replay_config import ReplayConfig
from actordbg.document.renderings import as_text
from actordbg.judge.agreement import agreement_of, ranks_in_words
from actordbg.judge.replay_document import document
from actordbg.judge.summary import summarise
from actordbg.records.replay_record import ResultRecord
from actordbg.replay.work_order import LaneBook, answer_fields, differing

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
         ["2 ranks agree on 1 input, log-probs bit for bit; of 1 input not every rank answered"]),
        ([lane(0, None)], ["not compared: not every rank of a group of 2 answered"]),
        ([lane(0, AGREED), lane(1, DIFFERS)],
         ["DIFFER on 1 of 2 inputs", f"{dump_id(1)}: rank 1 has other log-probs than rank 0 (moved: their mean -0.25)"]),
    ],
)  # fmt: skip
def test_whether_ranks_agree_is_said_with_how_far_that_was_checked(records: list[ResultRecord], said: list[str]) -> None:
    assert words(*records) == said
    assert words(*records, config=ReplayConfig(nproc=2)) == []


def test_the_report_shows_it_and_not_all_of_many() -> None:
    data = replay([given(0, 100), given(1, 100)], [lane(index, DIFFERS) for index in range(9)])
    data = replace(data, spec=replace(data.spec, config=SAME))
    text = " ".join(as_text(document(summarise([data], selection="r1", now=NOW))).split())
    assert "ranks with the same input: DIFFER on 9 of 9 inputs" in text and "... and 4 more" in text


def test_ranks_that_differ_make_a_bad_answer_where_just_that_was_asked() -> None:
    for found, asked, good in ((DIFFERS, True, False), (DIFFERS, False, True), (AGREED, True, True)):
        config = SAME if asked else ReplayConfig(nproc=2, tp=2, backend="fsdp2")
        data = replay([given(0, 100)], [lane(0, found)])
        data = replace(data, spec=replace(data.spec, config=config))
        (summary,) = summarise([data], selection="r1", now=NOW).replays
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
