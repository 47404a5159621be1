"""Aligned ranks for real: a deadlock under ZeRO-3 with its verdict."""

from datetime import datetime

import pytest
from actorcases import ZERO3
from replaycases import publish
from supervised import fake_launcher

from actordbg.base.processes import session_members
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import WORKER_MODULE
from actordbg.replay.plan import make_plan
from actordbg.replay.selection import rows_of_files
from actordbg.replay.supervise import run_replay

pytestmark = pytest.mark.forked

TIMEOUT_S = 10.0


@pytest.mark.skipif(ZERO3["zero_stage"] < 3, reason="OpenRLHF loads no model under ZeRO-3 here")
def test_ranks_with_different_numbers_of_inputs_under_zero_3_end_in_a_verdict(store, monkeypatch):
    publish(store, 3, length=32)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sessions = []
    config = ReplayConfig(
        nproc=2,
        dtype="fp32",
        packing=False,
        **ZERO3,
        align="shuffle",
        backward=False,
        timeout_s=TIMEOUT_S,
    )
    plan = make_plan(rows_of_files(store, list(store.iter_dumps())), config)
    outcome = run_replay(store, plan.spec, launcher=fake_launcher(sessions, WORKER_MODULE))
    assert outcome.status == "complete" and outcome.counts == {"passed": 2, "hung": 1}
    hung = next(record for record in outcome.results.values() if record.status == "hung")
    assert hung.worker == 0 and hung.slot == 1 and hung.signature == "collective-mismatch"
    words, excerpt = hung.error or "", hung.log_excerpt or ""
    assert words.startswith("rank 0 waits in ") and "(deepspeed/runtime/zero/" in words
    assert "rank 1 has no input left (1 of 1 done): ranks ran 2 and 1 inputs" in words
    first, second = excerpt.split("--- rank ")[1:]
    assert "torch/distributed/distributed_c10d.py" in first and "called by the model's openrlhf/" in first
    assert "actordbg/replay/worker.py" in second
    took = datetime.fromisoformat(hung.finished_at) - datetime.fromisoformat(hung.started_at)
    assert took.total_seconds() >= TIMEOUT_S, "no verdict before the time is up"
    assert len(sessions) == 1 and [pid for session in sessions for pid in session_members(session)] == []
