"""What doctor's checks take, the examined interpreter, and what they give: one `Check` for each thing that was looked at."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from enum import Enum

from actordbg.base.errors import EnvironmentProblem
from actordbg.doctor.child_probe import Ended, ask
from actordbg.doctor.known_versions import PACKAGES
from actordbg.host.trainer import TRAINER

FACTS_SECONDS = 60.0
OTHERS = ("flash-attn", "vllm", "actordbg")


class Level(str, Enum):
    """ok: fine. warn: works, or only a part that you may not need does not. bad: something you asked for will fail."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, what was seen, and (unless it is fine) what to do."""

    name: str
    status: Level
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Check:
    """It is fine."""
    return Check(name, Level.OK, detail)


def warn(name: str, detail: str, remedy: str) -> Check:
    """It may matter."""
    return Check(name, Level.WARN, detail, remedy)


def bad(name: str, detail: str, remedy: str) -> Check:
    """It makes something fail."""
    return Check(name, Level.BAD, detail, remedy)


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
        """Whether neither torch nor the trainer is here: a machine for looking at dumps, not for making or replaying them."""
        return not self.versions.get("torch") and not self.versions.get(TRAINER.package)

    def pip(self, *requirements: str) -> str:
        """The command that installs `requirements` here."""
        return f"{'python' if self.own else shlex.quote(self.python)} -m pip install {' '.join(requirements)}"


def examined(python: str) -> Environment:
    """Ask an interpreter for the facts; EnvironmentProblem if it does not answer."""
    names = [package.name for package in PACKAGES] + list(OTHERS)
    end: Ended | None = None
    try:
        for answer in ask(python, ["facts", *names], FACTS_SECONDS):
            if not isinstance(answer, Ended):
                return Environment(python, tuple(answer["python"]), answer["versions"], answer["include"], answer["scripts"])
            end = answer
    except OSError as error:
        raise EnvironmentProblem(f"{python} cannot be run: {error.strerror}", hint="name a Python with --python") from None
    words = end.last_words if end else "no answer"
    raise EnvironmentProblem(f"{python} does not answer as a Python: {words}", hint="name a Python with --python")
