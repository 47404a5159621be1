"""`actordbg run`: a job below it is recorded without a change to any of its files, ends as it would, and leaves its switch off."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from runkit import ROOT, TrainingEnvironment, clean_environment, fake_openrlhf, run_job

from actordbg.capture.control import Control, read_control, write_control
from actordbg.cli import dump_recording, run
from actordbg.cli.capture_options import CaptureOptions
from actordbg.install import trailer
from actordbg.store import payload
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

NO_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A training tree whose files may not change."""
    folder = tmp_path / "tree"
    fake_openrlhf(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def train(store: Store, tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_job(store, "--run", "a", "--", sys.executable, "train.py", path=tree, cwd=tree, **environment)


def is_on(store: Store, run: str = "a") -> bool:
    return read_control(store, run).enabled


def records(store: Store) -> list[tuple[str, int]]:
    return sorted((dump.record.run, dump.record.rank) for dump in map(payload.load, store.iter_dumps()))


def test_a_job_is_recorded_and_no_file_of_it_changes(store, tree: Path):
    before = contents(tree)
    done = train(store, tree, code=NO_TORCH)
    assert done.returncode == 0, done.stderr
    assert contents(tree) == before
    assert records(store) == [("a", 0)] * 5
    assert not is_on(store) and read_control(store) is None
    assert "run a, 1 recording actor: 5 calls = 5 captured + 0 dropped + 0 sampled out" in done.stderr
    assert done.stdout == ""


def test_the_limits_are_those_of_dump_enable(store, tree: Path):
    done = run_job(store, "--every", "2", "--max-dumps", "2", "--json", sys.executable, "train.py", path=tree, cwd=tree)
    answer = json.loads(done.stderr[done.stderr.index("{") :])
    assert answer["total"]["captured"] == 2 and answer["processes"][0]["sampled_out_by"] == {"every": 2, "max_dumps": 1}
    assert answer["run"].startswith("run-2") and answer["switched_off"] is True and answer["exit_code"] == 0
    assert answer["command"] == [sys.executable, "train.py"]


def test_run_takes_the_options_of_dump_enable_with_the_same_defaults():
    names = {one.name for one in fields(CaptureOptions)}

    def defaults(function: Callable[..., None]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.values()
        declared = [p for p in parameters if p.name in names]
        return {p.name: (p.annotation, vars(p.default)) for p in declared}

    assert defaults(dump_recording.enable) == defaults(run.run)
    assert set(inspect.signature(dump_recording.enable).parameters) - names == {"ctx", "run"}


@pytest.mark.parametrize("code", [0, 1, 3, 77])
def test_the_exit_code_is_the_jobs(store, tree: Path, code: int):
    done = run_job(store, "sh", "-c", f"echo out; echo err >&2; cat; exit {code}", path=tree)
    assert (done.returncode, done.stdout) == (code, "out\n") and "err\n" in done.stderr
    assert "no process called what is recorded" in done.stderr


def test_a_job_that_a_signal_ended_is_128_and_its_number_and_switched_off(store):
    done = run_job(store, "--run", "a", "--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == 143 and not is_on(store)


def test_an_interrupted_job_is_switched_off(store, tree: Path):
    program = "import time; print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "run", "--run", "a", "--"]
    environment = clean_environment(PYTHONPATH=str(ROOT))
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    during = is_on(store)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    after = is_on(store)
    assert (during, after) == (True, False)
    assert process.returncode == 143


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["no-such-program"], 4, "error[launch]: there is no program no-such-program"),
        (["--run", "a/b", "true"], 2, "cannot name a run"),
        (["--on", "nonsense", "true"], 2, "error[usage]: --on"),
        (["--max-bytes", "many", "true"], 2, "error[usage]"),
        ([], 2, "COMMAND"),
    ],
)
def test_bad_input_starts_nothing_and_is_explained(store, words: list[str], code: int, said: str):
    done = run_job(store, *words)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr
    assert not list(store.controls.glob("*.json"))


def test_a_job_that_cannot_start_leaves_its_switch_off(store, tmp_path):
    (tmp_path / "data").write_text("no program")
    (tmp_path / "data").chmod(0o755)
    done = run_job(store, "--run", "a", str(tmp_path / "data"))
    assert done.returncode == 4 and "Exec format error" in done.stderr
    assert not is_on(store)


def test_two_jobs_in_one_store_have_switches_of_their_own(store, tree: Path):
    write_control(store, Control(True, "common", "2026-11-20T12:00:00.000000Z", 1, every=0, free_floor_bytes=0))
    environment = clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(tree)]))
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "run"]
    jobs = [
        subprocess.Popen([*command, "--run", name, *limit, "--", sys.executable, "train.py"], env=environment, cwd=tree, stderr=subprocess.DEVNULL)
        for name, limit in (("a", []), ("b", ["--max-dumps", "2"]))
    ]  # fmt: skip
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    assert records(store) == [("a", 0)] * 5 + [("b", 0)] * 2
    common = read_control(store)
    assert common.enabled and common.run == "common"


def test_names_given_by_default_differ_in_the_same_second(store):
    for _ in range(3):
        assert run_job(store, "true").returncode == 0
    assert len(list(store.controls.glob("run-*.json"))) == 3


def test_a_run_again_counts_only_its_own_processes(store, tree: Path):
    words = ("--run", "a", "--json", "--", sys.executable, "train.py")
    for _ in range(2):
        done = run_job(store, *words, path=tree, cwd=tree)
        assert json.loads(done.stderr[done.stderr.index("{") :])["total"]["calls"] == 5
    assert len(records(store)) == 10


