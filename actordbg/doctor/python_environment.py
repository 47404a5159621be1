"""Python, packages, flash-attn and debugpy of the examined interpreter, from their metadata: nothing is imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from actordbg.base.foreign_text import in_shell
from actordbg.doctor import known_versions as known_good
from actordbg.doctor.check import Check, Environment, bad, ok, warn
from actordbg.doctor.known_versions import DEBUGPY, PACKAGES, Need, Package
from actordbg.trainers.fitting import Fit, fits
from actordbg.trainers.trainer import TRAINER


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
    oldest, newest = known_good.PYTHON
    if env.python_version[:2] < oldest:
        return bad("python", text, f"use Python {oldest[0]}.{oldest[1]} or newer; {known_good.KNOWN_PYTHON} is known to be good")
    if env.python_version[:2] > newest:
        return warn("python", f"{text}, newer than what was tested", f"Python {known_good.KNOWN_PYTHON} is known to be good")
    return ok("python", text)


def _actordbg(env: Environment) -> Check:
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


def _package(env: Environment, package: Package) -> Check:
    version = env.versions.get(package.name)
    if version is None:
        return _missing(env, package)
    first_good, trap = known_good.TRAPS.get(package.name, ((), ""))
    if known_good.release(version) < first_good:
        return warn(package.name, f"{version}: {trap}", f"known good: {package.version}")
    if package.version is None or known_good.same(version, package.version):
        return ok(package.name, version)
    return warn(package.name, f"{version}, not the version that was tested", f"known good: {package.version}")


def _missing(env: Environment, package: Package) -> Check:
    remedy = env.pip(known_good.requirement(package.name))
    if package.name == TRAINER.package:
        remedy = env.pip("--no-deps", known_good.requirement(package.name))
        remedy += " (its flash-attn cannot be built without CUDA)"
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
    if known_good.release(version) < known_good.release(DEBUGPY.partition(">=")[2]):
        return warn("debugpy", f"{version}: an editor stops above the frames that failed", env.pip(in_shell(DEBUGPY)))
    return ok("debugpy", version)


def flash_attention(env: Environment, gpus: int) -> Check:
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
