"""The machine: memory, GPU, C++ compiler, the deepspeed launcher, and room for the store."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from actordbg.doctor.check import Check, Environment, bad, ok, run, warn

GIB = 2**30
LITTLE_MEMORY = 4 * GIB
"""A dump of 1,400 padded tokens with a vocabulary of 128,000 takes 2.5 to 3.7 GB in each worker, whatever the model."""
LAUNCHER_SECONDS = 120.0

_PROGRAM = "#include <Python.h>\n#include <omp.h>\nint actordbg_threads() { return omp_get_max_threads(); }\n"


def gpus() -> list[str]:
    """The names of the NVIDIA GPUs that the driver shows, without torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = run([tool, "--list-gpus"], timeout=20)
    return [line.strip() for line in done.output.splitlines() if line.startswith("GPU ")] if done.code == 0 else []


def gpu(found: list[str]) -> Check:
    """What GPUs are there; none is fine."""
    if not found:
        return ok("gpu", "none: replays run on the CPU; no flash_attention_2, no DeepCompile")
    names = sorted({line.partition(": ")[2].partition(" (UUID")[0] for line in found})
    return ok("gpu", f"{len(found)} x {', '.join(names)}")


def memory(meminfo: Path = Path("/proc/meminfo")) -> Check:
    """How much memory is free for workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return ok("memory", f"unknown here; {cores} CPU cores")
    text = f"{available / GIB:.1f} GiB available, {cores} CPU cores"
    if available < LITTLE_MEMORY:
        return warn("memory", text, "close something, or replay small inputs: --where 'batch_size*seq_len < 1000'")
    return ok("memory", text)


def compiler(env: Environment) -> Check:
    """Whether a C++ compiler can build what torch.compile generates: it needs Python's headers and OpenMP."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        detail = f"no {name}: replay --compile needs a C++ compiler"
        return warn("compiler", detail, "install g++ (Debian: apt install g++), or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="utf-8")
        command = [found, "-shared", "-fPIC", "-fopenmp", f"-I{env.include}", str(source), "-o", f"{folder}/probe.so"]
        done = run(command, timeout=60)
    if done.code == 0:
        return ok("compiler", f"{found} builds with Python.h and OpenMP")
    error = next((line for line in done.output.splitlines() if "error" in line), done.last_words)
    remedy = "install Python's headers (Debian: apt install python3-dev)" if "Python.h" in error else "check the compiler"
    return warn("compiler", f"{found} cannot build what torch.compile generates: {error.strip()}", remedy)


def launcher(env: Environment) -> Check:
    """Whether the deepspeed launcher is there and starts."""
    if not env.versions.get("deepspeed"):
        detail = "deepspeed is not installed; replay --backend deepspeed needs it"
        return warn("deepspeed launcher", detail, "replay with --backend plain, or install deepspeed")
    script = Path(env.scripts) / "deepspeed"
    command = [str(script)] if script.is_file() else [env.python, "-m", "deepspeed.launcher.runner"]
    try:
        done = run([*command, "--help"], LAUNCHER_SECONDS)
    except OSError as error:
        return bad("deepspeed launcher", f"{script}: {error.strerror}", "reinstall deepspeed; its first line names a Python")
    if done.code == 0:
        return ok("deepspeed launcher", str(script) if script.is_file() else " ".join(command[1:]))
    how = f"no end in {LAUNCHER_SECONDS:.0f} s" if done.code is None else f"exit code {done.code}: {done.last_words}"
    return bad("deepspeed launcher", f"does not start, {how}", "run `deepspeed --help`; reinstall deepspeed after torch")


def disk(root: Path, floor: int) -> Check:
    """Room where the store is or will be; `floor` is the free space in bytes below which capture drops dumps."""
    place = next(path for path in (root, *root.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free in {place}"
    if free < floor:
        detail = f"{text}, below the floor of {floor / GIB:.1f} GiB: capture drops every dump"
        return warn("disk", detail, "make room, name another disk with --store, or lower `dump enable --free-floor`")
    return ok("disk", text)