def test_a_job_that_goes_on_elsewhere_stays_on(store, tmp_path):
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    ray.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_job(store, "--run", "a", "--", "ray", "job", "submit", "--no-wait", "--", "python", "x.py", PATH=path)
    assert is_on(store) and "recording stays on for run a" in done.stderr
    (option,) = [word for word in done.stdout.splitlines() if word.startswith("--runtime-env-json=")]
    variables = json.loads(option.partition("=")[2])["env_vars"]
    assert (variables["ACTORDBG_STORE"], variables["ACTORDBG_RUN"]) == (str(store.root), "a")
    run_job(store, "--run", "b", "--leave-on", "--", "true")
    run_job(store, "--run", "c", "--", "ray", "job", "submit", "--", "python", "x.py", PATH=path)
    assert [is_on(store, name) for name in "bc"] == [True, False]


def test_a_patched_actor_is_recorded_once(store, tree: Path):
    actor = tree / "openrlhf" / "models" / "actor.py"
    actor.write_bytes(trailer.append(actor.read_bytes(), str(store.root)))
    train(store, tree)
    assert records(store) == [("a", 0)] * 5


def test_an_environment_without_actordbg_gets_it_lent_and_nothing_else(store, tree: Path, tmp_path):
    environment = TrainingEnvironment(tmp_path / "env", without=("typer", "sqlmodel"))
    program = tree / "looks.py"
    program.write_text(
        "import importlib.util as u; print([u.find_spec(n) is None for n in ('typer', 'sqlmodel')])\nimport train\n"
    )
    alone = [environment.python, "-c", "import actordbg"]
    assert subprocess.run(alone, capture_output=True, cwd="/", env=clean_environment()).returncode == 1
    package = tmp_path / "desk"
    shutil.copytree(ROOT / "actordbg", package / "actordbg", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from actordbg.cli.app import main; main()",
    ]
    done = subprocess.run(
        [*command, str(package), "--store", str(store.root), "run", "--run", "a", "--", environment.python, "looks.py"],
        env=clean_environment(), cwd=tree, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, True]\n" and records(store) == [("a", 0)] * 5


def test_an_environment_that_lacks_what_the_hook_needs_trains_on(store, tree: Path, tmp_path):
    environment = TrainingEnvironment(tmp_path / "env", without=("zstandard",))
    done = run_job(store, "--", environment.python, "train.py", path=tree, cwd=tree, CODE="5")
    assert done.returncode == 5 and records(store) == []
    (line,) = [line for line in done.stderr.splitlines() if "not recording" in line]
    assert "No module named 'zstandard" in line and "-m pip install zstandard" in line


@pytest.mark.parametrize("launcher", ["script", "module", "spawn", "torchrun"])
def test_processes_of_every_kind_are_recorded_by_rank(store, tree: Path, launcher: str):
    (tree / "spawns.py").write_text(
        "import multiprocessing, os, runpy\n"
        "def work(rank):\n"
        "    os.environ['RANK'] = str(rank); runpy.run_path('train.py')\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    children = [context.Process(target=work, args=(rank,)) for rank in range(2)]\n"
        "    [child.start() for child in children]; [child.join() for child in children]\n"
    )
    (tree / "job.sh").write_text(f"set -e\n{sys.executable} train.py\n")
    command = {
        "script": ["bash", "job.sh"],
        "module": [sys.executable, "-m", "train"],
        "spawn": [sys.executable, "spawns.py"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
    }[launcher]  # fmt: skip
    done = run_job(store, "--run", "a", "--", *command, path=tree, cwd=tree, CALLS="3")
    assert done.returncode == 0, done.stderr
    ranks = 2 if launcher in ("spawn", "torchrun") else 1
    assert records(store) == [("a", rank) for rank in range(ranks) for _ in range(3)]


def test_limits_can_be_changed_while_the_job_runs(store, tree: Path):
    (tree / "waits.py").write_text(
        "import sys, time, torch\nfrom openrlhf.models.actor import Actor\nactor = Actor()\n"
        "def call():\n    time.sleep(1.2); actor(torch.arange(16).reshape(2, 8))\n"
        "call(); print('one', flush=True); sys.stdin.readline(); call(); call()\n"
    )
    environment = clean_environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(tree)]))
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root)]
    job = subprocess.Popen(
        [*command, "run", "--run", "a", "--", sys.executable, "waits.py"], env=environment, cwd=tree, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert job.stdout.readline() == "one\n"
    subprocess.run([*command, "dump", "enable", "--run", "a", "--max-dumps", "0"], env=environment, check=True, capture_output=True)  # fmt: skip
    time.sleep(0.6)
    _, err = job.communicate("\n", timeout=60)
    assert "3 calls = 1 captured + 0 dropped + 2 sampled out" in err
    assert records(store) == [("a", 0)]


def test_a_job_under_the_deepspeed_launcher_is_recorded(store, tree: Path):
    from deepspeed.launcher.runner import EXPORT_ENVS

    from actordbg.replay.launch import free_port

    assert "PYTHON" in EXPORT_ENVS  # what our addition to this list rests on
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        "2",
        "--master_port",
        str(free_port()),
    ]
    done = run_job(
        store, "--run", "a", "--", *launcher, "train.py", path=tree, cwd=tree, DS_ACCELERATOR="cpu", CALLS="3"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert records(store) == [("a", rank) for rank in range(2) for _ in range(3)]
