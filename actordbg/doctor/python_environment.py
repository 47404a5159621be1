"""This interpreter: its Python and packages, against the versions that are known to work together; and `Check`, the result of
each of doctor's checks.

Versions are read from the packages' metadata: nothing is imported. `constraints.txt` pins the same versions; a test holds them
equal. Another version is a warning that says so, never an error. `TRAPS` has what is known about old versions, and
`known_findings` what libraries of today do that a good engineer would not guess, from `findings.toml`.
Other processes have a time limit (`run`): a process that hangs is killed, with all that it started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal, TypeAlias

import actordbg
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import NOT_FROM_HERE
from actordbg.base.units import release
from actordbg.config.choices import installed_versions
from actordbg.config.sources import parse_toml
from actordbg.trainers.find_adapter import HOSTS
from actordbg.trainers.fitting import Fit, fit_of, fits
from actordbg.trainers.trainer import TRAINER


@dataclass(frozen=True)
class KnownFinding:
    """A finding, as `findings.toml` explains its fields. versions: (first, last) of each package that it was run with."""

    name: str
    guess: str
    outcome: str
    versions: Mapping[str, tuple[str, str]]
    seen_as: str
    short: str = ""
    remedy: str = ""

    @property
    def ran_with(self) -> str:
        """Return the packages and versions in words: "deepspeed 0.19.6 to 0.19.8"."""
        ranges = {package: " to ".join(dict.fromkeys(ends)) for package, ends in self.versions.items()}
        return ", ".join(f"{package} {words}" for package, words in ranges.items())

    def is_in(self, installed: Mapping[str, str | None]) -> bool:
        """Return whether each of its packages is installed in a version from the first to the last that it was run with.

        A newer version says nothing: nobody ran it.
        """
        for package, (first, last) in self.versions.items():
            version = installed.get(package)
            if version is None or not release(first) <= release(version) <= release(last):
                return False
        return True


@functools.cache
def known_findings() -> tuple[KnownFinding, ...]:
    """Return the findings in the table's order."""
    table = parse_toml(Path(__file__).with_name("findings.toml").read_text())
    return tuple(KnownFinding(name, **entry) for name, entry in table.items())


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


PIP = "python -m pip install"
_REQUIREMENT = re.compile(r"(?m)^([\w.-]+)[^=\n]*(?:==([\w.]+)$)?")
"""A line of a distribution's requirements: the name, and the version if it is exact."""


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
    """Run a command to its end or to `timeout` seconds, then kill what it started. Raises OSError if it cannot be started."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | NOT_FROM_HERE
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        return Ended(code, out.read())


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
_ON_ROWS = ("torch", "transformers")
"""What a replay on the rows needs."""
KNOWN_GOOD = {name: version for versions in PACKAGES.values() for name, version in versions.items()}

OTHERS = ("flash-attn", "vllm", "debugpy")
"""Further packages whose versions are read."""
Versions: TypeAlias = Mapping[str, "str | None"]
DEBUGPY = "debugpy>=1.8.22"
"""What the extra `ray` installs: older versions cannot show an editor the frames of an error that was caught."""

TRAPS: dict[str, tuple[tuple[int, ...], str]] = {
    "transformers": ((4, 53), "packing without flash-attn is silently wrong before 4.53: rows see each other"),
    TRAINER.package: (TRAINER.oldest, TRAINER.trap),
    "torch": ((2, 6), "older than any version that replays were tested with"),
    "deepspeed": ((0, 17), "older than any version that replays were tested with"),
}
"""Package -> the first version without the trap, and the trap."""

MODULE_OF = {"PIL": "pillow", "flash_attn": "flash-attn", "yaml": "pyyaml", "skimage": "scikit-image"}
"""Distributions whose module has another name."""


def requirement(module: str) -> str:
    """Return pip's requirement for a missing module: its distribution, at the known-good version if there is one."""
    name = MODULE_OF.get(module, module)
    return f"{name}=={KNOWN_GOOD[name]}" if KNOWN_GOOD.get(name) else name


def installed() -> dict[str, str | None]:
    """Return the versions of all distributions that checks are about; None for what is not installed."""
    surprising = (package for finding in known_findings() for package in finding.versions)
    names = (*KNOWN_GOOD, *OTHERS, *surprising)
    return dict.fromkeys(names) | installed_versions(names)


@dataclass(frozen=True)
class Host:
    """Another trainer, which is recorded without naming its adapter, and is here without ours.

    needs: the distributions that it requires; those of one exact version with it, the others with "".
    """

    fit: Fit
    needs: Mapping[str, str]

    @property
    def modules(self) -> list[str]:
        """Return the modules whose functions are recorded."""
        return list(dict.fromkeys(where.partition(":")[0] for where in self.fit.functions))

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.fit.package, self.fit.version)))


def find_host(versions: Versions) -> Host | None:
    """Return the trainer of `HOSTS` that is installed; None if there is none, or if our trainer is installed."""
    fit = next((fit for fit in map(fit_of, HOSTS) if fit.there), None)
    if versions[TRAINER.package] or fit is None:
        return None
    listed: list[str] = []
    with contextlib.suppress(PackageNotFoundError):
        listed = [line for line in requires(fit.package) or [] if "extra ==" not in line]
    needs = dict(_REQUIREMENT.findall("\n".join(listed).lower()))
    return Host(fit, needs)


