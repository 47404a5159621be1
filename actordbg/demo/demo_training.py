"""The demo's seven steps: from a real training run to a replay, back to an unpatched file, and to the verdict of `check`.

Each step prints the command that a user would type and then runs exactly that, as a child process, in the demo's directory.
Nothing is simulated, and everything goes through the command line, except the training and the check of file hashes at the end.

    DIR/python/            private copy of the installed trainer: this is what gets patched
    DIR/training/          tiny model, tokenizer, data, the trainer's log
    DIR/store/             dumps, results, and the page of the check

The first step that fails ends the demo with its reason.

The training is the trainer's own command, imported from a *private copy* of the installed package, so that the demo can patch it
without changing the user's environment. The copy wins because it is first on PYTHONPATH, which Ray passes to its workers and
DeepSpeed to its ranks. It is a child process, whose log is followed.

Processes: everything runs in a new session (`setsid`). Ray starts a handful of daemons and workers; those that are still
in that session when the training ends, fails or is interrupted are killed. The user's Ray clusters are never touched:
RAY_ADDRESS is removed from the environment, and `ray stop` is not run, since it would end other people's clusters.

Example:
    model, data = build_assets(work, program.rows)
    command = program.command(model, data, work / "checkpoint", free_port())
    with start_job(program, command, work, work / "ppo.log", work / "site") as job:
        job.wait(on_progress=print, timeout=300)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import actordbg
from actordbg.actor.models import build_tiny
from actordbg.base.errors import EnvironmentProblem, LaunchProblem
from actordbg.base.processes import end_session
from actordbg.formats.store_files import open_regular
from actordbg.replay.launch import free_port
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER, Program

# Set by launchers and by trainers; a value inherited from the user's shell would send the run somewhere else.
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


@dataclass
class TrainingJob:
    """A training run. Use it as a context manager: leaving it ends every process it started."""

    process: subprocess.Popen[bytes]
    program: Program
    command: list[str]
    log: Path
    temporary: Path
    _seen: int = field(default=0, repr=False)
    _step: int = field(default=0, repr=False)

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, on_progress: Callable[[str, int, str], object] = lambda *progress: None, *, timeout: float = 600.0) -> None:
        """Follow the log until the training ends. Raises LaunchProblem if it fails or takes longer than `timeout` seconds.

        `on_progress` is called in this thread, once for each change of phase or step; the training continues meanwhile. It gets
        the phase ("starting", "loading", "step" or "ended"), the last finished step (PPO: global steps; SFT: micro-batches), and
        a text: at a step, the trainer's own figure, "reward 0.395".
        """
        deadline = time.monotonic() + timeout
        on_progress("starting", 0, "starting processes that import torch: the longest part")
        while True:
            code = self.process.poll()
            for progress in self._new_progress():
                on_progress(*progress)
            if code is not None:
                break
            if time.monotonic() > deadline:
                raise LaunchProblem(f"the training did not end within {timeout:.0f} s", hint=self._last_words())
            time.sleep(0.1)
        if code != 0:
            raise LaunchProblem(f"the training ended with exit code {code}", hint=self._last_words())
        on_progress("ended", 0, "the training ended")

    def stop(self, grace: float = 5.0) -> None:
        """End every process of the training's session (SIGKILL after `grace` seconds) and remove its temporary files."""
        end_session(self.process.pid, grace)
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _new_progress(self) -> Iterator[tuple[str, int, str]]:
        with self.log.open("rb") as stream:
            stream.seek(self._seen)
            text = stream.read()
        complete = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._seen += complete
        for phase, step, told in self.program.progress(text[:complete].decode(errors="replace")):
            if phase != "step" or step > self._step:  # progress bars repeat themselves
                self._step = max(self._step, step)
                yield phase, step, told

    def _last_words(self) -> str:
        text = self.log.read_text(errors="replace")
        lines = text.replace("\r", "\n").splitlines()
        tail = [line for line in lines if line.strip()][-15:]
        return "\n".join([f"the end of {self.log}:", *tail])


def start_job(program: Program, command: list[str], workdir: Path, log: Path, package_dir: Path | None = None) -> TrainingJob:
    """Start a command of `program` in a new session; return at once. `package_dir`: a copy of the trainer's package."""
    temporary = _short_temporary_directory()
    empty = workdir / "cwd"  # `python -m` puts the working directory on sys.path: let there be nothing in it
    empty.mkdir(exist_ok=True)
    with open(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=empty,
            env=_environment(package_dir, program.environment(temporary)),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return TrainingJob(process, program, command, log, temporary)


def copy_trainer(destination: Path) -> Path:
    """Copy the installed trainer under `destination` without importing it; return the copy's actor file."""
    spec = importlib.util.find_spec(TRAINER.package)
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentProblem(
            f"{TRAINER.name} is not installed in this environment",
            hint=f"run `pip install --no-deps {TRAINER.package}`, then `actordbg doctor`",
        )
    source = Path(next(iter(spec.submodule_search_locations)))
    shutil.copytree(source, destination / TRAINER.package, ignore=shutil.ignore_patterns("__pycache__"))
    return destination / TRAINER.actor_file


def _environment(package_dir: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**env, **_QUIET, "PYTHONPATH": python_path(package_dir), **extra}


def python_path(*first: Path | None) -> str:
    """Return PYTHONPATH with these folders and this actordbg in front of the user's entries."""
    ours = Path(actordbg.__file__).resolve().parent.parent
    return os.pathsep.join(str(path) for path in (*first, ours, os.environ.get("PYTHONPATH")) if path)


def _short_temporary_directory() -> Path:
    """Make a temporary directory for Ray, whose socket paths must stay under 107 bytes and add 70 bytes to the directory's."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="adbg-", dir=usual if len(usual) <= 20 else "/tmp"))


# What the training needs on disk, made on the spot: a tokenizer, a model, prompts and answers. Nothing is downloaded.
#
# The tokenizer is a byte-level BPE trained on the demo's own sentences, so any text round-trips; the model is the embedded tiny
# Llama with the tokenizer's vocabulary. The tasks are small sums and sorting jobs of very different length, because the length
# of sequences is what the demo's queries select by.

_SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
_VOCAB = 512
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_assets(directory: Path, rows: int) -> tuple[Path, Path]:
    """Write tokenizer, model and data under `directory`; the same arguments give the same files. Return model and data."""
    model, data = directory / "model", directory / "tasks.jsonl"
    _build_tokenizer(model)
    build_tiny(model, vocab_size=_VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    data.write_text("".join(json.dumps({"prompt": task, "answer": answer}) + "\n" for task, answer in tasks(rows)))
    return model, data


def _build_tokenizer(directory: Path) -> None:
    """Train the BPE tokenizer and write it, chat template included, so that `AutoTokenizer` opens `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{task} {answer}" for task, answer in tasks(400)), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": _SPECIAL[3:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def tasks(count: int) -> Iterator[tuple[str, str]]:
    """Yield `count` pairs of task and answer, from one short sum to sorting forty numbers."""
    chance = random.Random(0)
    for index in range(count):
        numbers = [chance.randrange(100) for _ in range(chance.choice((2, 3, 5, 12, 24, 40)))]
        listed = ", ".join(map(str, numbers))
        if index % 2:
            yield f"Sort these numbers, smallest first: {listed}.", ", ".join(map(str, sorted(numbers)))
        else:
            yield f"What is the sum of {listed}?", f"The sum is {sum(numbers)}."


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
