"""Starting, following and ending a training: the log is understood, and no process is left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actordbg.base.errors import EnvironmentProblem, LaunchProblem
from actordbg.base.processes import session_members
from actordbg.demo import demo_training as training
from actordbg.demo.demo_training import TrainingJob, copy_trainer
from actordbg.trainers.openrlhf.demo_programs import ON_CPU, PROGRAMS

PPO_LOG = """\
2026-11-20 12:09:27,399 INFO worker.py:2012 -- Started a local Ray instance.
(PolicyModelActor pid=6722) [MoE] experts_implementation (resolved): eager
(PolicyModelActor pid=6722) Actor(
(PolicyModelActor pid=6722)   (model): LlamaForCausalLM(
(PPOTrainer pid=6910) Episode [1/1]:   0%|          | 0/12 [00:00<?, ?it/s]
(PPOTrainer pid=6910) INFO 11-20 12:09:56 ppo_trainer.py:551] ✨ Global step 1: {'actor_lr': 0.0001, 'reward': 0.39504, 'kl': 0}
(PPOTrainer pid=6910) INFO 11-20 12:09:58 ppo_trainer.py:551] ✨ Global step 2: {'actor_lr': 5.5e-05, 'reward': 0.40179}
"""
SFT_LOG = (
    "Actor(\n  (model): LlamaForCausalLM(\n"
    "\rTrain step of epoch 0:   0%|          | 0/24 [00:00<?, ?it/s]\x1b[A"
    "\rTrain step of epoch 0:   4%|4         | 1/24 [00:00<00:01, 19.35it/s, gpt_loss=8.02, lr=0, grad_norm=0]\x1b[A"
    "\rTrain step of epoch 1:   8%|8         | 2/24 [00:00<00:02, 12.83it/s, gpt_loss=6.5, lr=0.0001, grad_norm=5.63]\x1b[A\n"
)


@pytest.mark.parametrize(
    "trainer, log, told",
    [
        ("ppo", PPO_LOG, [("loading", 0, "OpenRLHF's Actor is built (PolicyModelActor)"), ("step", 1, "reward 0.395"),
                          ("step", 2, "reward 0.402")]),
        ("sft", SFT_LOG, [("loading", 0, "OpenRLHF's Actor is built (rank 0)"), ("step", 1, "loss 8.020"), ("step", 26, "loss 6.500")]),
        *((trainer, f"[WARNING] something\n{line}\n", [("starting", 0, line)]) for trainer, line in ON_CPU.items()),
    ],
)  # fmt: skip
def test_a_log_tells_what_stands_in_that_models_are_built_and_steps_across_epochs(trainer, log, told):
    assert list(PROGRAMS[trainer].progress(log)) == told
    assert ("stand-in" in ON_CPU[trainer]) == (trainer == "ppo")


def _job(tmp_path, script):
    log = tmp_path / "train.log"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with log.open("wb") as stream:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=stream, stderr=stream, start_new_session=True)
    return TrainingJob(process, PROGRAMS["sft"], [], log, temporary)


def test_progress_is_reported_in_order_and_each_step_once(tmp_path):
    seen = []
    with _job(tmp_path, f"import time; print({SFT_LOG!r} * 2, flush=True)") as job:
        job.wait(lambda phase, step, text: seen.append((phase, step)), timeout=30)
    steps = [(phase, step) for phase, step in seen if phase != "loading"]
    assert steps == [("starting", 0), ("step", 1), ("step", 26), ("ended", 0)]


def test_a_failed_training_is_reported_with_the_end_of_its_log(tmp_path):
    with _job(tmp_path, "raise SystemExit('the disk is full')") as job, pytest.raises(LaunchProblem) as failure:
        job.wait(timeout=30)
    assert "exit code 1" in failure.value.message and "the disk is full" in failure.value.hint


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = "import os, signal, time; os.setpgid(0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", grandchild])
print("ready", flush=True)
time.sleep(60)
"""


def test_nothing_of_a_training_survives_not_even_what_ignores_being_asked(tmp_path):
    job = _job(tmp_path, STUBBORN)
    deadline = time.monotonic() + 30
    while "ready" not in job.log.read_text() or len(session_members(job.process.pid)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(LaunchProblem, match="within"):
        job.wait(timeout=0.1)
    job.stop(grace=0.2)
    assert session_members(job.process.pid) == []
    assert not job.temporary.exists()


def test_an_interruption_ends_the_training_and_passes_on(tmp_path):
    def interrupt(*progress):
        raise KeyboardInterrupt

    job = _job(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(KeyboardInterrupt), job:
        job.wait(interrupt)
    assert session_members(job.process.pid) == []


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed openrlhf that cannot be imported without leaving a trace."""
    package = tmp_path / "site-packages" / "openrlhf"
    (package / "models" / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "models" / "actor.py").write_text("class Actor: ...\n")
    (package / "models" / "__pycache__" / "actor.cpython-311.pyc").write_bytes(b"stale")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "openrlhf", raising=False)  # other tests of this process imported the real one
    return package


def test_openrlhf_is_copied_without_importing_it_and_without_compiled_files(installed, tmp_path):
    actor = copy_trainer(tmp_path / "private")
    assert actor == tmp_path / "private" / "openrlhf" / "models" / "actor.py"
    assert actor.read_bytes() == (installed / "models" / "actor.py").read_bytes()
    assert not list((tmp_path / "private").rglob("*.pyc"))
    assert actor.stat().st_ino != (installed / "models" / "actor.py").stat().st_ino


def test_no_openrlhf_is_an_error_that_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "openrlhf", raising=False)
    with pytest.raises(EnvironmentProblem) as failure:
        copy_trainer(tmp_path / "private")
    assert "--no-deps" in failure.value.hint


def test_the_training_inherits_no_rank_no_cluster_and_no_switch_of_ours(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "RAY_ADDRESS", "ACTORDBG_DISABLE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    env = training._environment(Path("/private"), {"EXTRA": "1"})
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "RAY_ADDRESS", "ACTORDBG_DISABLE"} & set(env)
    assert env["EXTRA"] == "1" and env["HF_HUB_OFFLINE"] == "1"
    first, ours, *rest = env["PYTHONPATH"].split(os.pathsep)
    assert first == "/private" and (Path(ours) / "actordbg" / "__init__.py").is_file() and rest == ["/users/own"]


def test_rays_directory_leaves_room_for_its_socket_paths(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(deep))
    path = training._short_temporary_directory()
    try:
        assert len(str(path)) + len("/session_2026-11-20_12-09-22_253233_4194304/sockets/plasma_store") < 107
    finally:
        path.rmdir()
