"""Run all checks, quick checks first; each is yielded as it is made.

    facts of the interpreter, packages            0.1 s
    machine: memory, GPU, compiler                1 s
    store, disk, catalog, dump switch, patch      0.5 s
    the trainer's modules                         10 to 60 s (skipped with `quick`)

The trainer's modules that matter are imported in a child process (`import_probe`); if one does not import, the check has the
cause and a workaround.

Example::

    checks = list(examine(Store("store")))
    exit_code(checks)        # 0, or 4 when something is bad
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import is_own, name_of
from actordbg.capture.control import DEFAULT_FREE_FLOOR
from actordbg.capture.switch_file import read_control
from actordbg.catalog import connections as engine, migrate
from actordbg.config.replay_config import SETTINGS
from actordbg.config.sources import find_file, from_environment
from actordbg.doctor import import_probe as probe, python_environment as environment
from actordbg.doctor.python_environment import PIP, Check, Ended, Host, Versions, bad, ok, run, warn
from actordbg.formats.store_files import file_system
from actordbg.install.patch_target import find_target
from actordbg.install.patching import inspect_target
from actordbg.install.trailer import State
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER

IMPORT_SECONDS = 180.0


def examine(store: Store, *, quick: bool = False, timeout: float = IMPORT_SECONDS) -> Iterator[Check]:
    """Yield every check of this interpreter, this machine and `store`. `timeout`: most seconds for the import of a module."""
    versions, found_gpus = environment.installed(), gpus()
    host = environment.find_host(versions)
    yield from environment.check(versions, host)
    yield gpu(found_gpus)
    yield environment.flash_attention(versions["flash-attn"], len(found_gpus))
    yield memory()
    yield compiler()
    yield from on_this_machine(store, has_trainer=bool(versions[TRAINER.package] or host))
    if not quick:
        yield from imports(versions, len(found_gpus), timeout, host)


def exit_code(checks: Iterable[Check]) -> int:
    """Return 0 unless a check is bad; warnings do not count."""
    return EnvironmentProblem.exit_code if any(check.status == "bad" for check in checks) else 0


def imports(versions: Versions, gpu_count: int, timeout: float = IMPORT_SECONDS, host: Host | None = None) -> Iterator[Check]:
    """Yield a check of torch and of each module of the trainer, or of `host`; `timeout` is for each module.

    A module that kills or hangs the child process costs no other check: a new child imports the modules after it.
    """
    wanted = ("torch", TRAINER.package) if host is None else ("torch",)
    if missing := [name for name in wanted if not versions[name]]:
        yield warn("imports", f"not tried: {' and '.join(missing)} not installed", "see above; capture and replay need them")
        return
    script, left = (
        Path(probe.__file__).read_text(encoding="utf-8"),
        ["torch", *(TRAINER.modules if host is None else host.modules)],
    )
    while left:
        modules = [module for module in left if module != "torch"]
        done = run([sys.executable, "-c", script, str(timeout), *modules], (len(modules) + 2) * timeout)
        lines = done.output.splitlines()
        answers = [json.loads(line.removeprefix(probe.MARK)) for line in lines if line.startswith(probe.MARK)]
        current = ""
        for answer in answers:
            if "torch" in answer and "torch" in left:
                yield from _cuda(answer["torch"], gpu_count)
            elif answer.get("state") == "begin":
                current = answer["module"]
            elif "state" in answer:
                if current in left:
                    left.remove(current)
                    yield _ended(versions, answer, host)
                current = ""
        if done.code or done.code is None:
            words = "\n".join(line for line in lines if not line.startswith(probe.MARK))
            yield _killed(current or f"actordbg's CPU support, before {left[0]}", Ended(done.code, words), timeout)
        if current not in modules:
            return
        left.remove(current)


def _cuda(torch: dict[str, Any], gpu_count: int) -> Iterator[Check]:
    if gpu_count and not torch["cuda"]:
        build = f"built for CUDA {torch['built_for']}" if torch["built_for"] else "a build without CUDA"
        remedy = "install a torch built for your CUDA driver, or set CUDA_VISIBLE_DEVICES"
        yield warn("torch and the GPU", f"torch {torch['version']} is {build} and sees no GPU", remedy)


def _killed(module: str, end: Ended, timeout: float) -> Check:
    if end.code is None or probe.LATE in end.output:
        remedy = "import it by hand with `python -X importtime`; try --timeout"
        return bad(f"import {module}", f"did not finish in {timeout:.0f} s", remedy)
    how = f"signal {-end.code}" if end.code < 0 else f"exit code {end.code}"
    remedy = "a compiled package is broken: reinstall what it names"
    return bad(f"import {module}", f"the process died ({how}): {end.last_words}", remedy)


def _ended(versions: Versions, answer: dict[str, Any], host: Host | None) -> Check:
    module, error = str(answer["module"]), answer["error"]
    name = f"import {module}"
    if error is None:
        return ok(name, f"imported in {answer['seconds']:.1f} s")
    missing = answer["missing"]
    needed = TRAINER.modules.get(module, "recording of what is in it")
    if missing and (missing == module or module.startswith(f"{missing}.")):
        trainer = host.title if host else TRAINER.name
        return warn(name, f"this {trainer} has no {missing}", f"without it: no {needed}")
    if missing == "vllm" and host is None:
        remedy = f"{PIP} vllm (needs CUDA); without it `actordbg demo` samples with its own stand-in"
        return warn(name, f"needs vllm, which is not installed; without it: no {needed}", remedy)
    where = f" (required by {answer['where']})" if answer["where"] else ""
    return bad(name, f"{' '.join(error.split())[:300]}{where}", _remedy(versions, module, error, missing, host))


def _remedy(versions: Versions, module: str, error: str, missing: str | None, host: Host | None) -> str:
    if missing:
        top = missing.partition(".")[0]
        lacks = f"{top} {versions[top]} has no {missing}: " if versions.get(top) else ""
        return f"{lacks}{PIP} {environment.requirement(top)}"
    if host is not None:
        return f"its requirements are not met: {PIP} {host.fit.package}=={host.fit.version}"
    if error.startswith(("ImportError", "AttributeError")):
        pins = [environment.requirement(name) for name in ("transformers", "deepspeed", "peft") if versions[name]]
        return f"incompatible versions; known good: {PIP} {' '.join(pins)}"
    return f"run it by hand to see the whole traceback: python -c 'import {module}'"


def install_command(checks: Iterable[Check]) -> str:
    """Return a command that installs all missing packages at once; "" if one check or none names such a command."""
    commands = [check.remedy for check in checks if check.remedy.startswith(PIP) and check.detail.startswith("not installed")]
    plain = [command.removeprefix(PIP).partition(",")[0] for command in commands if " --" not in command]
    return PIP + "".join(plain) if len(plain) > 1 else ""


# This machine: memory, GPU, compiler, disk.

GIB = 2**30
LITTLE_MEMORY = 4 * GIB
"""A dump of 1,400 padded tokens with a vocabulary of 128,000 takes 2.5 to 3.7 GB in each worker, whatever the model."""

_PROGRAM = "#include <Python.h>\n#include <omp.h>\nint actordbg_threads() { return omp_get_max_threads(); }\n"


def gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs that the driver shows, without torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = run([tool, "--list-gpus"], timeout=20)
    return [line.strip() for line in done.output.splitlines() if line.startswith("GPU ")] if done.code == 0 else []


def gpu(listed: list[str]) -> Check:
    """Check the GPUs. It is always fine: replays also run on the CPU."""
    if not listed:
        return ok("gpu", "none: replays run on the CPU; no flash_attention_2, no DeepCompile")
    names = sorted({line.partition(": ")[2].partition(" (UUID")[0] for line in listed})
    return ok("gpu", f"{len(listed)} x {', '.join(names)}")


def memory(meminfo: Path = Path("/proc/meminfo")) -> Check:
    """Check how much memory is free for workers."""
    cores = len(os.sched_getaffinity(0))
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return ok("memory", f"unknown here; {cores} CPU cores")
    text = f"{available / GIB:.1f} GiB available, {cores} CPU cores"
    if available < LITTLE_MEMORY:
        return warn("memory", text, "close other programs, or replay small inputs: --where 'batch_size*seq_len < 1000'")
    return ok("memory", text)


def compiler() -> Check:
    """Check that a C++ compiler can build what torch.compile generates: it needs Python's headers and OpenMP."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        detail = f"no {name}: replay --compile needs a C++ compiler"
        return warn("compiler", detail, "install g++ (Debian: apt install g++), or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="utf-8")
        command = [
            path,
            "-shared",
            "-fPIC",
            "-fopenmp",
            f"-I{sysconfig.get_path('include')}",
            str(source),
            "-o",
            f"{folder}/probe.so",
        ]
        done = run(command, timeout=60)
    if done.code == 0:
        return ok("compiler", f"{path} builds with Python.h and OpenMP")
    error = next((line for line in done.output.splitlines() if "error" in line), done.last_words)
    remedy = "install Python's headers (Debian: apt install python3-dev)" if "Python.h" in error else "check the compiler"
    return warn("compiler", f"{path} cannot build what torch.compile generates: {error.strip()}", remedy)


def disk(root: Path, floor: int) -> Check:
    """Check the free space where the store is or will be. `floor`: the bytes below which capture drops dumps."""
    place = next(path for path in (root, *root.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {place}"
    if free < floor:
        detail = f"{text}, below the minimum of {floor / GIB:.1f} GiB: capture drops every dump"
        return warn("disk", detail, "make room, name another disk with --store, or lower `dump enable --free-floor`")
    return ok("disk", text)


# What actordbg itself left on this machine.

PRIVATE = 0o077
"""Permission bits that nobody but the owner should have on a store: dumps hold training data."""


def on_this_machine(store: Store, *, has_trainer: bool) -> Iterator[Check]:
    """Check store, disk, catalog, dump switch, replay settings and patch, in this order. An ActordbgError is a bad check."""
    looks: dict[str, Callable[[], Check | None]] = {
        "store": lambda: _store(store), "disk": lambda: disk(store.root, _floor(store)), "catalog": lambda: _catalog(store),
        "recording": lambda: _control(store), "settings file": _file, "replay settings": _settings,
        "patch": lambda: _patch(store) if has_trainer else None,
    }  # fmt: skip
    for name, look in looks.items():
        try:
            seen = look()
        except ActordbgError as error:
            seen = bad(name, error.message, error.hint)
        if seen is not None:
            yield seen


def _file() -> Check | None:
    """Name the actordbg.toml that commands in this folder use, and its owner; None if there is none."""
    path, _ = find_file()
    if path is None:
        return None
    owner = path.stat().st_uid
    whose = "yours" if is_own(owner) else f"of {name_of(owner)}: ACTORDBG_CONFIG names it"
    return ok("settings file", f"{path}, {whose}")


def _settings() -> Check | None:
    """List the environment variables that change what replays do; None if none is set."""
    settings = from_environment()
    text = ", ".join(f"{source}={SETTINGS[name].typed(value)}" for name, (value, source) in settings.items())
    return ok("replay settings", f"from the environment: {text}") if settings else None


def _store(store: Store) -> Check:
    if not store.exists() and not (store.root.is_dir() and any(store.root.glob("dumps/*/rank*"))):
        return ok("store", f"none yet in {store.root}; the first dump creates it")
    store.require()
    if not os.access(store.root, os.W_OK | os.X_OK):
        detail = f"you cannot write {store.root}: only commands that read work"
        return warn("store", detail, "name another store for results, with --store DIR or ACTORDBG_STORE")
    mode = store.root.stat().st_mode
    if mode & PRIVATE:
        detail = f"{store.root} has mode {mode & 0o777:o}: other users can read the dumps"
        return warn("store", detail, f"chmod 700 {in_shell(str(store.root))}")
    kind = file_system(store.root)
    return ok("store", f"{store.root}, format 1" + (f", on {kind}" if kind else ""))


def _catalog(store: Store) -> Check:
    path = store.catalog_path
    if store.exists() and not engine.is_writable(path):
        return ok("catalog", f"cannot be written here; reading commands keep one in {migrate.private_folder(store)}")
    revision, usable = migrate.look(path)
    if revision is None:
        return ok("catalog", "none yet; the first command that reads dumps builds it")
    if not usable:
        return warn("catalog", f"revision {revision}, of another actordbg", "any reading command rebuilds it: actordbg index")
    return ok("catalog", f"revision {revision}, up to date; journal {engine.journal_mode(path)}")


def _control(store: Store) -> Check:
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        return warn("recording", "ACTORDBG_DISABLE is set: jobs started from this shell record nothing", "unset ACTORDBG_DISABLE")
    control = read_control(store)
    if control is None or not control.enabled:
        return ok("recording", "off")
    return ok("recording", f"on since {control.since}, run {control.run}")


def _floor(store: Store) -> int:
    with contextlib.suppress(ActordbgError):
        if control := read_control(store):
            return control.free_floor_bytes
    return DEFAULT_FREE_FLOOR


def _patch(store: Store) -> Check:
    status = inspect_target(find_target(), store)
    if status.state is State.CLEAN and status.enabled:
        detail = f"recording is on, but this file has no hook (an upgrade removes it): {status.file}"
        return warn("patch", detail, "run `actordbg patch`, or start jobs with `actordbg run`")
    if status.state is State.CLEAN:
        return ok("patch", f"clean, not patched: {status.file}")
    if status.state is State.UNSUPPORTED:
        oldest, newest = (".".join(map(str, version)) for version in (TRAINER.oldest, TRAINER.newest))
        remedy = f"{TRAINER.name} {oldest} to {newest} have an Actor that can be patched"
        return bad("patch", f"{status.file}: {status.reason}", remedy)
    if status.state is State.EDITED:
        return warn("patch", f"{status.reason}: {status.file}", "run `actordbg unpatch`: it keeps the edit and removes the hook")
    if status.hooked is False:
        return bad("patch", f"patched, but the interpreter does not see it: {status.file}", "run `actordbg patch` for the reason")
    if status.store and Path(status.store) != store.root:
        remedy = f"actordbg --store {in_shell(str(status.store))} ..."
        return warn("patch", f"patched, capturing into another store: {status.store}", remedy)
    return ok("patch", f"patched: {status.file}")
