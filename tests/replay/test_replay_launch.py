"""What is started: command lines and environments."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from roots import ROOT, environment, read_json, run_program

from actordbg.base import processes
from actordbg.base.processes import describe_status, session_members
from actordbg.config import consent
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import child_environment, free_port, groups_of, launch, start
from actordbg.replay.rank_launcher import NodeShare, variables
from actordbg.replay.worker_logs import status_by_launcher

DEEPSPEED = ReplayConfig(backend="deepspeed", nproc=2)


@pytest.mark.parametrize("visible, given", [(None, "0,1"), ("", ""), ("3,5", "3,5"), ("GPU-aa,GPU-bb", "GPU-aa,GPU-bb")])
def test_ranks_of_deepspeed_have_the_visible_devices(monkeypatch, visible, given):
    """deepspeed itself would take the first devices whatever is visible."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert variables("deepspeed", 2, NodeShare(0, 2), 1)["CUDA_VISIBLE_DEVICES"] == given


SHOWN = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--work") + 1]).parent
about = {"environ": dict(os.environ), "words": sys.argv[1:]}
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(about))
"""
BY_THE_REAL_ALONE = {
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip
"""What serves the talk of torchrun's agent with its workers, and what importing deepspeed sets, which a worker does as well."""
DIFFERENT = {"MASTER_PORT", "ACTORDBG_GROUP", "TORCHELASTIC_RUN_ID", "KINETO_LOG_LEVEL"}
REAL = {
    "deepspeed": "deepspeed.launcher.runner --hostfile=/dev/null --num_accelerators=2 --master_port={port}",
    "fsdp2": "torch.distributed.run --nnodes=1 --nproc-per-node=2 --node-rank=0 --master-addr=127.0.0.1 --master-port={port} "
    "--max-restarts=0",
}


