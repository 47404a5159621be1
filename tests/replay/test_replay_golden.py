"""A replay on the model of the run gives the log-probs that the run recorded; where they differ, the catalog says by how much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from actorcases import run_scenario
from stopcases import actordbg

from actordbg.catalog.query import results_for
from actordbg.judge.comparing import compare
from actordbg.records.comparison_record import MATCH, MISMATCH
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow


def test_the_runs_own_model_gives_what_the_run_recorded_and_a_difference_is_measured(tmp_path: Path) -> None:
    """Two calls recorded by the hook around OpenRLHF's Actor, and two copies with shifted log-probs."""
    recorded, store = run_scenario("recorded", tmp_path)[0], Store(tmp_path / "store")
    own, shifted = recorded["recorded"], recorded["shifted"]
    assert sorted(own.values()) == ["output.action_log_probs", "output.log_probs"]
    done = actordbg(store, "replay", "--model", recorded["model"], "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["passed"] == 4 and answer["folded_ids"] == 0

    results = {record.dump_id: record for record in results_for(store, answer["replay_id"])}
    for dump_id, result in results.items():
        off = pytest.approx(0.5 if dump_id in shifted else 0, abs=1e-5)
        assert (result.golden_max_abs, result.golden_mean_abs) == (off, off)
        assert result.golden_count == result.logprob_count and (result.golden_count or 0) > 10

    whole = compare(store, answer["replay_id"], "golden")
    assert whole.verdict == MISMATCH and whole.b.kind == "golden"
    assert {one.dump_id: one.verdict for one in whole.dumps} == dict.fromkeys(own, MATCH) | dict.fromkeys(shifted, MISMATCH)
    assert [one.dump_id in shifted for one in whole.dumps] == [True, True, False, False]  # the worst first
    assert compare(store, answer["replay_id"], "golden", only=list(own)).verdict == MATCH