def check(versions: Versions, host: Host | None = None) -> Iterator[Check]:
    """Check Python's version, then every package, then adapters. host: the trainer here, if it is another."""
    text = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    oldest, newest = PYTHON
    if sys.version_info[:2] < oldest:
        remedy = f"use Python {oldest[0]}.{oldest[1]} or newer; {KNOWN_PYTHON} is known to be good"
        yield bad("python", text, remedy)
    elif sys.version_info[:2] > newest:
        yield warn("python", f"{text}, newer than what was tested", f"Python {KNOWN_PYTHON} is known to be good")
    else:
        yield ok("python", text)
    yield ok("actordbg", actordbg.__version__)
    for need, packages in PACKAGES.items():
        for name, known in packages.items():
            yield (
                _package(versions[name], need, name, known) if host is None else _beside(host, versions[name], need, name, known)
            )
    for finding in known_findings():
        met = host is None or not finding.versions.keys().isdisjoint(host.needs)
        if met and finding.remedy and finding.is_in(versions):
            yield warn(finding.short, f"{finding.outcome} ({finding.name}, {finding.ran_with})", finding.remedy)
    if versions["ray"]:
        yield _debugger(versions["debugpy"])
    if versions["torch"]:
        yield from (adapter_check(fit) for fit in fits() if fit.there or fit.differs)


def _package(version: str | None, need: str, name: str, known: str | None) -> Check:
    if version is None:
        needs = "replay, check and actor init need it" if need == REPLAY else f"{need} needs it"
        remedy = f"{PIP} {requirement(name)}"
        if name == TRAINER.package:
            remedy = f"{PIP} --no-deps {requirement(name)} (its flash-attn cannot be built without CUDA)"
        return (warn if need == TRAINING else bad)(name, f"not installed; {needs}", remedy)
    first_good, trap = TRAPS.get(name, ((), ""))
    if release(version) < first_good:
        return warn(name, f"{version}: {trap}", f"known good: {known}")
    if known in (None, version.partition("+")[0]):
        return ok(name, version)
    return warn(name, f"{version}, not the version that was tested", f"known good: {known}")


def _beside(host: Host, version: str | None, need: str, name: str, known: str | None) -> Check:
    """Check a package for another trainer: versions that it pins are right, and replays on the rows need little."""
    if version is not None and version == host.needs.get(name):
        return ok(name, f"{version}, which {host.title} requires")
    if version is not None or need not in (REPLAY, TRAINING) or name in _ON_ROWS:
        return _package(version, need, name, known)
    if name == TRAINER.package:
        detail = f"not installed; {host.title} is the trainer here, and its calls are replayed without it"
        return warn(name, detail, "actor init, train-check, demo, and dumps of `dump create` without --through rows need it")
    if name in host.needs:
        pin = "==".join(filter(None, (name, host.needs[name])))
        return bad(name, f"not installed; {host.title} requires it", f"{PIP} {pin}")
    return ok(name, f"not installed; {host.title} does not need it")


def adapter_check(fit: Fit) -> Check:
    """Check an adapter whose trainer is installed against the trainer's own files."""
    name, tried = f"adapter {fit.name}", ", ".join(fit.tried) or "none"
    version = fit.version or "without a version"
    if fit.differs:
        remedy = f"what differs is not recorded; tested versions: {tried}"
        return warn(name, f"{fit.package} {version}: {'; '.join(fit.differs)}", remedy)
    if fit.version in fit.tried:
        return ok(name, f"{fit.package} {fit.version}, a tested version")
    detail = f"{fit.package} {version} has what it reads, but was not tested"
    return warn(name, detail, f"tested: {tried}; record a few steps, then run `actordbg compare last recorded`")


def _debugger(version: str | None) -> Check:
    """Check debugpy, which Ray's distributed debugger needs here and on every node."""
    remedy = f"{PIP} {in_shell(DEBUGPY)}"
    if version is None:
        needs = "not installed; `replay --debugpy` and `--engine ray --ray-debug-error` need it"
        return warn("debugpy", needs, f"{remedy}, here and on every node of the cluster")
    if release(version) < release(DEBUGPY.partition(">=")[2]):
        return warn("debugpy", f"{version}: an editor stops above the frames that failed", remedy)
    return ok("debugpy", version)


def flash_attention(version: str | None, gpus: int) -> Check:
    """Check that flash-attn is installed exactly if there is a GPU."""
    if version and not gpus:
        return warn("flash-attn", f"{version}, but no GPU: flash_attention_2 cannot run", "replay with --attn sdpa")
    if gpus and not version:
        remedy = f"{PIP} flash-attn --no-build-isolation; or replay with --attn sdpa"
        return warn("flash-attn", "not installed; --attn flash_attention_2 needs it", remedy)
    return ok("flash-attn", version or "not installed, and not needed without a GPU (--attn sdpa, eager)")
