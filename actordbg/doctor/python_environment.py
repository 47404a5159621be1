"""Python, packages and flash-attn of the examined interpreter, from their metadata: nothing is imported."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from actordbg.base.errors import EnvironmentProblem
from actordbg.doctor import known_versions as known_good
from actordbg.doctor.check_result import Finding, bad, ok, warn
from actordbg.doctor.child_probe import Ended, ask
from actordbg.doctor.known_versions import PACKAGES, Need, Package

FACTS_SECONDS = 60.0
OTHERS = ("flash-attn", "vllm", "actordbg")


@dataclass(frozen=True)
class Environment:
    """The examined interpreter: versions by distribution name (None: not installed), where headers and scripts are."""

    python: str
    python_version: tuple[int, ...]
    versions: dict[str, str | None]
    include: str
    scripts: str

    @property
    def own(self) -> bool:
        """Whether this is the interpreter that doctor itself runs on."""
        return self.python == sys.executable

    @property
    def desk_only(self) -> bool:
        """Whether neither torch nor openrlhf is here: a machine for looking at dumps, not for making or replaying them."""
        return not self.versions.get("torch") and not self.versions.get("openrlhf")

    def pip(self, *requirements: str) -> str:
        """The command that installs `requirements` here."""
        return f"{'python' if self.own else shlex.quote(self.python)} -m pip install {' '.join(requirements)}"


def examine(python: str) -> Environment:
    """Ask an interpreter for the facts; EnvironmentProblem if it does not answer."""
    names = [package.name for package in PACKAGES] + list(OTHERS)
    end: Ended | None = None
    try:
        for answer in ask(python, ["facts", *names], FACTS_SECONDS):
            if not isinstance(answer, Ended):
                return Environment(
                    python, tuple(answer["python"]), answer["versions"], answer["include"], answer["scripts"]
                )
            end = answer
    except OSError as error:
        raise EnvironmentProblem(
            f"{python} cannot be run: {error.strerror}", hint="name a Python with --python"
        ) from None
    words = end.last_words if end else "no answer"
    raise EnvironmentProblem(f"{python} does not answer as a Python: {words}", hint="name a Python with --python")


def check(env: Environment) -> Iterator[Finding]:
    """Python's version, then every package, then flash-attn."""
    yield _python(env)
    yield _actordbg(env)
    for package in PACKAGES:
        if env.own or package.need is not Need.DESK:
            yield _package(env, package)


def _python(env: Environment) -> Finding:
    text = f"{'.'.join(map(str, env.python_version))} ({env.python})"
    oldest, newest = known_good.PYTHON
    if env.python_version[:2] < oldest:
        return bad(
            "python",
            text,
            f"use Python {oldest[0]}.{oldest[1]} or newer; {known_good.KNOWN_PYTHON} is known to be good",
        )
    if env.python_version[:2] > newest:
        return warn(
            "python", f"{text}, newer than what was tested", f"Python {known_good.KNOWN_PYTHON} is known to be good"
        )
    return ok("python", text)


def _actordbg(env: Environment) -> Finding:
    mine = importlib.import_module("actordbg").__version__
    if env.own:
        return ok("actordbg", mine)
    theirs = env.versions.get("actordbg")
    if theirs is None:
        remedy = env.pip(f"actordbg=={mine}")
        return warn("actordbg", "not installed there: a patched actor.py could not capture", remedy)
    if theirs != mine:
        return warn("actordbg", f"{theirs} there, {mine} here", env.pip(f"actordbg=={mine}"))
    return ok("actordbg", theirs)


def _package(env: Environment, package: Package) -> Finding:
    version = env.versions.get(package.name)
    if version is None:
        return _missing(env, package)
    first_good, trap = known_good.TRAPS.get(package.name, ((), ""))
    if known_good.release(version) < first_good:
        return warn(package.name, f"{version}: {trap}", f"known good: {package.version}")
    if package.version is None or known_good.same(version, package.version):
        return ok(package.name, version)
    return warn(package.name, f"{version}, not the version that was tested", f"known good: {package.version}")


def _missing(env: Environment, package: Package) -> Finding:
    remedy = env.pip(known_good.requirement(package.name))
    if package.name == "openrlhf":
        remedy = (
            env.pip("--no-deps", known_good.requirement("openrlhf")) + " (its flash-attn cannot be built without CUDA)"
        )
    needed = {
        Need.REPLAY: "replay and actor init need it" if package.name != "torch" else
        "replay, actor init, dump create, import and export need it",
    }  # fmt: skip
    detail = f"not installed; {needed.get(package.need, f'{package.need.value} needs it')}"
    vital = package.need in (Need.CAPTURE, Need.DESK) or (package.need is Need.REPLAY and not env.desk_only)
    return (bad if vital else warn)(package.name, detail, remedy)


def flash_attention(env: Environment, gpus: int) -> Finding:
    """flash-attn is wanted exactly where there is a GPU."""
    version = env.versions.get("flash-attn")
    if version and not gpus:
        return warn("flash-attn", f"{version}, but no GPU: flash_attention_2 cannot run", "replay with --attn sdpa")
    if version:
        return ok("flash-attn", version)
    if gpus:
        remedy = env.pip("flash-attn", "--no-build-isolation") + "; or replay with --attn sdpa"
        return warn("flash-attn", "not installed; --attn flash_attention_2 needs it", remedy)
    return ok("flash-attn", "not installed, and not needed without a GPU (--attn sdpa, eager)")
