"""fsdp2's launcher for real: torchrun starts scripted workers, and the supervisor's verdicts hold as under deepspeed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from supervised import Bench, make_spec, statuses

from actordbg.base import processes
from actordbg.base.processes import session_members
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import Group, Launched, child_environment, groups_of, launch, start, torchrun_command
from actordbg.replay.worker_logs import reported_by_launcher

CONFIG = ReplayConfig(backend="fsdp2", nproc=2, timeout_s=4.0, launcher="real")


def test_all_ranks_are_one_group_of_this_interpreters_torchrun() -> None:
    assert [(group.ranks, group.collective) for group in groups_of(CONFIG)] == [((0, 1), True)]
    command = torchrun_command(CONFIG, "some.module", Path("/work.json"))
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nproc-per-node=2", "--master-addr=127.0.0.1", "--max-restarts=0"} <= set(command)
    assert command[-4:] == ["--module", "some.module", "--work", "/work.json"]


def test_a_process_that_left_the_launchers_session_is_ended_too(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    launched = start([sys.executable, "-c", program], child_environment(CONFIG, {}), tmp_path / "launcher.log")
    launched.process.wait()
    left = int((tmp_path / "launcher.log").read_text().split()[-1])
    assert session_members(launched.session) == []
    assert session_members(launched.session, launched.mark) == [left]
    launched.end()
    assert session_members(launched.session, launched.mark) == []


def test_a_process_in_the_middle_of_its_exec_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is empty for a moment; a launcher that is ended then would leave it behind."""
    read, asked = processes.environment_of, Counter[int]()

    def at_first_empty(pid: int) -> bytes | None:
        asked[pid] += 1
        return b"" if asked[pid] < 3 else read(pid)

    monkeypatch.setattr(processes, "environment_of", at_first_empty)
    with subprocess.Popen(["sleep", "600"], env={"MARKED": "here"}, start_new_session=True) as sleeping:
        try:
            assert session_members(-1, "MARKED=here") == [sleeping.pid]
        finally:
            sleeping.kill()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("[rank0]:E api.py:1003] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python\n", "SIGKILL"),
        ("[rank0]:E api.py:1003] failed (exitcode: 3) local_rank: 0 (pid: 77) of binary: python\n", "exit code 3"),
        ("[INFO] [launch.py:367] Process 77 exits with return code = -11\n", "SIGSEGV"),
        ("nothing of the kind\n", "an unknown end"),
    ],
)
def test_what_launchers_say_about_a_dead_worker_is_understood(tmp_path: Path, log: str, words: str) -> None:
    launchers = tmp_path / "launcher.log"
    launchers.write_text(log)
    assert words in reported_by_launcher(launchers)


@pytest.mark.slow
def test_crashes_and_hangs_under_torchrun_cost_exactly_their_inputs(bench: Bench) -> None:
    started: list[Launched] = []

    def start(config: ReplayConfig, group: Group, work: Path) -> Launched:
        started.append(launch(config, group, work, "fake_worker"))
        return started[-1]

    spec = make_spec(6, backend="fsdp2", nproc=2, timeout_s=4.0, launcher="real")
    outcome = bench.run(spec, {"d1": "kill", "d2": "hang"}, launcher=start)
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(6)} | {"d1": "crashed", "d2": "hung"}
    assert "SIGKILL" in (outcome.results["d1"].error or "") and outcome.results["d1"].worker == 1
    assert "in _act" in (outcome.results["d2"].log_excerpt or "")
    assert all(one.ended() and session_members(one.session, one.mark) == [] for one in started)
