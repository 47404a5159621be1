"""A replay on the model of the run gives the log-probs that the run recorded; where they differ, the catalog says by how much."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from typing import Any

import pytest
from actorcases import run_scenario
from roots import ROOT

from actordbg.catalog.query import results_for
from actordbg.judge.comparing import compare
from actordbg.records.comparison_record import MATCH, MISMATCH
from actordbg.records.replay_record import ResultRecord
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two calls recorded by the hook around OpenRLHF's Actor, and two copies with shifted log-probs."""
    cache = tmp_path_factory.mktemp("golden")
    return run_scenario("recorded", cache)[0] | {"store": Store(cache / "store")}


@pytest.fixture(scope="module")
def results(recorded: dict[str, Any]) -> dict[str, ResultRecord]:
    command = [sys.executable, "-m", "actordbg", "--store", str(recorded["store"].root), "replay"]
    command += ["--model", recorded["model"], "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["passed"] == 4 and answer["folded_ids"] == 0
    return {record.dump_id: record for record in results_for(recorded["store"], answer["replay_id"])}


def test_both_kinds_of_log_probs_were_recorded(recorded: dict[str, Any]) -> None:
    assert sorted(recorded["recorded"].values()) == ["output.action_log_probs", "output.log_probs"]


def test_the_same_model_gives_the_log_probs_that_the_run_recorded(
    recorded: dict[str, Any], results: dict[str, ResultRecord]
) -> None:
    for dump_id in recorded["recorded"]:
        result = results[dump_id]
        assert result.golden_count == result.logprob_count and (result.golden_count or 0) > 10
        assert result.golden_max_abs == pytest.approx(0, abs=1e-5)


def test_a_difference_is_measured(recorded: dict[str, Any], results: dict[str, ResultRecord]) -> None:
    for dump_id in recorded["shifted"]:
        assert results[dump_id].golden_max_abs == pytest.approx(0.5, abs=1e-5)
        assert results[dump_id].golden_mean_abs == pytest.approx(0.5, abs=1e-5)


def test_the_comparisons_are_in_the_catalog(recorded: dict[str, Any], results: dict[str, ResultRecord]) -> None:
    with sqlite3.connect(recorded["store"].catalog_path) as catalog:
        rows = catalog.execute("SELECT dump_id, count, max_abs FROM comparison WHERE against = 'golden'").fetchall()
    assert {dump_id: (count, worst) for dump_id, count, worst in rows} == {
        dump_id: (result.golden_count, result.golden_max_abs) for dump_id, result in results.items()
    }


def test_compare_tells_the_calls_that_agree_with_the_run_from_those_that_do_not(
    recorded: dict[str, Any], results: dict[str, ResultRecord]
) -> None:
    replay_id = next(iter(results.values())).replay_id
    whole = compare(recorded["store"], replay_id, "golden")
    assert whole.verdict == MISMATCH and whole.b.kind == "golden"
    verdicts = {one.dump_id: one.verdict for one in whole.dumps}
    assert verdicts == dict.fromkeys(recorded["recorded"], MATCH) | dict.fromkeys(recorded["shifted"], MISMATCH)
    assert [one.dump_id in recorded["shifted"] for one in whole.dumps] == [True, True, False, False]  # the worst first
    assert compare(recorded["store"], replay_id, "golden", only=list(recorded["recorded"])).verdict == MATCH
