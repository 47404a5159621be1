"""Which rank runs what, under real supervision with scripted workers: lanes, and ranks with different numbers of inputs."""

from types import SimpleNamespace

import pytest
from supervised import ctrl_c_after, make_spec, statuses

from actordbg.debug.replay_stops import StopOrder
from actordbg.records.journal import read_events, read_results
from actordbg.replay.work_order import Duty, Task, WorkOrder
from actordbg.replay.worker import Worker


@pytest.mark.parametrize(
    "rank, nproc, asked, stops",
    [(0, 1, None, True), (1, 1, None, True), (1, 2, None, False), (1, 2, 1, True), (0, 2, 1, False), (3, 2, 1, True)],
)
def test_a_rank_that_runs_apart_stops_in_each_group_of_a_cluster_and_on_one_machine_where_it_is_asked(rank, nproc, asked, stops):
    """A cluster's groups are numbered on: rank 1 is the only rank of the second group of one process."""
    begun, spec = [], make_spec(1, nproc=nproc)
    worker = SimpleNamespace(rank=rank, spec=spec, engine=SimpleNamespace(collective=False))
    worker.order = WorkOrder(1, [rank], [[0]], stops=StopOrder(at="before", rank=asked))
    worker.stops = SimpleNamespace(begin=lambda *given: begun.append(given))
    Worker._announce_to_breakpoints(worker, Task(0, 0, Duty.LEAD), spec.inputs[0].dump_id)
    assert begun[0][-1] is stops


class TestLanes:
    """Ranks that run one input together: the first records it, the others say what came out."""

    def run(self, bench, count, script, **settings):
        spec = make_spec(count, **{"backend": "deepspeed", "nproc": 2, "align": "same"} | settings)
        return bench.run(spec, {"collective": spec.config.backend != "plain"} | script)

    def lanes(self, outcome):
        assert read_results(outcome.folder) == outcome.results
        return {dump_id: record.extra.get("lane") for dump_id, record in sorted(outcome.results.items())}

    @pytest.mark.parametrize("backend", ["deepspeed", "plain"])
    def test_all_ranks_run_each_input_and_one_records_it(self, bench, backend):
        outcome = self.run(bench, 3, {"d1": "differ"}, backend=backend)
        assert outcome.all_passed and {record.worker for record in outcome.results.values()} == {0}
        ran = {path.name for path in outcome.folder.glob("ran-*")}
        assert ran == {f"ran-d{n}-{rank}-{rank == 0}" for n in range(3) for rank in range(2)}
        agreed = {"ranks": [0, 1], "differ": {}}
        lanes = self.lanes(outcome)
        assert lanes["d0"] == lanes["d2"] == agreed
        assert lanes["d1"]["differ"]["1"]["output_digest"] == "d1 on 1"
        assert [event.kind for event in bench.news].count("result") == 3

    def test_two_lanes_take_turns_and_an_odd_input_is_filled_up_by_the_whole_lane(self, bench):
        outcome = self.run(bench, 3, {}, nproc=4, align=None, tp=2)
        assert outcome.all_passed
        assert {dump_id: record.worker for dump_id, record in outcome.results.items()} == {"d0": 0, "d1": 2, "d2": 0}
        assert [lane["ranks"] for lane in self.lanes(outcome).values()] == [[0, 1], [2, 3], [0, 1]]
        fills = [event for event in read_events(outcome.folder / "rank3.jsonl") if event["event"] == "fill"]
        assert [(event["dump_id"], event.get("follows", False)) for event in fills] == [("d1", True), ("d2", False)]

    @pytest.mark.parametrize(
        "backend, action, status, words",
        [
            ("deepspeed", "kill", "crashed", "SIGKILL"),
            ("deepspeed", "hang", "hung", "--timeout"),
            ("plain", "kill", "crashed", "SIGKILL"),
            ("plain", "fail", "failed", "on rank 1"),
            ("deepspeed", "late-fail", "failed", "on rank 1"),  # it takes part in nothing, and the input is not lost twice
        ],
    )
    def test_a_follower_that_comes_to_grief_costs_the_lanes_input_and_nothing_else(self, bench, backend, action, status, words):
        outcome = self.run(bench, 3, {"d1@1": action}, backend=backend, timeout_s=2.0)
        assert statuses(outcome) == {"d0": "passed", "d1": status, "d2": "passed"}
        lost = outcome.results["d1"]
        assert words in (lost.error or "") and lost.worker == 1 and outcome.restarts == (action != "fail")
        assert self.lanes(outcome)["d2"] == {"ranks": [0, 1], "differ": {}}
        assert bench.left_running() == []

    def test_a_replay_that_stopped_half_way_is_resumed_by_every_rank_where_it_was(self, bench):
        spec, agreed = make_spec(4, nproc=2, align="same"), {"ranks": [0, 1], "differ": {}}
        with pytest.raises(KeyboardInterrupt):
            bench.run(spec, {"takes": 0.2}, on_event=ctrl_c_after("d1"))
        outcome = bench.run(spec, {})
        assert outcome.all_passed and list(self.lanes(outcome).values()) == [agreed] * 4
        journal, started = outcome.folder / "supervisor.jsonl", len(bench.sessions)
        journal.write_text("".join(line for line in journal.open() if '"end"' not in line))  # lost between two ranks
        assert {record.extra.get("lane") for record in read_results(outcome.folder).values()} == {None}
        assert list(self.lanes(bench.run(spec, {})).values()) == [agreed] * 4
        assert len(bench.sessions) == started, "nothing was run again"


class TestRanksOutOfStep:
    """--align shuffle: nobody fills up for a rank that has an input less. 3 inputs: d0 and d2 for rank 0, d1 for rank 1."""

    def run(self, bench, count, script, **settings):
        spec = make_spec(count, **{"backend": "deepspeed", "nproc": 2, "align": "shuffle", "timeout_s": 2.0} | settings)
        return bench.run(spec, {"collective": True} | script)

    def test_the_last_slot_hangs_only_where_ranks_compute_together(self, bench):
        """`test_replay_align_real` has the verdict on one that hangs."""
        assert self.run(bench, 3, {"collective": False}).all_passed

    def test_an_input_that_crashed_is_filled_up_so_that_it_does_not_hang_the_others(self, bench):
        outcome = self.run(bench, 4, {"d1": "kill"}, timeout_s=20.0)
        assert statuses(outcome) == {"d0": "passed", "d1": "crashed", "d2": "passed", "d3": "passed"}
        second = (outcome.folder / "work-0-2.json").read_text()
        assert '"slots": [[0, null], [2, 3]]' in second
