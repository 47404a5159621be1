"""Supervision: whatever a worker does, exactly the inputs that did it are lost, and nothing is left running.

The workers here are real processes with the real loop and journal; only what runs an input is scripted (tests/fake_worker.py).
"""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from casefiles import cases_of, json_cases
from supervised import booted, ctrl_c_after, make_spec, statuses
from victims import wait_for

from actordbg.base.errors import Conflict, LaunchProblem, MachineFault, StoreProblem
from actordbg.base.processes import session_members, start_ticks
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import TENSORS, Journal, read_events, read_results
from actordbg.records.replay_record import KEPT_BYTES, PASSED, ResultRecord
from actordbg.replay.group_engine import GroupEngine, Losses, using
from actordbg.replay.supervise import interruptible, load_spec, run_replay


def test_every_input_gets_a_result_and_nothing_is_left_running(bench):
    outcome = bench.run(make_spec(3), {})
    assert statuses(outcome) == {"d0": "passed", "d1": "passed", "d2": "passed"}
    assert outcome.status == "complete" and outcome.all_passed and outcome.restarts == 0
    assert outcome.resolved["model"] == "fake"
    assert bench.left_running() == []
    supervisor = read_events(outcome.folder / "supervisor.jsonl")
    assert [event["event"] for event in supervisor] == ["supervisor", "attempt", "resolved", "finished"]
    assert supervisor[-1]["status"] == "complete"


TOGETHER = {"backend": "deepspeed", "nproc": 2}
"""Two ranks under one launcher, with a barrier in every input: what one does, the other feels."""


CASES = cases_of("supervised")


@pytest.mark.parametrize("name", CASES)
def test_what_goes_wrong_costs_exactly_its_inputs(bench, name):
    (size, *actions), (*ends, restarts, words) = CASES[name]
    count, together = int(size.split()[0]), TOGETHER if "together" in size else {}
    script, lost = (dict(line.split() for line in lines) for lines in (actions, ends))
    waits = {"hang", "stop", "late-fail"}.intersection(script.values())
    spec = make_spec(count, **together, timeout_s=1.0 + bool(together) if waits else 30.0)
    outcome = bench.run(spec, {"collective": bool(together)} | script)
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(count)} | lost
    assert (outcome.status, outcome.restarts, outcome.all_passed) == ("complete", int(restarts.split()[0]), False)
    first = outcome.results[min(lost)]
    assert words in f"{first.error} {first.log_excerpt}"
    attempts = [outcome.results[f"d{n}"].attempt for n in range(count)]
    assert together or (attempts == sorted(attempts) and (attempts[0], attempts[-1]) == (1, outcome.restarts + 1))
    assert bench.left_running() == []


def test_plain_workers_are_independent_and_a_crash_of_one_restarts_only_that_one(bench):
    outcome = bench.run(make_spec(6, nproc=2), {"d2": "kill"})
    assert statuses(outcome) == {f"d{n}": "crashed" if n == 2 else "passed" for n in range(6)}
    assert {record.worker for dump, record in outcome.results.items() if dump in ("d0", "d2", "d4")} == {0}
    assert [outcome.results[f"d{n}"].attempt for n in (0, 4, 1, 3, 5)] == [1, 2, 1, 1, 1]


@pytest.mark.parametrize("collective", [False, True])
def test_a_full_disk_is_no_inputs_result_and_resume_runs_the_input(bench, collective):
    spec, script = make_spec(3, **(TOGETHER if collective else {})), {"collective": collective}
    full = {"d1@1": "full"} if collective else {"d1": "full"}
    with pytest.raises(
        MachineFault, match=r"^No space left on device \(/.* free, /tmp has .* free\); unfinished inputs"
    ) as caught:
        bench.run(spec, script | full)
    folder = bench.store.replays / spec.replay_id
    assert caught.value.exit_code == 4 and f"--resume {spec.replay_id}` continues" in caught.value.hint
    assert "d1" not in read_results(folder) and all(one.status == "passed" for one in read_results(folder).values())
    assert read_events(folder / "supervisor.jsonl")[-1]["why"] == caught.value.message and bench.left_running() == []
    (bench.store.root / "room").touch()
    assert bench.run(spec, script | full).counts == {"passed": 3}


