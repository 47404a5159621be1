"""Runs the steps of the GPU kit, each with an end in sight, and leaves one report. `run.sh` calls it with the machine's Python.

Needs the standard library alone. It makes an environment over that Python's packages, in a temporary folder, and adds those
wheels of the kit whose package is not there. Then the steps: one that fails or takes too long says why, and the others continue.
Without CUDA a step that needs it says so, and runs on a stand-in where there is one. Invariant: a report is written whatever
happens, and its first line says what was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, OVER, NO_CUDA, NOT_RUN = "passed", "failed", "took too long", "no CUDA", "not run"
REPORT_SECONDS = 10
SECONDS = 570.0
"""For everything, unless said otherwise; with more, each step may take longer."""
FACTS = """
import importlib.metadata, json, platform, shutil, subprocess, torch

def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip() if shutil.which(words[0]) else ""

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

there = torch.cuda.is_available()
names = ("torch", "triton", "transformers", "deepspeed", "openrlhf", "peft", "accelerate", "flash_attn", "numpy", "pytest")
print(json.dumps({
    "cuda": there, "devices": torch.cuda.device_count(), "torch_cuda": torch.version.cuda, "python": platform.python_version(),
    "device": torch.cuda.get_device_name(0) if there else "",
    "capability": list(torch.cuda.get_device_capability(0)) if there else None,
    "driver": run("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
    "nvcc": run("nvcc", "--version")[-80:], "packages": {name: version(name) for name in names},
}))
"""
INSTALLED = """
import importlib.metadata, json, re
print(json.dumps([re.sub("[-_.]+", "-", one.metadata["Name"] or "").lower() for one in importlib.metadata.distributions()]))
"""


@dataclass(frozen=True)
class Step:
    """One thing to run. `words` may hold {python}, {work}, {store}, {kit}, {tree}; `also`: a second command, whose JSON is kept.

    `good`: exit codes of success. `stand_in`: words more where there is no CUDA; None: it is not run there. `behind`: continues
    in
    the background; `after`: the step of that kind that this one waits for.
    """

    name: str
    what: str
    words: tuple[str, ...]
    limit: int
    good: tuple[int, ...] = (0,)
    stand_in: tuple[str, ...] | None = ()
    also: tuple[str, ...] = ()
    behind: bool = False
    after: str = ""


@dataclass
class Outcome:
    """How a step went. `figures`: what it wrote into WORK/NAME.json; `said`: the end of its output."""

    name: str
    what: str
    status: str
    seconds: float = 0.0
    exit: int | None = None
    why: str = ""
    said: str = ""
    figures: Any = None
    on: str = ""


CLI = ("{python}", "-m", "actordbg", "--store", "{store}")
PLAIN = ("--attn", "sdpa", "--packing", "off", "--compile", "off")
LAST_MATRIX = (*CLI, "matrix", "--show", "last", "--json")
TESTS = ("{python}", "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "{gpu_tests}")
OURS = ("{python}", "-m")
BACKENDS = ("--backend", "plain,deepspeed,fsdp2", "--zero-stage", "0,2,3", "--nproc", "1", "--backward")
DEEPCOMPILE = ("--backend", "deepspeed", "--zero-stage", "1,3", "--deepcompile", "off,on")
MATRIX = (*CLI, "matrix", "--quiet", "--max-inputs", "2")
STEPS = (
    Step(
        "capture", "OpenRLHF's Actor in a training step, recorded and not",
        (*OURS, "benchmarks.gpu.capture_on_gpu", "--json", "{work}/capture.json"), 150, stand_in=("--stand-in", "--steps", "4"),
    ),
    Step(
        "flash", "flash attention, built for this GPU and two head sizes",
        (*OURS, "benchmarks.gpu.build_flash", "{kit}/wheels", "{work}/flash"), 360, stand_in=None, behind=True,
    ),
    Step("inputs", "made-up inputs", (*OURS, "benchmarks.gpu.made_inputs", "{store}"), 60),
    Step("tests", "the tests marked gpu", TESTS, 300, behind=True),
    Step("collectives", "NCCL with one process", (*OURS, "benchmarks.gpu.one_process"), 60),
    Step("backends", "each backend over NCCL, one process, and the truth", (*MATRIX, *BACKENDS, *PLAIN), 240, also=LAST_MATRIX),
    Step("deepcompile", "DeepCompile, on and off", (*MATRIX, *DEEPCOMPILE, *PLAIN), 150, stand_in=None, also=LAST_MATRIX),
    Step(
        "lengths", "memory and time over length, and what fits",
        (*OURS, "benchmarks.gpu.made_inputs", "{store}", "--lengths", "{work}/lengths.csv"), 150,
    ),
    Step("matrix", "flash attention, torch.compile and packing", MATRIX, 240, also=LAST_MATRIX, after="flash"),
)  # fmt: skip


@dataclass
class Kit:
    """The run: its folders, its environment, what is left of its time. `slow`: by how much a step may take longer."""

    kit: Path
    out: Path
    work: Path
    until: float
    slow: float = 1.0
    python: str = sys.executable
    cuda: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    behind: dict[str, threading.Thread] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def tree(self) -> Path:
        """The checkout: in the kit, or the kit itself."""
        return self.kit / "tree" if (self.kit / "tree").is_dir() else self.kit

    @property
    def left(self) -> float:
        """Seconds for steps."""
        return self.until - time.monotonic() - REPORT_SECONDS

    def environment(self) -> dict[str, str]:
        """What a step's process gets. Nothing is asked of a hub, and no cache of the user's is written."""
        own = {
            "PYTHONPATH": str(self.tree),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.work / "hub"),
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
            "COLUMNS": "160",
        }
        return os.environ | own

    def filled(self, words: tuple[str, ...], name: str) -> list[str]:
        """The words of a step's command. Each step has a store of its own with the made-up inputs: several run at a time."""
        store, inputs = self.work / f"{name}-store", self.work / "inputs-store"
        if "{store}" in words and inputs.is_dir() and not store.exists():
            shutil.copytree(inputs, store)
        places = {"python": self.python, "work": self.work, "store": store, "kit": self.kit, "tree": self.tree}
        found: list[str] = []
        for word in words:
            found += gpu_tests(self.tree) if word == "{gpu_tests}" else [word.format(**places)]
        return found


def gpu_tests(tree: Path) -> list[str]:
    """The test files that have a test marked `gpu`."""
    files = sorted((tree / "tests").rglob("test_*.py"))
    return [str(path.relative_to(tree)) for path in files if "pytest.mark.gpu" in path.read_text()]


def make_environment(kit: Kit) -> Outcome:
    """An environment over this Python's packages, with those of the kit that are not there."""
    began, home = time.monotonic(), kit.work / "env"
    asked = "import json, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]))"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    outer = dict.fromkeys(json.loads(subprocess.check_output([sys.executable, "-c", asked])))
    (site / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    there = json.loads(subprocess.check_output([str(home / "bin" / "python"), "-c", INSTALLED]))
    wheels = [path for path in sorted((kit.kit / "wheels").glob("*.whl")) if plain(path.name.split("-")[0]) not in there]
    if wheels:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--target",
            str(site),
        ]
        done = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:] or f"pip ended with {done.returncode}")
    kit.python = str(home / "bin" / "python")
    kit.facts = json.loads(subprocess.check_output([kit.python, "-c", FACTS], env=kit.environment()).splitlines()[-1])
    kit.cuda = kit.facts["cuda"]
    added = ", ".join(path.name.split("-")[0] for path in wheels) or "nothing"
    return Outcome("install", "the environment", PASSED, time.monotonic() - began, 0, said=f"added {added}", figures=kit.facts)


