"""The whole examination, quick checks first; each is told as it is made.

    facts of the interpreter, packages            0.1 s
    machine: memory, GPU, compiler                1 s
    store, disk, catalog, dump switch, patch      0.5 s
    the trainer's modules, deepspeed launcher     10 to 60 s (left out with `quick`)

Each module of the trainer that matters is imported in a child process; where it does not import, the cause and the way out are
told.

Example::

    checks = list(examine(Store("store"), sys.executable))
    exit_code(checks)        # 0, or 4 when something is bad
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from actordbg.base.errors import EnvironmentProblem
from actordbg.doctor import python_environment as environment
from actordbg.doctor import store_check as machine
from actordbg.doctor.check import Check, Ended, Environment, Level, ask, bad, ok, warn
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER

IMPORT_SECONDS = 180.0


def examine(store: Store, python: str, *, quick: bool = False, timeout: float = IMPORT_SECONDS) -> Iterator[Check]:
    """Every check of `python`, this machine and `store`. `timeout`: seconds that one module may take to import.

    Raises EnvironmentProblem if `python` does not run.
    """
    env = environment.examined(python)
    found_gpus = machine.gpus()
    yield from environment.check(env)
    yield machine.gpu(found_gpus)
    yield environment.flash_attention(env, len(found_gpus))
    yield machine.memory()
    yield machine.compiler(env)
    yield from machine.check(env, store)
    if not quick:
        with ThreadPoolExecutor(1) as pool:  # the launcher starts while the modules are imported: both wait for the disk
            launcher = pool.submit(machine.launcher, env)
            yield from imports(env, len(found_gpus), timeout)
            yield launcher.result()


def exit_code(checks: Iterable[Check]) -> int:
    """0 when nothing is bad; warnings are no failure."""
    return EnvironmentProblem.exit_code if any(check.status is Level.BAD for check in checks) else 0


def imports(env: Environment, gpus: int, timeout: float = IMPORT_SECONDS) -> Iterator[Check]:
    """A check of torch and of each module of the trainer, as they come; `timeout` is for one module."""
    if not env.versions.get("torch") or not env.versions.get(TRAINER.package):
        missing = [name for name in ("torch", TRAINER.package) if not env.versions.get(name)]
        yield warn("imports", f"not tried: {' and '.join(missing)} not installed", "see above; capture and replay need them")
        return
    left = list(TRAINER.modules)
    said: set[str] = set()
    while left:
        for check in _one_child(env, left, gpus, timeout):
            if check.name not in said:
                said.add(check.name)
                yield check
        reached = [module for module in left if f"import {module}" in said]
        left = [module for module in left if module not in reached] if reached else []


def _one_child(env: Environment, modules: list[str], gpus: int, timeout: float) -> Iterator[Check]:
    """Checks of one child process; if a module killed or hung it, that one is the last."""
    current, support, left = "torch", "", list(modules)
    for answer in ask(env.python, ["imports", *modules], timeout):
        if isinstance(answer, Ended):
            if current or left:
                yield _broken(current or f"actordbg's CPU support, before {left[0]}", answer, timeout)
        elif "torch" in answer:
            torch = answer["torch"]
            if gpus and not torch["cuda"]:
                build = f"built for CUDA {torch['built_for']}" if torch["built_for"] else "a build without CUDA"
                remedy = "install a torch built for your CUDA driver, or set CUDA_VISIBLE_DEVICES"
                yield warn("torch and the GPU", f"torch {torch['version']} is {build} and sees no GPU", remedy)
        elif "cpu_support" in answer:
            support = str(answer["cpu_support"])
        elif answer["state"] == "begin":
            current = str(answer["module"])
        else:
            left = [module for module in left if module != current]
            current = ""
            yield _ended(env, answer, support)


def _broken(module: str, end: Ended, timeout: float) -> Check:
    name = f"import {module}"
    if end.code is None:
        return bad(name, f"no end in {timeout:.0f} s", "import it by hand with `python -X importtime`; try --timeout")
    how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
    return bad(name, f"the process died ({how}): {end.last_words}", "a compiled package is broken: reinstall what it names")


def _ended(env: Environment, answer: dict[str, Any], support: str) -> Check:
    module = str(answer["module"])
    name = f"import {module}"
    if answer["error"] is None:
        return ok(name, f"imported in {answer['seconds']:.1f} s")
    missing = answer.get("missing")
    needed = TRAINER.modules.get(module, "everything")
    if missing and (missing == module or module.startswith(f"{missing}.")):
        return warn(name, f"this {TRAINER.name} has no {missing}", f"without it: no {needed}")
    if missing == "vllm":
        remedy = f"{env.pip('vllm')} (needs CUDA); without it `actordbg demo` samples with its own stand-in"
        return warn(name, f"needs vllm, which is not installed; without it: no {needed}", remedy)
    where = f" (asked for by {answer['where']})" if answer["where"] else ""
    return bad(name, f"{' '.join(str(answer['first']).split())[:300]}{where}", _remedy(env, answer, support))


def _remedy(env: Environment, answer: dict[str, Any], support: str) -> str:
    missing = answer.get("missing")
    if missing == "flash_attn" and support:
        return f"actordbg's stand-in for it could not be used ({support}): {env.pip('actordbg')}"
    if missing:
        top = str(missing).partition(".")[0]
        lacks = f"{top} {env.versions[top]} has no {missing}: " if env.versions.get(top) else ""
        return lacks + env.pip(environment.requirement(top))
    if str(answer["first"]).startswith(("ImportError", "AttributeError")):
        pins = [p for p in ("transformers", "deepspeed", "peft") if env.versions.get(p)]
        return f"versions that do not fit each other; known good: {env.pip(*map(environment.requirement, pins))}"
    return "run it by hand to see the whole traceback: python -c 'import " + str(answer["module"]) + "'"


_ABSENT = re.compile(r"not installed(?: there)?[;:] (.*)")
_PIP = re.compile(r"(.* -m pip install) ((?:--no-deps )?)(\S+)")


@dataclass(frozen=True)
class MissingPackages:
    """Packages that the same things need. level: bad or warn. commands: pip's command, `--no-deps ` if so, the requirement."""

    level: str
    why: str
    names: tuple[str, ...]
    commands: tuple[re.Match[str], ...]


def missing_packages(checks: Sequence[Check]) -> tuple[list[MissingPackages], list[Check]]:
    """What is missing, in the order of the checks, and the other checks."""
    groups: dict[tuple[str, str], list[tuple[str, re.Match[str]]]] = {}
    others: list[Check] = []
    for check in checks:
        absent, command = _ABSENT.match(check.detail), _PIP.match(check.remedy or "")
        if check.status.value == "ok" or absent is None or command is None:
            others.append(check)
        else:
            groups.setdefault((check.status.value, absent[1]), []).append((check.name, command))
    return [MissingPackages(level, why, *zip(*members, strict=True)) for (level, why), members in groups.items()], others


def install_command(missing: Sequence[MissingPackages]) -> str:
    """One line that installs all of them. What must not bring its own requirements comes behind the others."""
    wanted: dict[str, list[str]] = {"": [], "--no-deps ": []}
    for _, no_deps, requirement in (command.groups() for group in missing for command in group.commands):
        wanted[no_deps].append(requirement)
    return " && ".join(f"{missing[0].commands[0][1]} {how}{' '.join(names)}" for how, names in wanted.items() if names)
