"""What is started: command lines and environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from roots import ROOT
from stopcases import nobody_is_left
from supervised import Bench, make_spec, statuses

from actordbg.base import processes
from actordbg.base.errors import Unsupported
from actordbg.base.processes import session_members
from actordbg.config import consent
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import child_environment, command_of, groups_of, launch, start
from actordbg.replay.worker_logs import reported_by_launcher

DEEPSPEED = ReplayConfig(backend="deepspeed", nproc=2, launcher="real")
WORK = Path("/store/replays/r/work-0-1.json")


@pytest.mark.parametrize(
    ("settings", "variables", "program", "has", "lacks"),
    [
        ({}, {"DS_ACCELERATOR": "cpu"}, "deepspeed.launcher.runner", {"--hostfile=/dev/null", "--num_accelerators=2"}, "include"),
        ({}, {"CUDA_VISIBLE_DEVICES": "3, 5,6"}, "deepspeed.launcher.runner", {"--include=localhost:3,5"}, "num_accelerators"),
        (
            {"launcher": "direct"},
            {"CUDA_VISIBLE_DEVICES": "3, 5,6"},
            "actordbg.replay.rank_launcher",
            {"--devices=3,5"},
            "--module",
        ),
        ({"launcher": "direct"}, {"DS_ACCELERATOR": "cpu"}, "actordbg.replay.rank_launcher", {"--like=deepspeed"}, "--devices"),
        (
            *({"backend": "fsdp2"}, {}, "torch.distributed.run"),
            *({"--nproc-per-node=2", "--master-addr=127.0.0.1", "--max-restarts=0"}, "--devices"),
        ),
    ],
)
def test_launchers_are_this_interpreters_and_take_the_visible_devices(
    settings: dict[str, str], variables: dict[str, str], program: str, has: set[str], lacks: str
) -> None:
    """deepspeed would read a hostfile, and take the first devices whatever is visible."""
    command = command_of(replace(DEEPSPEED, **settings), variables, "some.module", WORK)
    assert command[:3] == [sys.executable, "-m", program] and has <= set(command)
    assert command[-3:] == ["some.module", "--work", str(WORK)] and not any(lacks in part for part in command)


@pytest.mark.parametrize(("devices", "words"), [("3", "needs 2 GPUs"), ("GPU-aa,GPU-bb", "device numbers")])
def test_devices_that_deepspeed_cannot_take_are_refused(devices: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        command_of(DEEPSPEED, {"CUDA_VISIBLE_DEVICES": devices}, "m", WORK)


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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_a_rank_that_is_started_directly_cannot_tell_it_from_the_real_launcher(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shows_itself.py").write_text(SHOWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen: dict[str, list[dict[str, Any]]] = {}
    consent.give("/models/mine")  # which no launcher takes for an option of its own
    for kind in ("direct", "real"):
        config = ReplayConfig(backend=backend, nproc=2, launcher=kind, model="/models/mine")
        (work := tmp_path / kind / "work.json").parent.mkdir()
        assert launch(config, groups_of(config)[0], work, "shows_itself").process.wait(600) == 0
        seen[kind] = [json.loads((work.parent / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for direct, real in zip(seen["direct"], seen["real"], strict=True):
        ours, theirs = (
            {name: value for name, value in one["environ"].items() if name not in DIFFERENT | BY_THE_REAL_ALONE}
            for one in (direct, real)
        )
        assert ours == theirs
        words = [[word for word in one["words"] if "work.json" not in word] for one in (direct, real)]
        assert words[0] == words[1] and words[0][-2:] == [consent.FLAG, "/models/mine"]
    consent.withhold()


@pytest.mark.parametrize(
    ("nproc", "variables", "made"),
    [
        (2, {}, {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}),
        (2, {"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "7"}),
        (1, {}, {"OMP_NUM_THREADS": None, "HF_HUB_OFFLINE": None}),
        (1, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "KEEP": "1"},
         {"RANK": None, "WORLD_SIZE": None, "MASTER_PORT": None, "TORCHELASTIC_RUN_ID": None, "KEEP": "1"}),
        (1, {"PYTHONPATH": "/mine"}, {"PYTHONPATH": os.pathsep.join((str(ROOT), "/mine"))}),
    ],
)  # fmt: skip
def test_workers_share_the_cores_import_actordbg_and_know_nothing_of_a_launcher_around(
    nproc: int, variables: dict[str, str], made: dict[str, str | None]
) -> None:
    environment = child_environment(ReplayConfig(nproc=nproc), variables)
    assert {name: environment.get(name) for name in made} == made


def test_a_process_that_left_the_launchers_session_is_ended_too(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
    launched = start([sys.executable, "-c", program], child_environment(DEEPSPEED, {}), tmp_path / "launcher.log")
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
    spec = make_spec(6, backend="fsdp2", nproc=2, timeout_s=4.0, launcher="real")
    outcome = bench.run(spec, {"d1": "kill", "d2": "hang"})
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(6)} | {"d1": "crashed", "d2": "hung"}
    assert "SIGKILL" in (outcome.results["d1"].error or "") and outcome.results["d1"].worker == 1
    assert "in _act" in (outcome.results["d2"].log_excerpt or "")
    assert nobody_is_left(outcome.folder) and bench.left_running() == []
