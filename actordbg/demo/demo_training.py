"""Start one real OpenRLHF training as a child process, follow its log, and leave nothing running afterwards.

The trainer is OpenRLHF's own command (`train_ppo_ray` under Ray, or `train_sft` under the deepspeed launcher), imported from a
*private copy* of the installed package, so that the demo can patch it while the user's environment stays as it was. The copy
wins because it is first on PYTHONPATH, which Ray hands to its workers and DeepSpeed to its ranks.

Processes: everything runs in a session of its own (`setsid`). Ray starts a handful of daemons and workers; whoever is still
in that session when the training ends, fails or is interrupted is killed. A Ray cluster of the user's is never touched:
RAY_ADDRESS is taken out of the environment, and no `ray stop` is run, which would end other people's.

Example:
    actor_py = copy_openrlhf(work / "site")
    with start_training("ppo", work, work / "site", {}) as job:
        job.wait(on_progress=print, timeout=300)
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import actordbg
from actordbg.base.errors import EnvironmentProblem, LaunchProblem
from actordbg.demo.demo_assets import build_assets
from actordbg.demo.demo_recipes import PPO_PROMPTS, SFT_CONVERSATIONS, Trainer, ppo_command, sft_command
from actordbg.host.openrlhf.demo_driver import ON_CPU, RAY_TEMP_VARIABLE
from actordbg.replay.launch import free_port
from actordbg.replay.processes import session_members

Phase = Literal["starting", "loading", "step", "ended"]

# Set by launchers and by OpenRLHF itself; a value inherited from the user's shell would send the run somewhere else.
_NOT_INHERITED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "RAY_ADDRESS", "ACTORDBG_DISABLE", "ACTORDBG_STORE",
)  # fmt: skip
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Progress:
    """Where a training is: its `phase`, the last finished `step` (PPO: global steps; SFT: micro-batches), and words for it.

    At a step, `text` holds the trainer's own figure ("reward 0.395", "loss 2.7").
    """

    phase: Phase
    step: int = 0
    text: str = ""


@dataclass
class TrainingJob:
    """A running training. Use it as a context manager: leaving it ends every process it started."""

    process: subprocess.Popen[bytes]
    command: list[str]
    log: Path
    temporary: Path
    _seen: int = field(default=0, repr=False)
    _step: int = field(default=0, repr=False)

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, on_progress: Callable[[Progress], object] | None = None, *, timeout: float = 600.0) -> None:
        """Follow the log until the training ends. Raises LaunchProblem if it fails or takes longer than `timeout` seconds.

        `on_progress` is called in this thread, once for each change of phase or step; while it runs, the training runs on.
        """
        deadline = time.monotonic() + timeout
        report = on_progress or (lambda progress: None)
        report(Progress("starting", text="starting processes, each of which imports torch: most of the time goes here"))
        while True:
            code = self.process.poll()
            for progress in self._new_progress():
                report(progress)
            if code is not None:
                break
            if time.monotonic() > deadline:
                raise LaunchProblem(f"the training did not end within {timeout:.0f} s", hint=self._last_words())
            time.sleep(0.1)
        if code != 0:
            raise LaunchProblem(f"the training ended with exit code {code}", hint=self._last_words())
        report(Progress("ended", text="the training ended"))

    def stop(self, grace: float = 5.0) -> None:
        """End every process of the training's session, politely for `grace` seconds, and remove its temporary files."""
        session = self.process.pid
        if self.process.poll() is None:
            self.process.terminate()
        deadline = time.monotonic() + grace
        while session_members(session) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.05)
        for pid in session_members(session):
            _kill(pid)
        self.process.wait()
        while session_members(session):
            time.sleep(0.02)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _new_progress(self) -> Iterator[Progress]:
        with self.log.open("rb") as stream:
            stream.seek(self._seen)
            text = stream.read()
        complete = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._seen += complete
        for progress in read_progress(text[:complete].decode(errors="replace")):
            if progress.phase != "step" or progress.step > self._step:  # progress bars repeat themselves
                self._step = max(self._step, progress.step)
                yield progress

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        tail = [line for line in lines if line.strip()][-15:]
        return "\n".join([f"the end of {self.log}:", *tail])


