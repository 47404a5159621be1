"""`actordbg actor init`: one process builds the actor and says what it is; and how options and settings become a configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import program
from roots import ROOT

from actordbg.base.processes import end_session, read_stat, session_members

pytestmark = pytest.mark.slow


def init(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return program("--store", str(store), "actor", "init", *arguments, OMP_NUM_THREADS="1")


def test_it_builds_runs_and_saves_and_says_what_it_built(tmp_path: Path):
    saved = tmp_path / "saved"
    done = init(tmp_path / "store", "--num-layers", "1", "--packing", "--backward", "--save", str(saved), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"]
    expected = {"attn": "sdpa", "dtype": "fp32", "packing": True, "num_layers": 1, "backend": "plain", "zero_stage": 0}
    assert {name: answer["resolved"][name] for name in expected} == expected
    assert answer["resolved"]["parameters"] > 500_000
    assert answer["forward_s"] > 0 and answer["backward_s"] > 0 and answer["grad_norm"] > 0
    assert answer["peak_memory_bytes"] > 50_000_000
    assert [finding["id"] for finding in answer["findings"]] == ["vocabulary-folded"]
    assert "info[vocabulary-folded]" in done.stderr
    assert (saved / "model.safetensors").is_file()
    assert json.loads((saved / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--backend", "deepspeed", "--zero-stage", "1", "--deepcompile"), 3, "DeepCompile runs on CUDA only"),
        (("--num-layers", "9"), 2, "the model has 2 layers"),  # an error in the worker keeps its exit code
    ],
)
def test_what_is_known_to_fail_is_refused_here_or_in_the_worker(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str):
    done = init(tmp_path / "store", *arguments)
    assert done.returncode == code and said in done.stderr
    assert code == 2 or not (tmp_path / "store").exists(), "nothing was started"


def test_what_the_model_raises_is_the_answer(tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    done = init(tmp_path / "store", "--model", str(broken), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert not answer["ok"]
    assert "OSError" in answer["error"]
    assert answer["signature"].startswith("OSError: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_worker_outlives_the_command(tmp_path: Path, number: signal.Signals):
    """A worker with minutes of work; after a SIGKILL, where nobody ends it, it notices within seconds."""
    command = [sys.executable, "-m", "actordbg", "--store", str(tmp_path), "actor", "init", "--backward"]
    command += ["--batch-size", "16", "--seq-len", "4096", "--timeout", "600"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (workers := workers_of(running.pid)):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(number)
    assert running.wait(timeout=20) == (-9 if number == signal.SIGKILL else 130)
    deadline = time.monotonic() + 15
    try:
        while any(session_members(worker) for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for worker in workers:
            end_session(worker, grace_s=0)


def workers_of(pid: int) -> list[int]:
    """The workers that the command with this pid started; each leads a session."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(int, children) if (stat := read_stat(child)) and stat.session == child]
