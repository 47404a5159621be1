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
from roots import ROOT

from actordbg.base.processes import end_session, read_stat, session_members

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from pathlib import Path
import typer
from actordbg.cli.actor_init import init
from actordbg.base.errors import ActordbgError
app, actor = typer.Typer(), typer.Typer()
app.add_typer(actor, name="actor")
actor.command("init")(init)
@app.callback()
def root(store: Path = None): ...
try:
    app()
except ActordbgError as error:
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def init(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "--store", str(store), "actor", "init", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


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


def test_a_combination_known_to_fail_is_refused_before_anything_starts(tmp_path: Path):
    done = init(tmp_path / "store", "--backend", "deepspeed", "--zero-stage", "1", "--deepcompile")
    assert done.returncode == 3
    assert "DeepCompile runs on CUDA only" in done.stderr
    assert not (tmp_path / "store").exists()


def test_an_error_in_the_worker_keeps_its_exit_code(tmp_path: Path):
    done = init(tmp_path / "store", "--num-layers", "9")
    assert done.returncode == 2
    assert "the model has 2 layers" in done.stderr


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