def start_training(trainer: Trainer, workdir: Path, package_dir: Path, env: Mapping[str, str]) -> TrainingJob:
    """Start `trainer` on freshly built assets in `workdir`, importing openrlhf from `package_dir`; return at once.

    `env` is added to the environment of every process of the run. The log is `workdir/<trainer>.log`.
    """
    assets = build_assets(workdir, prompts=PPO_PROMPTS, conversations=SFT_CONVERSATIONS)
    temporary = _short_temporary_directory()
    if trainer == "ppo":
        command = ppo_command(assets, workdir / "checkpoint")
    else:
        command = sft_command(assets, workdir / "checkpoint", port=free_port())
    log = workdir / f"{trainer}.log"
    empty = workdir / "cwd"  # `python -m` puts the working directory on sys.path: let there be nothing in it
    empty.mkdir(exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=empty,
            env=_environment(package_dir, {**env, RAY_TEMP_VARIABLE: str(temporary)}),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return TrainingJob(process, command, log, temporary)


def copy_openrlhf(destination: Path) -> Path:
    """Copy the installed openrlhf under `destination` without importing it; return the copy's `models/actor.py`."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentProblem(
            "OpenRLHF is not installed in this environment",
            hint="install it beside its requirements: pip install --no-deps openrlhf  (see `actordbg doctor`)",
        )
    source = Path(next(iter(spec.submodule_search_locations)))
    copy = destination / "openrlhf"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy / "models" / "actor.py"


def hide_gpus(trainer: Trainer) -> dict[str, str]:
    """Environment that makes the demo run on the CPU where GPUs are there, but not all that OpenRLHF needs to use them.

    It needs flash-attn to use any, and for PPO a real vLLM and three GPUs (policy, reference, sampler). The second variable
    keeps Ray from showing its workers the GPUs that we declare to it. Empty where there is nothing to hide.
    """
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    equipped = importlib.util.find_spec("flash_attn") is not None and (
        trainer == "sft" or (gpus >= 3 and importlib.util.find_spec("vllm") is not None)
    )
    if gpus == 0 or equipped:
        return {}
    return {"CUDA_VISIBLE_DEVICES": "", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


_ACTOR = re.compile(r"(?:\((\w+) pid=\d+\) )?Actor\($")
_PPO_STEP = re.compile(r"Global step (\d+): .*?'reward': ([-\d.e]+)")
_SFT_STEP = re.compile(r"Train step of epoch (\d+):.*\| (\d+)/(\d+) \[.*gpt_loss=([-\d.e]+)")


def read_progress(text: str) -> Iterator[Progress]:
    """What the lines of a training's log say about its progress, in order; lines that say nothing are skipped."""
    for line in re.split(r"[\r\n]+", text):
        if line in ON_CPU.values():
            yield Progress("starting", text=line)
        elif found := _ACTOR.search(line):
            yield Progress("loading", text=f"OpenRLHF's Actor is built ({found[1] or 'rank 0'})")
        elif found := _PPO_STEP.search(line):
            yield Progress("step", int(found[1]), f"reward {float(found[2]):.3f}")
        elif found := _SFT_STEP.search(line):
            epoch, done, of = int(found[1]), int(found[2]), int(found[3])
            yield Progress("step", epoch * of + done, f"loss {float(found[4]):.3f}")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _environment(package_dir: Path, extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    ours = Path(actordbg.__file__).resolve().parent.parent
    paths = [str(package_dir), str(ours), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, **_QUIET, "PYTHONPATH": os.pathsep.join(paths), **extra}


def _short_temporary_directory() -> Path:
    """A directory for Ray, whose socket paths must stay under 107 bytes, 70 of them its own."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="adbg-", dir=usual if len(usual) <= 20 else "/tmp"))