@pytest.mark.forked
@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_a_rank_cannot_tell_that_it_is_not_started_by_the_real_launcher(backend, tmp_path, monkeypatch):
    (tmp_path / "shows_itself.py").write_text(SHOWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = ReplayConfig(backend=backend, nproc=2)
    ours, theirs = (tmp_path / kind / "work.json" for kind in ("ours", "theirs"))
    for work in (ours, theirs):
        work.parent.mkdir()
    assert launch(config, groups_of(config)[0], ours, "shows_itself").process.wait(600) == 0
    real = [
        sys.executable,
        "-m",
        *REAL[backend].format(port=free_port()).split(),
        "--module",
        "shows_itself",
        *("--first-worker", "0", "--supervisor", str(os.getpid()), "--work", str(theirs)),
    ]
    assert start(real, child_environment(config, os.environ), theirs.with_name("launcher.log")).process.wait(600) == 0
    for rank in (0, 1):
        mine, other = (read_json(work.parent / f"rank{rank}.json") for work in (ours, theirs))
        for about in (mine, other):
            about["environ"] = {k: v for k, v in about["environ"].items() if k not in DIFFERENT | BY_THE_REAL_ALONE}
            about["words"] = [word for word in about["words"] if "work.json" not in word]
        assert mine == other


@pytest.mark.slow
def test_a_worker_is_forked_where_tests_ask_for_that(forked_workers, tmp_path):
    """It went unnoticed that none was any more once workers had another variable: each takes seconds more."""
    assert launch(ReplayConfig(), range(1), tmp_path / "no-order.json").process.wait(60) == 1
    assert "template_of_workers.py" in (tmp_path / "rank0.log").read_text()


@pytest.mark.slow
def test_a_fork_that_is_killed_ends_so_and_does_not_run_again(forked_workers):
    words = [sys.executable, "-c", "import os; print('ran', flush=True); os.kill(os.getpid(), 9)"]
    done = run_program(words, env=environment(FORKED_PROGRAM="-c"))
    assert (done.returncode, done.stdout) == (-9, "ran\n")


def test_a_worker_gets_consent_and_plugin_from_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "shows_itself.py").write_text(SHOWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    consent.give("/models/mine")
    consent.use_plugin("my_backend")
    try:
        launched = launch(ReplayConfig(model="/models/mine"), range(1), tmp_path / "work.json", "shows_itself")
        assert launched.process.wait(60) == 0
    finally:
        consent.withhold()
        consent.use_plugin(None)
    words = read_json(tmp_path / "rank0.json")["words"]
    given = words[words.index(consent.FLAG) : words.index("--first-worker")]
    assert given == [consent.FLAG, "/models/mine", consent.PLUGIN, "my_backend"]


def test_a_lone_worker_that_was_killed_and_reaped_tells_how_it_ended(tmp_path, monkeypatch):
    """Asking whether it has ended reaps it: where it died since the last look, all that was said was "an unknown end"."""
    (tmp_path / "kills_itself.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launched = launch(ReplayConfig(), range(1), tmp_path / "work.json", "kills_itself")
    identity = launched.process.pid, processes.start_ticks(launched.process.pid)
    launched.process.wait(60)
    assert launched.state_of(identity) == (processes.GONE, signal.SIGKILL)


@pytest.mark.parametrize(
    "nproc, variables, made",
    [
        (2, {}, {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}),
        (2, {"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "7"}),
        (1, {}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        (1, {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        (1, {}, {"OMP_NUM_THREADS": None, "HF_HUB_OFFLINE": None}),
        (1, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "KEEP": "1"},
         {"RANK": None, "WORLD_SIZE": None, "MASTER_PORT": None, "TORCHELASTIC_RUN_ID": None, "KEEP": "1"}),
        (1, {"PYTHONPATH": "/mine"}, {"PYTHONPATH": os.pathsep.join((str(ROOT), "/mine"))}),
    ],
)  # fmt: skip
def test_workers_share_the_cores_import_actordbg_and_know_nothing_of_a_launcher_around(nproc, variables, made):
    environment = child_environment(ReplayConfig(nproc=nproc), variables)
    assert {name: environment.get(name) for name in made} == made


def test_a_process_that_left_the_launchers_session_is_ended_too(tmp_path):
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    launched = start([sys.executable, "-c", program], child_environment(DEEPSPEED, {}), tmp_path / "launcher.log")
    launched.process.wait()
    left = int((tmp_path / "launcher.log").read_text().split()[-1])
    assert session_members(launched.session) == []
    assert session_members(launched.session, launched.mark) == [left]
    launched.end()
    assert session_members(launched.session, launched.mark) == []


def test_a_process_in_the_middle_of_its_exec_is_found(monkeypatch):
    """Its environment is empty for a moment; a launcher that is ended then would leave it behind."""
    read, asked = processes.environment_of, Counter[int]()

    def at_first_empty(pid):
        asked[pid] += 1
        return b"" if asked[pid] < 3 else read(pid)

    monkeypatch.setattr(processes, "environment_of", at_first_empty)
    with subprocess.Popen(["sleep", "600"], env={"MARKED": "here"}, start_new_session=True) as sleeping:
        try:
            assert session_members(-1, "MARKED=here") == [sleeping.pid]
        finally:
            sleeping.kill()


@pytest.mark.parametrize(
    "log, words",
    [
        ("rank 1 (pid 77) exits with return code = -11\n", "SIGSEGV"),
        ("rank 0 (pid 7) exits with return code = -9\nrank 1 (pid 77) exits with return code = 3\n", "exit code 3"),
        ("nothing of the kind\n", "an unknown end"),
    ],
)
def test_what_the_launcher_says_about_a_dead_worker_is_understood(tmp_path, log, words):
    launchers = tmp_path / "launcher.log"
    launchers.write_text(log)
    assert words in describe_status(status_by_launcher(launchers))
    expected = signal.SIGKILL if "= -9" in log else None
    assert status_by_launcher(launchers, 7) == expected, "of one rank alone"
