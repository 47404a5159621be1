"""Pictures: of log-probs and tokens, which are read without torch, damaged or not; and of a run over time."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from replaycases import publish
from storecases import counters

from actordbg.compare.sides import recorded_arrays
from actordbg.judge.load_replays import calls_of, dropped_of
from actordbg.judge.replay_charts import run_timeline
from actordbg.judge.token_charts import TokenPair, tokens_chart
from actordbg.store import payload


def test_a_dumps_tokens_are_those_that_torch_reads(store):
    (given,) = publish(store.create(), 1)
    dump, tokens = payload.load(store.root / given.path), recorded_arrays(store, given.path)
    assert all(np.array_equal(tokens[name], tensor) for name, tensor in dump.tensors.items())
    assert recorded_arrays(store, "dumps/run/rank0000/gone.safetensors.zst") == {}


@pytest.mark.parametrize(
    "ids, real", [([[1.0, 2.0]], None), ([1.0, 2.0, 3.0], None), ([[1.0, 2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0]]), (None, [[1.0]])]
)
def test_a_dump_of_another_shape_by_now_leaves_the_picture_without_its_tokens(ids, real):
    given = [None if values is None else np.array(values) for values in (ids, real)]
    chart = tokens_chart(
        TokenPair("d", np.array([[-1.0, -2.0, -3.0]]), np.array([[-1.0, -2.0, -3.5]]), np.ones((1, 3), bool), *given, limit=9.0)
    )
    assert chart is not None and "3.5" in str(chart.table)
    assert "'w'" not in str(chart.specification) and "between turns" not in str(chart.specification)  # neither text nor turns
    assert "'domainMax': 9.0" in str(chart.specification), "what is allowed stays pale"


@pytest.mark.parametrize("limit, said", [(0.1, "Worst token circled"), (9.0, "0.5 nats, within the limit of 9.")])
def test_a_token_within_its_limit_is_not_called_the_worst(limit, said):
    chart = tokens_chart(TokenPair("d", np.array([[-1.0, -2.0]]), np.array([[-1.0, -2.5]]), np.ones((1, 2), bool), limit=limit))
    assert chart is not None and said in chart.says


def test_calls_within_a_millisecond_are_visible_marks_without_a_scale_of_their_only_length(store):
    publish(store, 3)
    calls = [SimpleNamespace(**vars(row)) for row in calls_of(store, "made-up")]
    for number, row in enumerate(calls):
        row.timestamp, row.seq_len = f"2026-11-01T00:00:00.000{number}00Z", 64
    chart = run_timeline("made-up", calls)
    assert chart is not None
    bars = chart.specification["layer"][0]
    assert all(mark["z"] > mark["a"] for mark in bars["data"]["values"]) and bars["encoding"]["color"]["legend"] is None


def test_dropped_calls_stand_at_their_rank_and_those_of_other_runs_do_not(store):
    publish(store, 4)
    store.counters.joinpath("made-up").mkdir(parents=True)
    for name, told in {
        "a": counters("made-up", dropped={"queue": 3, "disk": 2}),
        "b": counters("made-up", dropped={"queue": 1}, pid=8),
        "c": counters("another", dropped={"queue": 50}),
    }.items():
        (store.counters / "made-up" / f"{name}.json").write_text(json.dumps(told))
    (store.counters / "made-up" / "d.json").write_text("{")
    dropped = dropped_of(store, "made-up")
    assert dropped == {0: 6}
    chart = run_timeline("made-up", calls_of(store, "made-up"), dropped)
    assert chart is not None and "6 calls dropped" in chart.says
    assert [row[0] for row in chart.table.rows] == ["rank 0, 6 dropped"]
    without = run_timeline("made-up", calls_of(store, "made-up"))
    assert without is not None and "dropped" not in without.says and without.table.rows[0][0] == "rank 0"
