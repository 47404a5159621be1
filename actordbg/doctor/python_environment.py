"""The examined interpreter: its Python and packages, against the versions that are known to work together; and `Check`, the
result of each of doctor's checks.

Versions are read from the packages' metadata: nothing is imported. `constraints.txt` pins the same versions; a test holds them
equal. Another version is a warning that says so, never an error. `TRAPS` has what is known about particular versions.
Other processes have a time limit (`run`, `ask`): a process that hangs is killed, with all that it started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import actordbg
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import NOT_FROM_HERE
from actordbg.base.units import release
from actordbg.install import patch_target
from actordbg.install import target_probe as probe
from actordbg.trainers.fitting import Fit, fits
from actordbg.trainers.trainer import TRAINER


@dataclass(frozen=True)
class Check:
    """Result of a check: its name, status, what was seen, and (unless it is ok) what to do.

    ok: fine. warn: works, except perhaps a part that you may not need. bad: something will fail.
    """

    name: str
    status: Literal["ok", "warn", "bad"]
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, "ok", detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """Return a check that found something that may matter."""
    return Check(name, "warn", detail, remedy)


def bad(name: str, detail: str, remedy: str) -> Check:
    """Return a check that found something that will fail."""
    return Check(name, "bad", detail, remedy)


@dataclass(frozen=True)
class Environment:
    """The examined interpreter: versions by distribution name (None: not installed), folders of headers and scripts."""

    python: str
    python_version: tuple[int, ...]
    versions: dict[str, str | None]
    include: str
    scripts: str

    @property
    def own(self) -> bool:
        """True if doctor itself runs on this interpreter."""
        return self.python == sys.executable

    def pip(self, *requirements: str) -> str:
        """Return the command that installs `requirements` here."""
        return f"{'python' if self.own else in_shell(self.python)} -m pip install {' '.join(requirements)}"


@dataclass(frozen=True)
class Ended:
    """The end of a child process: its exit code (negative: the signal that killed it; None: killed at the time limit)."""

    code: int | None
    output: str

    @property
    def last_words(self) -> str:
        """Return the last line that it printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "no output"


def run(command: Sequence[str], timeout: float) -> Ended:
    """Run a command to its end or to `timeout` seconds. Raises OSError if it cannot be started."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        with _started(command, out, out) as child:
            try:
                code: int | None = child.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
        out.seek(0)
        return Ended(code, out.read())


def ask(python: str, question: Sequence[str], timeout: float) -> Iterator[dict[str, Any] | Ended]:
    """Yield the probe's answers as they arrive, each within `timeout` seconds of the previous; an Ended comes last."""
    command = [python, "-c", Path(probe.__file__).read_text(encoding="utf-8"), *question]
    with tempfile.TemporaryFile("w+", errors="replace") as err:
        with _started(command, subprocess.PIPE, err) as child:
            assert child.stdout is not None
            lines: queue.Queue[str | None] = queue.Queue()
            reading = itertools.chain(child.stdout, (None,))
            threading.Thread(target=lambda: [*map(lines.put, reading)], daemon=True).start()
            code: int | None = None
            with contextlib.suppress(queue.Empty, subprocess.TimeoutExpired):
                while (line := lines.get(timeout=timeout)) is not None:
                    if line.startswith(probe.MARK):
                        yield json.loads(line.removeprefix(probe.MARK))
                code = child.wait(timeout)
        err.seek(0)
        yield Ended(code, err.read())


