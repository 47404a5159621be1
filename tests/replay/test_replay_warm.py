"""Groups of workers that stay for the next replay: one load for several, and every guarantee of a replay of its own."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from replaycases import publish
from supervised import Bench, booted, fake_launcher, make_spec, spec_of, statuses

from actordbg.actor.sharing import reopens
from actordbg.base.processes import read_stat
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.journal import read_events
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.launch import Group, Launched, launch
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store


class WarmBench(Bench):
    """Runs scripted replays one after another over the same warm groups."""

    def __init__(self, store):
        super().__init__(store)
        self.warm = WarmGroups(fake_launcher(self.sessions))

    def run(self, spec, script=None, **options):
        return super().run(spec, script or {}, warm=self.warm, **options)


@pytest.fixture
def bench(store):
    bench = WarmBench(store)
    yield bench
    bench.warm.close()


def test_three_replays_share_one_process_and_each_is_an_ordinary_replay(bench):
    specs = [make_spec(2), make_spec(3), make_spec(1)]
    outcomes = [bench.run(spec, {"d2": "fail"}) for spec in specs]  # a failure that taints nothing
    assert [outcome.counts for outcome in outcomes] == [{"passed": 2}, {"passed": 2, "failed": 1}, {"passed": 1}]
    assert {outcome.resolved["pid"] for outcome in outcomes} == set(bench.sessions) and len(bench.sessions) == 1
    assert [one.resolved.get("load_shared_with") for one in outcomes] == [None, *[specs[0].replay_id] * 2]
    for outcome in outcomes:
        events = read_events(outcome.folder / "rank0.jsonl")
        assert [events[0]["event"], events[1]["event"], events[-1]["event"]] == ["boot", "ready", "done"]
        assert (outcome.folder / "rank0.log").exists()
        assert read_events(outcome.folder / "supervisor.jsonl")[-1]["status"] == "complete"
    assert bench.run(specs[2]).all_passed, "a second run reads the orders of the first: nothing is left to do"
    assert bench.left_running() == bench.sessions
    os.kill(bench.sessions[0], signal.SIGKILL)  # a group that dies while it waits is replaced
    time.sleep(0.2)
    after = bench.run(make_spec(1))
    assert after.all_passed and after.restarts == 0 and len(bench.sessions) == 2
    bench.warm.close()
    assert bench.left_running() == []


@pytest.mark.parametrize(
    "reopen, keys, started",
    [
        (False, "aab", 2),
        (True, "abcd", 3),  # another key takes the process, unless one of the two is compiled, as c is
    ],
)
def test_another_key_ends_the_group_unless_it_reopens(bench, reopen, keys, started):
    bench.warm.reopen = reopen
    for key in keys:
        bench.warm.share(key)
        bench.run(make_spec(1, compile=key == "c"))
    assert len(bench.sessions) == started and len(bench.left_running()) == 1


def test_a_process_takes_any_actor_of_its_launcher_and_number_of_processes():
    def kind(**settings):
        return reopens(ReplayConfig(**settings))

    assert kind(backend="deepspeed", nproc=2, zero_stage=2) == kind(backend="deepspeed", nproc=2, zero_stage=3, dtype="bf16")
    assert kind(backend="fsdp2", nproc=2, tp=2) == kind(backend="fsdp2", nproc=2, ring=2) is not None
    kinds = [kind(), *(kind(backend=one, nproc=n) for one in ("deepspeed", "fsdp2") for n in (2, 4)), kind(compile=True)]
    assert len(set(kinds)) == len(kinds) and kinds[-1] is None


@pytest.mark.parametrize(
    "script, expected",
    [({"d1": "kill"}, "crashed"), ({"d1": "tainted"}, "failed")],
)
def test_what_goes_wrong_in_a_shared_process_costs_its_input_and_loads_again(bench, script, expected):
    before = bench.run(make_spec(1))
    outcome = bench.run(make_spec(3, timeout_s=1.5), script)
    assert statuses(outcome) == {"d0": "passed", "d1": expected, "d2": "passed"}
    assert outcome.results["d0"].attempt == 1 and outcome.results["d2"].attempt == 2
    after = bench.run(make_spec(1))
    assert after.all_passed and len(bench.sessions) == 2
    assert after.resolved["pid"] != before.resolved["pid"] and after.resolved["load_shared_with"] == outcome.replay_id


@pytest.mark.parametrize("action", ["fail", "kill"])
def test_an_actor_that_cannot_be_switched_is_loaded_anew_and_nobody_is_blamed(bench, action):
    bench.run(make_spec(1))
    outcome = bench.run(make_spec(2), {"switch": action})
    assert outcome.all_passed and outcome.restarts == 1 and len(bench.sessions) == 2
    assert "load_shared_with" not in outcome.resolved


def test_a_second_ctrl_c_while_groups_leave_does_not_lose_them(bench, monkeypatch):
    def interrupted(launched):
        raise KeyboardInterrupt

    bench.run(make_spec(1))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Launched, "end", interrupted)
        bench.warm.close(at_once=True)
    assert bench.left_running() == bench.sessions
    bench.warm.close(at_once=True)
    assert bench.left_running() == []


def test_a_group_that_computes_together_stays_and_a_crash_in_the_second_replay_is_blamed_on_its_input(bench):
    two, together = {"backend": "deepspeed", "nproc": 2}, {"collective": True}
    assert bench.run(make_spec(2, **two), together).all_passed
    second = bench.run(make_spec(5, **two), together | {"d3": "kill"})
    assert statuses(second) == {f"d{n}": "crashed" if n == 3 else "passed" for n in range(5)} and len(bench.sessions) == 2
    plain = [bench.run(make_spec(4, nproc=2), {"d1": "kill"}) for _ in range(2)]  # each rank for itself
    assert [one.counts for one in plain] == [{"passed": 3, "crashed": 1}] * 2 and len(bench.sessions) == 2 + 3 + 1


@pytest.mark.slow
def test_a_truth_after_an_engines_replay_is_a_fork_of_the_launcher_and_the_next_engine_another(store: Store):
    started: list[Any] = []

    def counted(config: ReplayConfig, group: Group, work: Path) -> Launched:
        started.append(launch(config, group, work))
        return started[-1]

    inputs, engine = publish(store, 1, length=12), {"backend": "deepspeed"}
    with WarmGroups(counted, reopen=True) as warm:
        outcomes = [run_replay(store, spec_of(inputs, **how), warm=warm) for how in (engine, {"truth": "fp32"}, engine)]
        pids = [booted(outcome.folder) for outcome in outcomes]
        last = read_stat(pids[-1])
    assert all(outcome.all_passed for outcome in outcomes) and outcomes[1].resolved["oracle"] == "fp32"
    assert len({*pids, started[0].session}) == 4
    assert len(started) == 1 and last is not None and last.session == started[0].session
    assert started[0].ended() and started[0].process.returncode == 0, "told to leave, it leaves"
