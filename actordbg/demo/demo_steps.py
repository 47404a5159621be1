"""The demo's seven steps: from a real training run to a replay, back to an unpatched file, and to the verdict of `check`.

Each step prints the command that a user would type and then runs exactly that, as a child process, in the demo's directory.
Nothing is simulated, and everything goes through the command line, except the training, which is the trainer's own program
(see `actordbg.demo.demo_training`), and the check of file hashes at the end.

    DIR/python/            private copy of the installed trainer: this is what gets patched
    DIR/training/          tiny model, tokenizer, data, the trainer's log
    DIR/store/             dumps, results, and the page of the check

The first step that fails ends the demo with its reason.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, LaunchProblem
from actordbg.demo.demo_training import build_assets, copy_trainer, python_path, start_job
from actordbg.replay.launch import free_port
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER, Program

TARGET = f"python/{TRAINER.actor_file}"
QUERY = "seq_len >= 64 and rank = 0"


def file_state(path: Path) -> tuple[str, int, int]:
    """Return what `patch` followed by `unpatch` must restore: SHA-256 of the content, mode and modification time."""
    state = path.stat()
    return hashlib.sha256(path.read_bytes()).hexdigest(), state.st_mode, state.st_mtime_ns


@dataclass
class Demo:
    """A run of the demo with the program `trainer`, in `directory` (empty or new). `tell` prints a line for the user.

    store: path of its store (empty or new), absolute or below the directory.
    """

    trainer: str
    directory: Path
    tell: Callable[[str], None]
    store: str = "store"
    _started: float = field(default_factory=time.monotonic)
    _dumping: bool = False

    @property
    def program(self) -> Program:
        """Return the training program to run."""
        return TRAINER.programs[self.trainer]

    def run(self) -> None:
        """Run all seven steps. Raises EnvironmentProblem or LaunchProblem at the first step that fails."""
        require_modules(self.trainer)
        actor = copy_trainer(self.directory / "python")
        before = file_state(actor)
        self.tell(f"Everything happens in {self.directory}; {TRAINER.package} is copied, not touched.")
        self._heading("1/7", f"patch: append the capture hook to {TRAINER.name}'s actor.py")
        self._actordbg("patch", "--target", TARGET)
        self._train()
        self._heading("3/7", "index: the catalog of what was recorded")
        self._actordbg("index")
        self._actordbg("dump", "ls", "--where", QUERY, "--limit", "5")
        self._heading("4/7", f"replay: what a query selects, through {TRAINER.name}'s Actor under DeepSpeed")
        self._replay()
        self._heading("5/7", "report: what the replay found")
        self._actordbg("report")
        self._unpatch(actor, before)
        self._heading("7/7", "check: do the recorded calls run, and are the numbers right?")
        checked = ("--where", QUERY, "--model", "training/model", "--diverse", "2")
        self._actordbg("check", *checked)
        self.tell(f"\nDone in {self._elapsed()}.")

    def _train(self) -> None:
        self._heading("2/7", f"train: {TRAINER.name}'s own {self.trainer.upper()}, with recording turned on while it runs")
        work = self.directory / "training"
        work.mkdir()
        program = self.program
        model, data = build_assets(work, program.rows)
        command = program.command(model, data, work / "checkpoint", free_port())
        with start_job(program, command, work, work / f"{program.name}.log", self.directory / "python") as job:
            self.tell(f"$ {self._as_typed(job.command)}")
            job.wait(self._follow)
        self._actordbg("dump", "status")
        if next(iter(Store(self.directory / self.store).iter_dumps()), None) is None:
            raise LaunchProblem(
                "the training ran, but nothing was recorded", hint="run it again with --keep DIR and read training/*.log"
            )

    def _as_typed(self, command: list[str]) -> str:
        """Format the trainer's command as a user would type it: without the demo's wrapper, relative paths, short lines."""
        options = " ".join(command[command.index("--") + 1 :]).replace(f"{self.directory}{os.sep}", "")
        lines = textwrap.wrap(f"{self.program.typed} {options}", 76, break_long_words=False, break_on_hyphens=False)
        return " \\\n    ".join(lines)

    def _follow(self, phase: str, step: int, text: str) -> None:
        stepped = phase == "step"
        if not stepped or not self._dumping or step % self.program.every == 0:
            done = f"step {step}  " if stepped else ""
            self.tell(f"  [{self._elapsed()}] {done}{text}")
        if stepped and not self._dumping:
            self._dumping = True
            self._actordbg("dump", "enable", "--calls", "forward,loss")

    def _replay(self) -> None:
        replays = Store(self.directory / self.store).replays
        before = {*replays.glob("*")}
        options = ("--model", "training/model", "--max-inputs", "4", "--backend", "deepspeed", "--zero-stage", "2")
        self._actordbg("replay", "--where", QUERY, *options)
        if {*replays.glob("*")} == before:
            raise LaunchProblem("the query selected no recorded call", hint="see what was recorded in `dump ls` above")

    def _unpatch(self, actor: Path, before: tuple[str, int, int]) -> None:
        self._heading("6/7", "unpatch: restore the original file")
        self._actordbg("unpatch", "--target", TARGET)
        after = file_state(actor)
        self.tell(f"sha256 before  {before[0]}\nsha256 after   {after[0]}")
        if after != before:
            raise EnvironmentProblem(f"unpatch did not restore the file: {before} became {after}")
        self.tell("identical, with the same mode and modification time")

    def _actordbg(self, *arguments: str) -> None:
        """Show and run `actordbg --store STORE ARGUMENTS` in the demo's directory; its output goes where ours goes."""
        words = ["actordbg", "--store", self.store, *arguments]
        self.tell(f"$ {shlex.join(words)}")
        command = [sys.executable, "-m", *words]
        environment = self._environment()
        ran = subprocess.run(command, cwd=self.directory, env=environment, stdin=subprocess.DEVNULL, check=False)
        if ran.returncode != 0:
            raise LaunchProblem(
                f"`{shlex.join(words)}` ended with exit code {ran.returncode}",
                hint="see its message above; run it again with --keep DIR to keep the files",
            )

    def _environment(self) -> dict[str, str]:
        """Return the user's environment, without GPUs and settings that would change the demo."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
        return {**env, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}

    def _heading(self, number: str, title: str) -> None:
        self.tell(f"\n[{number}] {title}  ({self._elapsed()})")

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60}:{seconds % 60:02d}"


def require_modules(trainer: str) -> None:
    """Raise EnvironmentProblem naming what the training needs and this environment lacks."""
    missing = [name for name in TRAINER.programs[trainer].needs if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            f"the {trainer} training needs modules that are not installed: {', '.join(missing)}",
            hint="run `make demo`, or pip install 'actordbg[replay,demo]' and then pip install --no-deps " + TRAINER.package,
        )
