"""Find the actor.py that is meant, without importing it (torch takes seconds to import and has side effects).

Three ways to name it: `--target FILE`; `--python EXE`, for the environment of another interpreter; neither, for this
interpreter. The interpreter itself says what an import of the actor's module would load in the current folder (`probe`). So
editable installations, PYTHONPATH and a checkout that shadows the installed copy are seen as the training job sees them.

After every change the same interpreter proves that it would run the bytes on disk (`require_seen`). Python
does not read actor.py if it trusts the .pyc beside it. A .pyc with an unchecked hash is trusted whatever the source says
(compileall --invalidation-mode unchecked-hash, some container builds); a .pyc with a timestamp, if seconds and size agree.

A symbolic link is followed: `Target.path` is the real file, `Target.named` the path that was found or given.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import Conflict, EnvironmentProblem, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import NOT_FROM_HERE
from actordbg.install import target_probe as probe
from actordbg.trainers.find_adapter import HOSTS, actor_module
from actordbg.trainers.trainer import TRAINER

PROBE_SECONDS = 120


@dataclass(frozen=True)
class Copy:
    """An actor.py that the interpreter could import, and the sys.path entry that it comes from."""

    path: str
    entry: str


@dataclass(frozen=True)
class Target:
    """The file to work on, the interpreter that runs it, and what else that interpreter could import instead."""

    path: Path
    named: Path
    python: str
    trainer_version: str | None
    copies: list[Copy] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Return what the user should know about which file this is."""
        notes = [*filter(None, [other_trainer(self.path)])]
        if self.named != self.path:
            notes.append(f"{self.named} leads to {self.path} through a link: everything else that links there also changes")
        if len(self.copies) > 1:
            notes.append(f"{self.copies[0].path} wins here (found through {self.copies[0].entry})")
            notes += [f"shadowed: {copy.path} (in {copy.entry}); --target names it" for copy in self.copies[1:]]
        return notes


def find_target(python: Path | None = None, target: Path | None = None) -> Target:
    """Find the actor.py of `--target`, of the interpreter `--python`, or of this interpreter.

    Raises UsageError if both are given, EnvironmentProblem if there is no such file or interpreter, or no trainer in it.
    """
    if python is not None and target is not None:
        raise UsageError("--python and --target cannot be combined", hint="name the file, or the interpreter, not both")
    if target is not None:
        if not target.is_file():
            raise EnvironmentProblem(f"{target} is not a file", hint="name an actor.py with --target")
        return _target(target, _interpreter_of(target), [])
    executable = str(python) if python is not None else sys.executable
    for module in itertools.chain([TRAINER.actor_module], map(actor_module, HOSTS)):
        answer = ask(executable, "find", module)
        if answer["winner"]:
            break
    else:
        raise EnvironmentProblem(
            f"{executable} has no {' and no '.join((TRAINER.package, *HOSTS))}",
            hint="name the interpreter of the training environment with --python, or the file with --target",
        )
    return _target(Path(answer["winner"]), executable, [Copy(**copy) for copy in answer["copies"]])


def ask(python: str, *question: str) -> dict[str, Any]:
    """Run a `probe` command in an interpreter. Raises EnvironmentProblem with the last line it printed if it cannot answer."""
    command = [python, "-c", Path(probe.__file__).read_text(encoding="utf-8"), *question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL,
            env=os.environ | NOT_FROM_HERE,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no answer in {PROBE_SECONDS} s"
        raise EnvironmentProblem(
            f"{python} cannot be run as a Python: {reason}", hint="name a Python interpreter with --python"
        ) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    if done.returncode != 0 or not answers:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        hint = "check that environment, or name another Python with --python"
        raise EnvironmentProblem(f"{python} cannot answer `{question[0]}`: {last}", hint=hint)
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(probe.MARK))
    return answer


def require_hook(python: str) -> None:
    """Check that `python` has an actordbg whose capture hook imports. Raises EnvironmentProblem otherwise."""
    try:
        ask(python, "hook")
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(
            f"{python} would run the patched file, but cannot import actordbg.capture.hook: {problem.message}",
            hint=f"install actordbg into that environment: {in_shell(python)} -m pip install actordbg",
        ) from None


def require_seen(python: str, path: Path, store: str | None) -> None:
    """Check that `python` would run the trailer of `path`, capturing into `store`; or, if `store` is None, no trailer.

    Raises Conflict otherwise. A timestamped .pyc that contradicts its source is removed first.
    """
    for attempt in (1, 2):
        proof = ask(python, "prove", str(path))
        if proof["hooked"] == (store is not None) and (store is None or store in proof["constants"]):
            return
        if attempt == 1 and proof["kind"] == "timestamp":
            with contextlib.suppress(OSError):
                os.unlink(proof["cached"])  # a cache that contradicts its source, by a coincidence of second and size
        else:
            break
    if proof["error"]:
        raise Conflict(f"{python} cannot compile {path}: {proof['error']}", hint="this Python is too old or too new for the file")
    fault = "still sees the hook in" if store is None else "does not see the hook in"
    raise Conflict(
        f"{python} {fault} {path}: it runs {proof['cached']} ({proof['kind']}) instead of the source",
        hint=f"remove {proof['cached']} (Python rebuilds it from the source), then run this again",
    )


def version_beside(path: Path) -> str | None:
    """Read the version of the trainer that holds this file from the metadata beside the package; None if unknown."""
    inside = Path(TRAINER.actor_file).parts
    if path.parts[-len(inside) :] != inside:
        return None
    root = path.parents[len(inside) - 1]
    for info in sorted(root.glob(f"{TRAINER.package}-*.dist-info")):
        return info.name.removeprefix(f"{TRAINER.package}-").removesuffix(".dist-info")
    try:
        text = (root / "version.txt").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"\d[\w.+!-]*", text) else None


def _target(named: Path, python: str, copies: list[Copy]) -> Target:
    named = Path(os.path.abspath(named))
    path = Path(os.path.realpath(named))
    return Target(path, named, python, version_beside(named) or version_beside(path), copies)


def other_trainer(path: Path) -> str:
    """Say which other package than the trainer's a file belongs to, with its version; "" for the trainer's own file."""
    tops = list(itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents))
    if not tops or tops[-1].name == TRAINER.package:
        return ""
    from importlib.metadata import distributions  # it imports the parsers of e-mail

    root = tops[-1].parent
    owners = (dist for dist in distributions(path=[str(root)]) if any(root / file == path for file in dist.files or ()))
    whose = next((f" ({dist.name} {dist.version})" for dist in owners), "")
    return f"this is the Actor of {tops[-1].name}{whose}, not {TRAINER.name}'s: its dumps say so, and are replayed on the rows"


def _interpreter_of(target: Path) -> str:
    """Return the interpreter of the environment that this file is installed in, or else this interpreter."""
    for folder in Path(os.path.abspath(target)).parents:
        if folder.name in ("site-packages", "dist-packages") and folder.parent.name.startswith("python"):
            for name in ("python", "python3"):
                python = folder.parents[2] / "bin" / name
                if os.access(python, os.X_OK):
                    return str(python)
    return sys.executable
