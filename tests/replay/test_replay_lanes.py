"""Which rank runs what, under real supervision with scripted workers: lanes, and ranks with different numbers of inputs."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from typing import Any

import pytest
from supervised import Bench, make_spec, statuses

from actordbg.records.journal import read_events, read_results
from actordbg.replay.supervise import Progress, ReplayOutcome


class TestLanes:
    """Ranks that run one input together: the first records it, the others say what came out."""

    def run(self, bench: Bench, count: int, script: dict[str, Any], **settings: Any) -> ReplayOutcome:
        spec = make_spec(count, **{"backend": "deepspeed", "nproc": 2, "align": "same"} | settings)
        return bench.run(spec, {"collective": spec.config.backend != "plain"} | script)

    def lanes(self, outcome: ReplayOutcome) -> dict[str, Any]:
        assert read_results(outcome.folder) == outcome.results
        return {dump_id: record.extra.get("lane") for dump_id, record in sorted(outcome.results.items())}

    @pytest.mark.parametrize("backend", ["deepspeed", "plain"])
    def test_all_ranks_run_each_input_and_one_records_it(self, bench: Bench, backend: str) -> None:
        outcome = self.run(bench, 3, {"d1": "differ"}, backend=backend)
        assert outcome.all_passed and {record.worker for record in outcome.results.values()} == {0}
        ran = {path.name for path in outcome.folder.glob("ran-*")}
        assert ran == {f"ran-d{n}-{rank}-{rank == 0}" for n in range(3) for rank in range(2)}
        agreed = {"ranks": [0, 1], "differ": {}}
        lanes = self.lanes(outcome)
        assert lanes["d0"] == lanes["d2"] == agreed
        assert lanes["d1"]["differ"]["1"]["output_digest"] == "d1 on 1"
        assert [event.kind for event in bench.news].count("result") == 3

    def test_two_lanes_take_turns_and_an_odd_input_is_filled_up_by_the_whole_lane(self, bench: Bench) -> None:
        outcome = self.run(bench, 3, {}, nproc=4, align=None, tp=2)
        assert outcome.all_passed
        assert {dump_id: record.worker for dump_id, record in outcome.results.items()} == {"d0": 0, "d1": 2, "d2": 0}
        assert [lane["ranks"] for lane in self.lanes(outcome).values()] == [[0, 1], [2, 3], [0, 1]]
        fills = [event for event in read_events(outcome.folder / "rank3.jsonl") if event["event"] == "fill"]
        assert [(event["dump_id"], event.get("follows", False)) for event in fills] == [("d1", True), ("d2", False)]

    @pytest.mark.parametrize("backend", ["deepspeed", "plain"])
    @pytest.mark.parametrize(
        ("action", "status", "words"),
        [("kill", "crashed", "SIGKILL"), ("fail", "failed", "on rank 1"), ("hang", "hung", "--timeout")],
    )
    def test_a_follower_that_comes_to_grief_costs_the_lanes_input_and_nothing_else(
        self, bench: Bench, backend: str, action: str, status: str, words: str
    ) -> None:
        outcome = self.run(bench, 3, {"d1@1": action}, backend=backend, timeout_s=2.0)
        assert statuses(outcome) == {"d0": "passed", "d1": status, "d2": "passed"}
        lost = outcome.results["d1"]
        assert words in (lost.error or "") and lost.worker == 1
        assert self.lanes(outcome)["d2"] == {"ranks": [0, 1], "differ": {}}
        assert bench.left_running() == []

    def test_a_follower_that_cannot_take_part_does_not_cost_the_input_twice(self, bench: Bench) -> None:
        outcome = self.run(bench, 2, {"d0@1": "late-fail"}, timeout_s=2.0)
        assert statuses(outcome) == {"d0": "failed", "d1": "passed"} and outcome.restarts == 1

    def test_a_replay_that_stopped_half_way_is_resumed_by_every_rank_where_it_was(self, bench: Bench) -> None:
        spec = make_spec(4, nproc=2, align="same")

        def interrupt(event: Progress) -> None:
            if event.result and event.result.dump_id == "d1":
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            bench.run(spec, {"takes": 0.2}, on_event=interrupt)
        outcome = bench.run(spec, {})
        assert outcome.all_passed
        assert all(lane == {"ranks": [0, 1], "differ": {}} for lane in self.lanes(outcome).values())

    def test_a_replay_that_lost_its_supervisor_between_two_ranks_still_says_whether_they_agree(self, bench: Bench) -> None:
        spec = make_spec(2, nproc=2, align="same")
        outcome = bench.run(spec, {})
        journal = outcome.folder / "supervisor.jsonl"
        journal.write_text("".join(line for line in journal.open() if '"end"' not in line))
        assert {record.extra.get("lane") for record in read_results(outcome.folder).values()} == {None}
        assert self.lanes(bench.run(spec, {}))["d1"] == {"ranks": [0, 1], "differ": {}}
        assert len(bench.sessions) == 2, "nothing was run again"


class TestRanksOutOfStep:
    """--align shuffle: nobody fills up for a rank that has an input less. 3 inputs: d0 and d2 for rank 0, d1 for rank 1."""

    def run(self, bench: Bench, count: int, script: dict[str, Any], **settings: Any) -> ReplayOutcome:
        spec = make_spec(count, **{"backend": "deepspeed", "nproc": 2, "align": "shuffle", "timeout_s": 2.0} | settings)
        return bench.run(spec, {"collective": True} | script)

    def test_a_rank_that_waits_for_one_that_has_nothing_left_is_a_verdict_with_both_stacks(self, bench: Bench) -> None:
        outcome = self.run(bench, 3, {})
        assert statuses(outcome) == {"d0": "passed", "d1": "passed", "d2": "hung"}
        hung = outcome.results["d2"]
        assert hung.signature == "collective-mismatch"
        assert (hung.error or "").startswith("rank 0 waits in barrier (")
        assert "rank 1 has no input left (1 of 1 done): ranks ran 2 and 1 inputs" in (hung.error or "")
        first, second = (hung.log_excerpt or "").split("--- rank ")[1:]
        assert first.startswith("0 waits in barrier") and "distributed_c10d.py" in first and "barrier" in first
        assert second.startswith("1 has no input left") and "actordbg/replay/worker.py" in second
        took = datetime.fromisoformat(hung.finished_at) - datetime.fromisoformat(hung.started_at)
        assert took.total_seconds() >= 2.0, "no verdict before the time is up"
        assert bench.left_running() == []

    def test_the_last_slot_hangs_only_where_ranks_compute_together(self, bench: Bench) -> None:
        assert self.run(bench, 3, {"collective": False}).all_passed
        assert self.run(bench, 4, {}).all_passed

    def test_a_rank_outside_of_any_collective_is_the_culprit_and_is_named(self, bench: Bench) -> None:
        outcome = self.run(bench, 4, {"d1": "hang"})
        assert statuses(outcome) == {"d0": "passed", "d1": "hung", "d2": "passed", "d3": "passed"}
        hung = outcome.results["d1"]
        assert "the others wait for rank 1" in (hung.error or "") and "rank 0 waits in barrier" in (hung.error or "")
        assert "outside of any collective" in (hung.error or "") and hung.signature == "worker-hung"
        assert (hung.log_excerpt or "").index("--- rank 1") < (hung.log_excerpt or "").index("--- rank 0")

    def test_an_input_that_crashed_is_filled_up_so_that_it_does_not_hang_the_others(self, bench: Bench) -> None:
        outcome = self.run(bench, 4, {"d1": "kill"}, timeout_s=20.0)
        assert statuses(outcome) == {"d0": "passed", "d1": "crashed", "d2": "passed", "d3": "passed"}
        second = (outcome.folder / "work-0-2.json").read_text()
        assert '"slots": [[0, null], [2, 3]]' in second

    def test_a_rank_that_is_stopped_while_another_waits_is_named_so(self, bench: Bench) -> None:
        outcome = self.run(bench, 2, {"d1": "stop"}, align=None)
        assert outcome.results["d1"].status == "hung"
        assert "rank 1 was stopped by a signal: the others wait for rank 1" in (outcome.results["d1"].error or "")