def plain(name: str) -> str:
    """A distribution's name as it is compared."""
    return name.replace("_", "-").replace(".", "-").lower()


def take(kit: Kit, step: Step) -> None:
    """Run one step, or begin it if it continues behind the others."""
    if step.after in kit.behind:
        kit.behind[step.after].join()
    if not kit.cuda and step.stand_in is None:
        kit.outcomes.append(Outcome(step.name, step.what, NO_CUDA, why="it needs CUDA, and there is no stand-in for it"))
        return
    if kit.left < 15:
        kit.outcomes.append(Outcome(step.name, step.what, NOT_RUN, why="no time was left"))
        return
    name = step.name
    words = kit.filled(step.words + (() if kit.cuda else step.stand_in or ()), name)
    with open(kit.work / f"{step.name}.log", "wb") as log:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=kit.tree, env=kit.environment(), start_new_session=True, **pipes)
    if not step.behind:
        return finish(kit, step, process)
    kit.behind[name] = threading.Thread(target=finish, args=(kit, step, process))
    kit.behind[name].start()


def finish(kit: Kit, step: Step, process: subprocess.Popen[bytes]) -> None:
    """Wait for a step as long as it may take, end what it left, and note how it went."""
    name, began, status, why = step.name, time.monotonic(), PASSED, ""
    try:
        process.wait(max(0.1, min(began + kit.slow * step.limit - time.monotonic(), kit.left)))
    except subprocess.TimeoutExpired:
        status, why = OVER, f"ended after {time.monotonic() - began:.0f} s"
    with_all(process.pid)
    process.wait()
    said = (kit.work / f"{name}.log").read_text(errors="replace")
    if status == PASSED and process.returncode not in step.good:
        status, why = FAILED, reason_in(said) or f"exit code {process.returncode}"
    figures = read_json(kit.work / f"{name}.json")
    if status in (PASSED, FAILED) and step.also and kit.left > 5:
        told = subprocess.run(
            kit.filled(step.also, name), cwd=kit.tree, env=kit.environment(), capture_output=True, text=True, timeout=60
        )
        (kit.work / f"{name}.json").write_text(told.stdout)
        figures = read_json(kit.work / f"{name}.json")
    on = "CUDA" if kit.cuda else "a stand-in, no CUDA"
    seconds = round(time.monotonic() - began, 1)
    code = process.returncode
    kit.outcomes.append(Outcome(name, step.what, status, seconds, exit=code, why=why, said=said[-6000:], figures=figures, on=on))


