"""Python and the packages of the examined interpreter, beside the versions that are known to work together.

The packages are read from their metadata: nothing is imported. `constraints.txt` pins the same versions; a test holds them equal.
Another version is a warning that says so, never an error. What is known about particular versions stands in `TRAPS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import actordbg
from actordbg.base.errors import EnvironmentProblem
from actordbg.base.foreign_text import in_shell
from actordbg.doctor.check import Check, Ended, Environment, ask, bad, ok, warn
from actordbg.trainers.fitting import Fit, fits
from actordbg.trainers.trainer import TRAINER

PYTHON = ((3, 10), (3, 12))
"""Oldest and newest Python that actordbg is tested with."""
KNOWN_PYTHON = "3.11"
FACTS_SECONDS = 60.0


class Need(str, Enum):
    """What does not work without a package."""

    CAPTURE = "capture"
    DESK = "the command line"
    REPLAY = "replay"
    TRAINING = f"training with {TRAINER.name}"


@dataclass(frozen=True)
class Package:
    """A distribution, the version that is known to be good (None: any), and what needs it."""

    name: str
    version: str | None
    need: Need


_VERSIONS: dict[Need, dict[str, str | None]] = {
    Need.CAPTURE: dict.fromkeys(("zstandard", "safetensors")),
    Need.DESK: dict.fromkeys(("typer", "rich", "sqlmodel", "sqlglot", "msgspec", "numpy", "bottle")),
    Need.REPLAY: {
        "torch": "2.13.0",
        TRAINER.package: TRAINER.known_version,
        "deepspeed": "0.19.6",
        "transformers": "5.15.0",
        "peft": "0.21.2",
        "einops": "0.8.2",
        "pylatexenc": "2.11",
        "torchdata": "0.11.0",
    },
    Need.TRAINING: {"accelerate": "1.15.0", "ray": "2.55.0", "datasets": "5.2.0", "optree": "0.20.0"},
}
PACKAGES = tuple(Package(name, version, need) for need, versions in _VERSIONS.items() for name, version in versions.items())

OTHERS = ("flash-attn", "vllm", "debugpy", "actordbg")
"""Packages whose versions are asked for too."""
DEBUGPY = "debugpy>=1.8.22"
"""What the extra `ray` installs: older ones cannot show an editor the frames of an error that was caught."""

TRAPS: dict[str, tuple[tuple[int, ...], str]] = {
    "transformers": ((4, 53), "packing without flash-attn is silently wrong before 4.53: rows see each other"),
    TRAINER.package: (TRAINER.oldest, TRAINER.trap),
    "torch": ((2, 6), "older than any version that replays were tried with"),
    "deepspeed": ((0, 17), "older than any version that replays were tried with"),
}
"""For a package: the first version without the trap, and the trap."""

MODULE_OF = {"PIL": "pillow", "flash_attn": "flash-attn", "yaml": "pyyaml", "skimage": "scikit-image"}
"""Distributions whose module has another name."""


def requirement(module: str) -> str:
    """What to give pip for a missing module: the distribution, at its known-good version where there is one."""
    name = MODULE_OF.get(module, module)
    version = next((package.version for package in PACKAGES if package.name == name), None)
    return f"{name}=={version}" if version else name


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" as (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def examined(python: str) -> Environment:
    """Ask an interpreter for the facts; EnvironmentProblem if it does not answer."""
    names = [package.name for package in PACKAGES] + list(OTHERS)
    try:
        answer = next(ask(python, ["facts", *names], FACTS_SECONDS))
    except OSError as error:
        raise EnvironmentProblem(f"{python} cannot be run: {error.strerror}", hint="name a Python with --python") from None
    if isinstance(answer, Ended):
        raise EnvironmentProblem(f"{python} does not answer as a Python: {answer.last_words}", hint="name a Python with --python")
    return Environment(python, tuple(answer["python"]), answer["versions"], answer["include"], answer["scripts"])


def check(env: Environment) -> Iterator[Check]:
    """Python's version, then every package, then flash-attn."""
    yield _python(env)
    yield _actordbg(env)
    for package in PACKAGES:
        if env.own or package.need is not Need.DESK:
            yield _package(env, package)
    if env.versions.get("ray"):
        yield _debugger(env)
    if env.own and env.versions.get("torch"):
        yield from (adapter_check(one) for one in fits() if one.there or one.differs)


