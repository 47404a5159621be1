"""`actordbg run`: a job below it is recorded without a change to any of its files, ends as it would, and leaves its switch off."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from casefiles import json_cases
from commandline import tried
from roots import run_program, script
from runkit import ROOT, TrainingEnvironment, clean_environment, fake_openrlhf, run_job

from actordbg.capture.control import Control
from actordbg.capture.switch_file import read_control, write_control
from actordbg.store import payload

pytestmark = pytest.mark.forked
FORKED = {"FORKED_PROGRAM": "train.py"}

NO_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.fixture
def tree(tmp_path):
    """A training tree whose files may not change."""
    folder = tmp_path / "tree"
    fake_openrlhf(folder)
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def is_on(store, run="a"):
    return read_control(store, run).enabled


def records(store):
    return sorted((dump.record.run, dump.record.rank) for dump in map(payload.load, store.iter_dumps()))


def test_two_jobs_are_recorded_by_switches_of_their_own_and_no_file_of_them_changes(store, tree):
    write_control(store, Control(True, "common", "2026-11-20T12:00:00.000000Z", 1, every=0, free_floor_bytes=0))
    before, job = contents(tree), ("--", sys.executable, "train.py")
    with ThreadPoolExecutor() as pool:
        names = (("a",), ("b", "--max-dumps", "2"))
        jobs = [pool.submit(run_job, store, "--run", *name, *job, path=tree, cwd=tree, code=NO_TORCH, **FORKED) for name in names]
    done = [job.result() for job in jobs]
    assert [job.returncode for job in done] == [0, 0], done
    assert contents(tree) == before and records(store) == [("a", 0)] * 5 + [("b", 0)] * 2
    assert [is_on(store, name) for name in "ab"] == [False, False]
    assert read_control(store).enabled and read_control(store).run == "common"
    assert "run a, 1 recording actor: 5 calls = 5 captured + 0 dropped + 0 sampled out" in done[0].stderr
    assert done[0].stdout == ""


def test_the_limits_are_those_of_dump_enable_and_a_run_counts_only_its_own_processes(store, tree):
    command = [sys.executable, "train.py"]
    for _ in range(2):
        done = run_job(store, "--run a --every 2 --max-dumps 2 --json", *command, path=tree, cwd=tree, **FORKED)
        answer = json.loads(done.stderr[done.stderr.index("{") :])
        assert answer["total"]["captured"] == 2 and answer["processes"][0]["sampled_out_by"] == {"every": 2, "max_dumps": 1}
        assert answer["switched_off"] is True and answer["exit_code"] == 0 and answer["command"] == command
    assert len(records(store)) == 4


def test_exit_code_and_streams_are_the_jobs(store):
    done = run_job(store, "sh -c", "echo out; echo err >&2; cat; exit 77")
    assert (done.returncode, done.stdout) == (77, "out\n") and "err\n" in done.stderr
    assert (
        "actordbg saw no process call a recorded function" in done.stderr and len(list(store.controls.glob("run-2*.json"))) == 1
    )


def test_an_interrupted_job_is_switched_off(store):
    command = [*f"{sys.executable} -m actordbg --store {store.root} run --run a -- sh -c".split(), "echo ready; exec sleep 60"]
    process = subprocess.Popen(command, env=clean_environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    during = is_on(store)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert (during, is_on(store), process.returncode) == (True, False, 143)


@pytest.mark.parametrize("words, result", json_cases("run_refused"))
def test_bad_input_starts_nothing_and_is_explained(store, words, result):
    code, said = result
    done = tried(store, "run", *words)
    assert getattr(done.exception, "exit_code", done.exit_code) == code and said in f"{done.output} {done.exception}"
    assert not list(store.controls.glob("*.json"))


def test_a_job_that_cannot_start_leaves_its_switch_off(store, tmp_path):
    (tmp_path / "data").write_text("no program")
    (tmp_path / "data").chmod(0o755)
    done = run_job(store, "--run a", str(tmp_path / "data"))
    assert done.returncode == 4 and "error[launch]: " in done.stderr and "Exec format error" in done.stderr
    assert not is_on(store)


def test_a_job_that_goes_on_elsewhere_stays_on(store, tmp_path):
    script(tmp_path / "ray", "")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run_job(store, "--run a -- ray job submit --no-wait -- python x.py", PATH=path)
    assert is_on(store) and "recording stays on for run a" in done.stderr
    run_job(store, "--run b --leave-on -- true")
    run_job(store, "--run c -- ray job submit -- python x.py", PATH=path)
    assert [is_on(store, name) for name in "bc"] == [True, False]


def test_an_environment_without_actordbg_gets_it_lent_and_nothing_else(store, tree, tmp_path):
    environment = TrainingEnvironment(tmp_path / "env", without=("typer", "sqlmodel"))
    program = tree / "looks.py"
    program.write_text(
        "import importlib.util as u; print([u.find_spec(n) is None for n in ('typer', 'sqlmodel')])\nimport train\n"
    )
    alone = [environment.python, "-c", "import actordbg"]
    assert subprocess.run(alone, capture_output=True, cwd="/", env=clean_environment()).returncode == 1
    package = tmp_path / "desk"
    shutil.copytree(ROOT / "actordbg", package / "actordbg")
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from actordbg.cli.app import main; main()",
    ]
    done = run_program([*command, str(package), "--store", str(store.root), "run", "--run", "a", "--", environment.python, "looks.py"], env=clean_environment(), cwd=tree, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[True, True]\n" and records(store) == [("a", 0)] * 5


def test_an_environment_that_lacks_what_the_hook_needs_trains_on(store, tree, tmp_path):
    environment = TrainingEnvironment(tmp_path / "env", without=("zstandard",))
    done = run_job(store, "--", environment.python, "train.py", path=tree, cwd=tree, CODE="5")
    assert done.returncode == 5 and records(store) == []
    (line,) = [line for line in done.stderr.splitlines() if "not recording" in line]
    assert "No module named 'zstandard" in line and "-m pip install zstandard" in line


def test_processes_that_torchrun_starts_are_recorded_by_rank(store, tree):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = run_job(store, "--run a --", *torchrun, path=tree, cwd=tree, CALLS="3", **FORKED)
    assert done.returncode == 0, done.stderr
    assert records(store) == [("a", rank) for rank in range(2) for _ in range(3)]