def with_all(leader: int) -> None:
    """Kill what is left of a step's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def reason_in(said: str) -> str:
    """The line of an output that says why: an error's, else the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error[", "E  ", "not built:")) or "Error:" in line]
    return (errors or lines or [""])[-1][:300]


def read_json(path: Path) -> Any:
    """What a file holds; None if there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def not_run(outcomes: list[Outcome], cuda: bool) -> str:
    """The report's first line."""
    left_out = [one for one in outcomes if one.status in (NO_CUDA, NOT_RUN)]
    missing = [f"{one.name} ({': '.join(filter(None, [one.status, one.why]))})" for one in left_out]
    bad = [f"{one.name} ({one.status})" for one in outcomes if one.status in (FAILED, OVER)]
    first = "" if cuda else "There is no CUDA here: what follows ran on a stand-in. "
    first += f"Not run: {'; '.join(missing)}." if missing else "Nothing was left out."
    return first + (f" Did not pass: {', '.join(bad)}." if bad else "")


def report(kit: Kit, seconds: float) -> None:
    """Write report.md, report.json and logs.txt."""
    facts, outcomes = kit.facts, kit.outcomes
    lines = [not_run(outcomes, kit.cuda), "", "# What ran on this machine", ""]
    machine = facts.get("driver") or facts.get("device") or "no GPU"
    lines += [f"{machine}; Python {facts.get('python')}, {packages(facts)}; {seconds:.0f} s in all.", ""]
    lines += ["| Step | Status | Exit code | Seconds | |", "|---|---|---|---|---|"]
    for one in outcomes:
        code, why = "-" if one.exit is None else one.exit, one.why.replace("|", "/")
        lines.append(f"| {one.name}: {one.what} | {one.status} | {code} | {one.seconds:.0f} | {why} |")
    for one in outcomes:
        text = one.figures["text"] if isinstance(one.figures, dict) and "text" in one.figures else one.said
        lines += ["", f"## {one.name}: {one.what}", "", "```text", *text.strip().splitlines()[-80:], "```"]
    kit.out.mkdir(parents=True, exist_ok=True)
    (kit.out / "report.md").write_text("\n".join(lines) + "\n")
    whole = {"not_run": lines[0], "seconds": round(seconds, 1), "facts": facts, "steps": [asdict(one) for one in outcomes]}
    (kit.out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    logs = [
        f"===== {path.stem} =====\n{path.read_text(errors='replace')[-1_000_000:]}" for path in sorted(kit.work.glob("*.log"))
    ]
    (kit.out / "logs.txt").write_text("\n".join(logs))


def packages(facts: dict[str, Any]) -> str:
    """`torch 2.11.0, triton 3.6.0` and so on."""
    return ", ".join(f"{name} {version}" for name, version in facts.get("packages", {}).items() if version)


def main(words: list[str] | None = None) -> int:
    """Run all steps, or those of --only. Exit code 0 if none failed, else 1."""
    parser = argparse.ArgumentParser(description="Run what needs a GPU, and leave a report.")
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", default="")
    parser.add_argument("--here", action="store_true", help="Take this Python's packages as they are.")
    given = parser.parse_args(words)
    began, only = time.monotonic(), set(filter(None, given.only.split(",")))
    work = Path(tempfile.mkdtemp(prefix="actordbg-gpu-"))
    kit = Kit(given.kit.resolve(), given.out.resolve(), work, began + given.seconds, max(1.0, given.seconds / SECONDS))
    try:
        if given.here:
            kit.facts = json.loads(subprocess.check_output([kit.python, "-c", FACTS]).splitlines()[-1])
            kit.cuda = kit.facts["cuda"]
        else:
            kit.outcomes.append(make_environment(kit))
        for step in STEPS:
            if not only or step.name in only:
                try:
                    take(kit, step)
                except Exception as error:  # noqa: BLE001  # the others continue
                    kit.outcomes.append(Outcome(step.name, step.what, FAILED, why=f"{type(error).__name__}: {error}"[:300]))
    except Exception as error:  # noqa: BLE001  # the report comes whatever happens
        kit.outcomes.append(Outcome("install", "the environment", FAILED, why=f"{type(error).__name__}: {error}"[:2000]))
    finally:
        for thread in kit.behind.values():
            thread.join()
        report(kit, time.monotonic() - began)
        shutil.rmtree(work, ignore_errors=True)
    print((kit.out / "report.md").read_text().splitlines()[0])
    for one in kit.outcomes:
        print(f"{one.name}: {one.status} ({one.seconds:.0f} s) {one.why}")
    return int(any(one.status in (FAILED, OVER) for one in kit.outcomes))


if __name__ == "__main__":
    sys.exit(main())
