"""A run over time says what its ranks dropped, rank by rank, as far as their counters can be read."""

from __future__ import annotations

import json

from replaycases import publish

from actordbg.judge.load_replays import calls_of, dropped_of
from actordbg.judge.replay_charts import run_timeline
from actordbg.store.layout import Store

COUNTERS = {
    "format": 1, "rank": 0, "role": "policy", "host": "h", "pid": 7, "instance": "x", "state": "on", "calls": 9, "captured": 4,
    "pending": 0, "bytes": 9, "queue_bytes": 0, "generation": 1, "sampled_out": {}, "triggered": {}, "rotated": 0, "rotated_bytes": 0, "outputs_dropped": 0, "last_error": None,
    "heartbeat": "2025-06-19T05:26:08.430740Z", "since": "2025-06-19T05:26:08.430740Z",
}  # fmt: skip


def test_dropped_calls_stand_at_their_rank_and_those_of_other_runs_do_not(store: Store):
    publish(store, 4)
    store.counters.joinpath("made-up").mkdir(parents=True)
    for name, told in {
        "a": {"run": "made-up", "dropped": {"queue": 3, "disk": 2}},
        "b": {"run": "made-up", "dropped": {"queue": 1}, "pid": 8},
        "c": {"run": "another", "dropped": {"queue": 50}},
    }.items():
        (store.counters / "made-up" / f"{name}.json").write_text(json.dumps(COUNTERS | told))
    (store.counters / "made-up" / "d.json").write_text("{")
    dropped = dropped_of(store, "made-up")
    assert dropped == {0: 6}
    chart = run_timeline("made-up", calls_of(store, "made-up"), dropped)
    assert chart is not None and "6 calls dropped" in chart.says
    assert [row[0] for row in chart.table.rows] == ["rank 0, 6 dropped"]
    without = run_timeline("made-up", calls_of(store, "made-up"))
    assert without is not None and "dropped" not in without.says and without.table.rows[0][0] == "rank 0"