def test_a_disk_that_is_full_before_the_specification_leaves_nothing_to_resume(bench, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = make_spec(1)
    monkeypatch.setattr("actordbg.replay.supervise.atomic_write", full)
    with pytest.raises(MachineFault) as caught:
        run_replay(bench.store, spec)
    assert caught.value.hint == "fix that, then run it again" and not (bench.store.replays / spec.replay_id).exists()


@pytest.mark.parametrize("script, result", json_cases("actor_not_built"))
def test_an_actor_that_cannot_be_built_stops_the_replay_blames_no_input_and_resume_goes_on(bench, script, result):
    (said, started, kept), spec = result, make_spec(3)
    with pytest.raises(LaunchProblem, match=f"(?s){said}") as caught:
        bench.run(spec, script, start_timeout_s=0.5 if script.get("open") == "hang" else 60.0)
    assert "actordbg doctor" in caught.value.hint or started > 1
    assert len(bench.sessions) == started and bench.left_running() == []
    folder = bench.store.replays / spec.replay_id
    assert sorted(read_results(folder)) == kept and read_events(folder / "supervisor.jsonl")[-1]["status"] == "failed"
    if kept:
        assert bench.run(load_spec(bench.store, "last"), {}).counts == {"passed": 2, "crashed": 1}


def test_where_losses_are_counted_together_a_start_that_goes_wrong_is_one(bench, monkeypatch):
    monkeypatch.setattr(Losses, "pause_s", 0.1)
    with pytest.raises(LaunchProblem, match="--max-failures 1"):
        bench.run(make_spec(2), {"open": "kill"}, losses=Losses(1, "--max-failures"))
    assert len(bench.sessions) == 2


def test_a_folder_or_a_journal_that_cannot_be_made_is_a_store_problem(bench):
    spec = make_spec(1)
    make_folder(bench.store.replays / spec.replay_id / "supervisor.jsonl")
    with pytest.raises(StoreProblem, match="cannot write the replay's folder") as caught:
        bench.run(spec, {})
    assert str(bench.store.replays) in caught.value.hint and bench.sessions == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_ends_a_process_interrupts_unless_it_is_ignored_as_under_nohup(number):
    before = signal.getsignal(number)
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), number)
        signal.signal(number, signal.SIG_IGN)
        with interruptible():
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_ctrl_c_keeps_what_is_done_ends_the_children_and_resume_does_the_rest(bench):
    spec = make_spec(5)

    with pytest.raises(KeyboardInterrupt):
        bench.run(spec, {"takes": 0.2}, on_event=ctrl_c_after("d1"))
    folder = bench.store.replays / spec.replay_id
    kept = read_results(folder)
    assert {"d0", "d1"} <= set(kept) < {item.dump_id for item in spec.inputs}
    assert bench.left_running() == []
    assert read_events(folder / "supervisor.jsonl")[-1]["status"] == "interrupted"

    with pytest.raises(StoreProblem) as caught:
        load_spec(bench.store, "nonsense")
    assert spec.replay_id in caught.value.hint and load_spec(bench.store, "last") == spec

    outcome = bench.run(load_spec(bench.store, spec.replay_id[:-2]), {})
    assert len(outcome.results) == 5 and outcome.all_passed
    assert outcome.results["d0"] == kept["d0"] and outcome.results["d4"].attempt == 2
    started = len(bench.sessions)
    assert bench.run(spec, {}).all_passed and len(bench.sessions) == started, "nothing is left to do"


def test_a_worker_says_that_it_is_there_before_it_imports_torch():
    code = "import actordbg.replay.actor_engine, actordbg.replay.worker, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_after_a_power_cut_a_result_without_its_tensors_runs_again(bench):
    spec = make_spec(4)
    folder = bench.store.replays / spec.replay_id
    make_folder(folder / TENSORS)
    journal = Journal(folder / "rank0.jsonl")
    for name, bytes_there in {"d0": 5, "d1": 3, "d2": None}.items():
        moment = now_timestamp()
        record = ResultRecord(spec.replay_id, name, PASSED, started_at=moment, finished_at=moment, extra={KEPT_BYTES: 5})
        journal.append("end", **record.to_dict())
        if bytes_there is not None:
            (folder / TENSORS / f"{name}.safetensors").write_bytes(b"1" * bytes_there)
    (folder / "supervisor.jsonl").write_text(json.dumps({"event": "supervisor", "pid": 2**22 + 1, "ticks": 1}) + "\n")
    outcome = bench.run(spec, {})
    assert statuses(outcome) == {f"d{n}": PASSED for n in range(4)}
    assert sorted(path.name for path in folder.glob("ran-*")) == [f"ran-d{n}-0-True" for n in (1, 2, 3)]


def test_a_replay_that_another_process_supervises_is_refused(bench):
    spec = make_spec(1)
    folder = bench.store.replays / spec.replay_id
    make_folder(folder)
    Journal(folder / "supervisor.jsonl").append("supervisor", pid=os.getppid(), ticks=start_ticks(os.getppid()))
    with pytest.raises(Conflict, match=str(os.getppid())):
        bench.run(spec, {})


def test_workers_end_when_their_supervisor_is_killed_and_who_goes_on_waits_for_that(bench):
    spec = make_spec(1)
    child = os.fork()
    if child == 0:
        bench.run(spec, {"d0": "hang"}, on_event=lambda event: None)
        os._exit(0)
    folder = bench.store.replays / spec.replay_id
    wait_for(lambda: any(event["event"] == "start" for event in read_events(folder / "rank0.jsonl")), 20)
    worker = booted(folder)
    assert session_members(worker)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = []
    outcome = bench.run(spec, {}, on_event=lambda event: left.append(session_members(worker)))
    assert outcome.all_passed and left and not any(left)


class OnePlaceLess(GroupEngine):
    """An engine that deals to two groups, one of which loses its place when it first needs another one, for good."""

    def __init__(self):
        self.asked = Counter()

    def deals(self, config):
        return True

    def groups(self, config, inputs):
        return [range(1), range(1, 2)]

    def ready(self, config, group):
        self.asked[group[0]] += 1
        return group[0] == 0 or self.asked[1] == 1


@pytest.mark.parametrize("first", ["kill", ""])
def test_a_group_that_waits_for_a_place_keeps_no_input_from_the_others(bench, first):
    """Whether it died, and starts again with what it had left, or was done: the other group runs the rest."""
    spec = make_spec(16)
    with using(OnePlaceLess()):
        outcome = bench.run(spec, {"d1": first, "d4": first, "takes": 0.02})
    found = statuses(outcome)
    assert len(found) == 16 and outcome.status == "complete"
    assert Counter(found.values()) == Counter(passed=14, crashed=2) if first else {*found.values()} == {"passed"}
    assert {one.worker for one in outcome.results.values()} == {0, 1}