def _python(env: Environment) -> Check:
    text = f"{'.'.join(map(str, env.python_version))} ({env.python})"
    oldest, newest = PYTHON
    if env.python_version[:2] < oldest:
        return bad("python", text, f"use Python {oldest[0]}.{oldest[1]} or newer; {KNOWN_PYTHON} is known to be good")
    if env.python_version[:2] > newest:
        return warn("python", f"{text}, newer than what was tested", f"Python {KNOWN_PYTHON} is known to be good")
    return ok("python", text)


def _actordbg(env: Environment) -> Check:
    mine = actordbg.__version__
    theirs = mine if env.own else env.versions.get("actordbg")
    if theirs == mine:
        return ok("actordbg", mine)
    detail = f"{theirs} there, {mine} here" if theirs else "not installed there: a patched actor.py could not capture"
    return warn("actordbg", detail, env.pip(f"actordbg=={mine}"))


def _package(env: Environment, package: Package) -> Check:
    version = env.versions.get(package.name)
    if version is None:
        return _missing(env, package)
    first_good, trap = TRAPS.get(package.name, ((), ""))
    if release(version) < first_good:
        return warn(package.name, f"{version}: {trap}", f"known good: {package.version}")
    if package.version in (None, version.partition("+")[0]):
        return ok(package.name, version)
    return warn(package.name, f"{version}, not the version that was tested", f"known good: {package.version}")


def _missing(env: Environment, package: Package) -> Check:
    apart = package.name == TRAINER.package
    remedy = env.pip(*["--no-deps"] * apart, requirement(package.name))
    remedy += " (its flash-attn cannot be built without CUDA)" * apart
    needs = "replay, check and actor init need it" if package.need is Need.REPLAY else f"{package.need.value} needs it"
    return (warn if package.need is Need.TRAINING else bad)(package.name, f"not installed; {needs}", remedy)


def adapter_check(fit: Fit) -> Check:
    """An adapter whose trainer is here, against the trainer's own files."""
    name, tried = f"adapter {fit.name}", ", ".join(fit.tried)
    if fit.differs:
        remedy = f"what differs is not recorded; versions that were tried: {tried or 'none'}"
        return warn(name, f"{fit.package} {fit.version or ''}: {'; '.join(fit.differs)}", remedy)
    if fit.version in fit.tried:
        return ok(name, f"{fit.package} {fit.version}, as tried")
    detail = f"{fit.package} {fit.version or 'without a version'} has what it reads, but was not tried"
    return warn(name, detail, f"tried: {tried or 'none'}; record a few steps, then `actordbg compare last golden`")


def _debugger(env: Environment) -> Check:
    """Ray's distributed debugger needs debugpy, here and on every node."""
    version = env.versions.get("debugpy")
    if version is None:
        remedy = env.pip(in_shell(DEBUGPY)) + ", here and on every node of the cluster"
        return warn("debugpy", "not installed; `replay --debugpy` and `--engine ray --ray-debug-error` need it", remedy)
    if release(version) < release(DEBUGPY.partition(">=")[2]):
        return warn("debugpy", f"{version}: an editor stops above the frames that failed", env.pip(in_shell(DEBUGPY)))
    return ok("debugpy", version)


def flash_attention(env: Environment, gpus: int) -> Check:
    """flash-attn is wanted exactly where there is a GPU."""
    version = env.versions.get("flash-attn")
    if version and not gpus:
        return warn("flash-attn", f"{version}, but no GPU: flash_attention_2 cannot run", "replay with --attn sdpa")
    if gpus and not version:
        remedy = env.pip("flash-attn", "--no-build-isolation") + "; or replay with --attn sdpa"
        return warn("flash-attn", "not installed; --attn flash_attention_2 needs it", remedy)
    return ok("flash-attn", version or "not installed, and not needed without a GPU (--attn sdpa, eager)")
