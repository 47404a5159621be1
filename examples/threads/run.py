"""Run demonstrations of public threads: record a training with and without the fault, and run a command on each.

    python examples/threads/run.py THREAD... [--folder FOLDER]      without a THREAD: all of them

A demonstration is a module here. Its docstring says which thread, what its users saw and what is planted; `train(model)` calls
the stand-in of the trainer's function, with the fault if `PLANTED`; `Adapter` reads its calls. `COMMAND` runs on the step with
the fault (exit code 1) and on the step without it (0), and `WORDS` of its output name the fault.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
THREADS = (
    "trl_4159", "prime_rl_1525", "verl_1381", "verl_6475", "areal_1442", "verl_6278", "verl_6280", "verl_2656", "openrlhf_1120",
    "verl_6176", "openrlhf_801", "skyrl_1420", "automodel_2131", "transformers_46634",
)  # fmt: skip
DEFAULT_COMMAND = ("check", "--recorded", "--where", "step={step}", "--model", "{model}", "--no-laws")


@dataclass(frozen=True)
class Answer:
    """What the command said with the fault and without it. words: those that name the fault."""

    command: str
    planted: subprocess.CompletedProcess[str]
    without: subprocess.CompletedProcess[str]
    words: str

    @property
    def found(self) -> bool:
        """The fault was found, and nothing if there is none. Exit code 5: nothing was selected."""
        good = self.without.returncode == (5 if "triggered" in self.command else 0)
        planted, without = (" ".join(done.stdout.split()) for done in (self.planted, self.without))  # lines are wrapped
        return good and self.words in planted and self.words not in without

    def told(self) -> Iterator[str]:
        yield f"$ {self.command}"
        for name, done in (("with the fault", self.planted), ("without it", self.without)):
            said = (done.stdout or done.stderr).strip().split("\npage: ")[0]
            yield f"{name}, exit code {done.returncode}:\n{said}"


def main(words: list[str]) -> int:
    """Run the requested demonstrations; return 1 if a planted fault is not found, or a fault is found without one planted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("threads", nargs="*", metavar="THREAD", help=", ".join(THREADS))
    parser.add_argument("--folder", type=Path, help="where stores and models go (default: a temporary folder)")
    parser.add_argument("--train", type=Path, metavar="MODEL", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.train:
        train(given.threads[0], given.train)
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.threads or THREADS:
            answer = demonstrate(name, (given.folder or Path(scratch)).resolve() / name)
            print(f"\n== {name}", *answer.told(), sep="\n", flush=True)
            missed += not answer.found
    return 1 if missed else 0


def demonstrate(name: str, folder: Path) -> Answer:
    """Record a training with and without the fault, and run the command on both."""
    thread: Any = importlib.import_module(name)
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(thread, "answer"):
        return Answer(*thread.answer(folder))
    from stand_in import model_in

    model = model_in(folder)
    options = (
        "--run",
        name,
        "--adapter",
        f"{thread.Adapter.seams[0].module}:Adapter",
        "--with-outputs",
        "--free-floor",
        "0",
        *getattr(thread, "RECORDED", ()),
    )
    done = actordbg(folder, "run", *options, "--", sys.executable, str(HERE / "run.py"), name, "--train", str(model))
    if done.returncode or " 0 calls" in done.stderr:
        raise SystemExit(f"{name}: nothing was recorded\n{done.stdout}{done.stderr}")
    command = getattr(thread, "COMMAND", DEFAULT_COMMAND)
    planted, without = (actordbg(folder, *(word.format(step=step, model=model) for word in command)) for step in (1, 0))
    return Answer(
        in_words(word.format(step=1, model="CHECKPOINT") for word in command), planted, without, getattr(thread, "WORDS", "WRONG")
    )


def train(name: str, model: Path) -> None:
    """The job that is recorded: a step without the fault, and a step with it."""
    from stand_in import loaded

    thread: Any = importlib.import_module(name)
    policy = loaded(model)
    for thread.PLANTED in (False, True):
        thread.train(policy)


def in_words(words: Any) -> str:
    return "actordbg " + " ".join(map(shlex.quote, words))


def actordbg(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the demonstration's store."""
    command = [sys.executable, "-m", "actordbg", "--store", str(folder / "store"), *words]
    return subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True)


def environment() -> dict[str, str]:
    """The user's, without settings of actordbg, with this checkout and this folder on the path."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent.parent), usual.get("PYTHONPATH")]))
    return usual | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
    sys.exit(main(sys.argv[1:]))
