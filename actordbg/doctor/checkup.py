"""The whole examination, quick checks first: findings come as they are found.

    facts of the interpreter, packages            0.1 s
    machine: memory, GPU, compiler                1 s
    store, disk, catalog, dump switch, patch      0.5 s
    OpenRLHF's modules, the deepspeed launcher    10 to 60 s (left out with `quick`)

Example::

    findings = list(examine(Store("store"), sys.executable))
    exit_code(findings)        # 0, or 4 when something is bad
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from actordbg.base.errors import EnvironmentProblem
from actordbg.doctor import machine_check as machine
from actordbg.doctor import openrlhf_modules as modules
from actordbg.doctor import python_environment as environment
from actordbg.doctor import store_check as state
from actordbg.doctor.check_result import Finding, Level
from actordbg.store.layout import Store


def examine(
    store: Store, python: str, *, quick: bool = False, timeout: float = modules.IMPORT_SECONDS
) -> Iterator[Finding]:
    """Every finding about `python`, this machine and `store`. `timeout`: seconds that one module may take to import.

    Raises EnvironmentProblem if `python` does not run.
    """
    env = environment.examine(python)
    found_gpus = machine.gpus()
    yield from environment.check(env)
    yield machine.gpu(found_gpus)
    yield environment.flash_attention(env, len(found_gpus))
    yield machine.memory()
    yield machine.compiler(env)
    yield from state.check(env, store)
    if not quick:
        yield from _slow(env, len(found_gpus), timeout)


def _slow(env: environment.Environment, gpus: int, timeout: float) -> Iterator[Finding]:
    """The launcher starts while the modules are imported: both mostly wait for the disk."""
    with ThreadPoolExecutor(1) as pool:
        launcher = pool.submit(machine.launcher, env)
        yield from modules.check(env, gpus, timeout)
        yield launcher.result()


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing is bad; warnings are no failure."""
    bad = any(finding.status is Level.BAD for finding in findings)
    return EnvironmentProblem.exit_code if bad else 0