@contextlib.contextmanager
def _started(command: Sequence[str], out: Any, err: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a child in a new session; kill the whole session at the end of the block."""
    child = subprocess.Popen(
        command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True,
        env=os.environ | NOT_FROM_HERE,
    )  # fmt: skip
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


PYTHON = ((3, 10), (3, 12))
"""Oldest and newest Python that actordbg is tested with."""
KNOWN_PYTHON = "3.11"
DESK, REPLAY, TRAINING = "the command line", "replay", f"training with {TRAINER.name}"
PACKAGES: dict[str, dict[str, str | None]] = {
    "capture": dict.fromkeys(("zstandard", "safetensors")),
    DESK: dict.fromkeys(("typer", "rich", "sqlmodel", "sqlglot", "msgspec", "numpy", "bottle")),
    REPLAY: {
        "torch": "2.13.0",
        TRAINER.package: TRAINER.known_version,
        "deepspeed": "0.19.6",
        "transformers": "5.15.0",
        "peft": "0.21.2",
        "einops": "0.8.2",
        "pylatexenc": "2.11",
        "torchdata": "0.11.0",
    },
    TRAINING: {"accelerate": "1.15.0", "ray": "2.55.0", "datasets": "5.2.0", "optree": "0.20.0"},
}
"""Feature -> the distributions that it needs, and their known-good versions (None: any)."""
KNOWN_GOOD = {name: version for versions in PACKAGES.values() for name, version in versions.items()}

OTHERS = ("flash-attn", "vllm", "debugpy", "actordbg")
"""Further packages whose versions are read."""
DEBUGPY = "debugpy>=1.8.22"
"""What the extra `ray` installs: older versions cannot show an editor the frames of an error that was caught."""

TRAPS: dict[str, tuple[tuple[int, ...], str]] = {
    "transformers": ((4, 53), "packing without flash-attn is silently wrong before 4.53: rows see each other"),
    TRAINER.package: (TRAINER.oldest, TRAINER.trap),
    "torch": ((2, 6), "older than any version that replays were tried with"),
    "deepspeed": ((0, 17), "older than any version that replays were tried with"),
}
"""Package -> the first version without the trap, and the trap."""

MODULE_OF = {"PIL": "pillow", "flash_attn": "flash-attn", "yaml": "pyyaml", "skimage": "scikit-image"}
"""Distributions whose module has another name."""


def requirement(module: str) -> str:
    """Return pip's requirement for a missing module: its distribution, at the known-good version if there is one."""
    name = MODULE_OF.get(module, module)
    return f"{name}=={KNOWN_GOOD[name]}" if KNOWN_GOOD.get(name) else name


def examined(python: str) -> Environment:
    """Read an interpreter's facts. Raises EnvironmentProblem if it does not answer."""
    answer = patch_target.ask(python, "facts", *KNOWN_GOOD, *OTHERS)
    return Environment(python, tuple(answer["python"]), answer["versions"], answer["include"], answer["scripts"])


def check(env: Environment) -> Iterator[Check]:
    """Check Python's version, then every package, then adapters."""
    text = f"{'.'.join(map(str, env.python_version))} ({env.python})"
    oldest, newest = PYTHON
    if env.python_version[:2] < oldest:
        remedy = f"use Python {oldest[0]}.{oldest[1]} or newer; {KNOWN_PYTHON} is known to be good"
        yield bad("python", text, remedy)
    elif env.python_version[:2] > newest:
        yield warn("python", f"{text}, newer than what was tested", f"Python {KNOWN_PYTHON} is known to be good")
    else:
        yield ok("python", text)
    mine = actordbg.__version__
    theirs = mine if env.own else env.versions.get("actordbg")
    if theirs == mine:
        yield ok("actordbg", mine)
    else:
        detail = f"{theirs} there, {mine} here" if theirs else "not installed there: a patched actor.py could not capture"
        yield warn("actordbg", detail, env.pip(f"actordbg=={mine}"))
    for need, packages in PACKAGES.items():
        if env.own or need != DESK:
            yield from (_package(env, need, name, known) for name, known in packages.items())
    if env.versions.get("ray"):
        yield _debugger(env)
    if env.own and env.versions.get("torch"):
        yield from (adapter_check(fit) for fit in fits() if fit.there or fit.differs)


def _package(env: Environment, need: str, name: str, known: str | None) -> Check:
    version = env.versions.get(name)
    if version is None:
        apart = name == TRAINER.package
        remedy = env.pip(*["--no-deps"] * apart, requirement(name))
        remedy += " (its flash-attn cannot be built without CUDA)" * apart
        needs = "replay, check and actor init need it" if need == REPLAY else f"{need} needs it"
        return (warn if need == TRAINING else bad)(name, f"not installed; {needs}", remedy)
    first_good, trap = TRAPS.get(name, ((), ""))
    if release(version) < first_good:
        return warn(name, f"{version}: {trap}", f"known good: {known}")
    if known in (None, version.partition("+")[0]):
        return ok(name, version)
    return warn(name, f"{version}, not the version that was tested", f"known good: {known}")


def adapter_check(fit: Fit) -> Check:
    """Check an adapter whose trainer is installed against the trainer's own files."""
    name, tried = f"adapter {fit.name}", ", ".join(fit.tried)
    if fit.differs:
        remedy = f"what differs is not recorded; tested versions: {tried or 'none'}"
        return warn(name, f"{fit.package} {fit.version or ''}: {'; '.join(fit.differs)}", remedy)
    if fit.version in fit.tried:
        return ok(name, f"{fit.package} {fit.version}, a tested version")
    detail = f"{fit.package} {fit.version or 'without a version'} has what it reads, but was not tested"
    return warn(name, detail, f"tested: {tried or 'none'}; record a few steps, then run `actordbg compare last recorded`")


def _debugger(env: Environment) -> Check:
    """Check debugpy, which Ray's distributed debugger needs here and on every node."""
    version = env.versions.get("debugpy")
    if version is None:
        remedy = env.pip(in_shell(DEBUGPY)) + ", here and on every node of the cluster"
        return warn("debugpy", "not installed; `replay --debugpy` and `--engine ray --ray-debug-error` need it", remedy)
    if release(version) < release(DEBUGPY.partition(">=")[2]):
        return warn("debugpy", f"{version}: an editor stops above the frames that failed", env.pip(in_shell(DEBUGPY)))
    return ok("debugpy", version)


def flash_attention(env: Environment, gpus: int) -> Check:
    """Check that flash-attn is installed exactly if there is a GPU."""
    version = env.versions.get("flash-attn")
    if version and not gpus:
        return warn("flash-attn", f"{version}, but no GPU: flash_attention_2 cannot run", "replay with --attn sdpa")
    if gpus and not version:
        remedy = env.pip("flash-attn", "--no-build-isolation") + "; or replay with --attn sdpa"
        return warn("flash-attn", "not installed; --attn flash_attention_2 needs it", remedy)
    return ok("flash-attn", version or "not installed, and not needed without a GPU (--attn sdpa, eager)")
