"""Aligned ranks for real: a deadlock under ZeRO-3 with its verdict, and two processes that are given the same inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from replaycases import publish
from supervised import fake_launcher

from actordbg.base.processes import session_members
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import WORKER_MODULE
from actordbg.replay.plan import make_plan
from actordbg.replay.selection import rows_of_files
from actordbg.replay.supervise import ReplayOutcome, run_replay
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("aligned") / "store").create()
    publish(store, 3, length=96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield store


def replayed(store: Store, sessions: list[int], **settings: Any) -> ReplayOutcome:
    config = ReplayConfig(nproc=2, dtype="fp32", packing=False, **settings)
    plan = make_plan(rows_of_files(store, list(store.iter_dumps())), config)
    return run_replay(store, plan.spec, launcher=fake_launcher(sessions, WORKER_MODULE))


def test_ranks_with_different_numbers_of_inputs_under_zero_3_end_in_a_verdict(ready: Store) -> None:
    sessions: list[int] = []
    outcome = replayed(ready, sessions, backend="deepspeed", zero_stage=3, align="shuffle", backward=False, timeout_s=TIMEOUT_S)
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


def test_two_processes_that_are_given_the_same_inputs_agree_to_the_bit(ready: Store) -> None:
    sessions: list[int] = []
    outcome = replayed(ready, sessions, align="same", backward=True, timeout_s=240.0)
    assert outcome.all_passed and len(sessions) == 2
    for record in outcome.results.values():
        assert record.worker == 0 and record.grad_norm
        assert record.extra["lane"] == {"ranks": [0, 1], "differ": {}}
        assert (outcome.folder / "tensors" / f"{record.dump_id}.safetensors").exists()
    assert os.path.getsize(outcome.folder / "rank1.jsonl") > 0
