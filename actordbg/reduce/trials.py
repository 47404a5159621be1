"""Run trials of cases within a budget, and remember how each ended, so that a stopped reduction continues.

    with Trials(folder, most=200, seconds=300) as trials:
        trials.ending(case).status       # "returned", "raised", "died" or "hung"

`trials.jsonl` has a line for each trial: a digest of the case, its script and the installed versions; what was tried; its ending.
A trial that is in there does not run again, except to confirm a case: what is reported ran twice in this call, in two processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from actordbg.base.errors import LaunchProblem, Unsupported
from actordbg.config.choices import installed_versions
from actordbg.records.journal import Journal, read_events
from actordbg.reduce import script
from actordbg.reduce.case import HANG, FaultCase
from actordbg.reduce.trial_host import DIED, HUNG, RAISED, RETURNED

__all__ = ["DIED", "HUNG", "RAISED", "RETURNED", "Ending", "OutOfBudget", "Trials"]
T = TypeVar("T")
JOURNAL = "trials.jsonl"
START_S, HANG_S = 120.0, 10.0
"""Seconds within which the host starts, and after which a trial that may hang does: a case that runs takes a second."""


class OutOfBudget(Exception):
    """No trials or no time are left."""


@dataclass(frozen=True)
class Ending:
    """How a trial ended. values: what `attempt` returned, None: not finite. error: the exception's text, or the signal's name."""

    status: str
    values: tuple[float | None, ...] = ()
    error_class: str = ""
    error: str = ""
    frames: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Ending:
        """Build from plain data."""
        lists = {name: tuple(data.get(name) or ()) for name in ("values", "frames")}
        return cls(str(data["status"]), error_class=str(data.get("error_class", "")), error=str(data.get("error", "")), **lists)


class Trials:
    """Trials of one reduction. most, seconds: the budget of this call; trials of earlier calls cost nothing."""

    def __init__(self, folder: Path, *, most: int = 200, seconds: float = 300.0) -> None:
        self.count, self._most, self._until = 0, most, time.monotonic() + seconds
        self._host: subprocess.Popen[str] | None = None
        self._known: dict[str, Ending] = {}
        for event in read_events(folder / JOURNAL):
            with contextlib.suppress(KeyError, TypeError):  # a damaged line is a trial that did not run
                self._known[event["key"]] = Ending.of(event)
        self._here, self._versions = set[str](), json.dumps(installed_versions(), sort_keys=True)
        self._journal = Journal(folder / JOURNAL)

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._journal.close()

    @property
    def known(self) -> int:
        """Number of trials that ran, in this call and before."""
        return len(self._known)

    def ending(self, case: FaultCase, *, again: bool = False) -> Ending:
        """Return how the case ends; again: run it even if that is known, outside of the budget. Raises OutOfBudget."""
        source = script.render(case, "a trial")
        key = hashlib.sha256(f"{case.key}{source}{self._versions}".encode()).hexdigest()[:16]
        if not again and key in self._known:
            return self._known[key]
        if not again and (self.count >= self._most or time.monotonic() > self._until):
            raise OutOfBudget
        self.count += 1
        ending = self._ran(case, source, case.processes)
        self._journal.append("confirmed" if again else "trial", key=key, words=case.words, **vars(ending))
        self._known[key] = ending
        self._here.add(case.key)
        return ending

    def ran(self, case: FaultCase) -> bool:
        """Return whether the case ran in this call."""
        return case.key in self._here

    def save_model(self, case: FaultCase, folder: Path) -> None:
        """Save the random model that the case's script builds, in fp32. Raises Unsupported."""
        saving = f'def attempt():\n    build("eager", torch.float32).save_pretrained({str(folder)!r})\n    return []\n'
        ending = self._ran(case, f"{script.render(case, 'a model')}\n\n{saving}", 1)
        if ending.status != RETURNED:
            raise Unsupported(f"the model of {case.words} cannot be saved: {ending.error_class} {ending.error}")

    def _ran(self, case: FaultCase, source: str, ranks: int) -> Ending:
        kind = str((case.config or {}).get("model_type", "")).removesuffix("_text")
        request = {
            "source": source,
            "modules": [f"transformers.models.{kind}.modeling_{kind}", *["deepspeed"] * (case.engine == "deepspeed")],
            "ranks": ranks,
            "timeout_s": HANG_S if case.kind == HANG else case.timeout_s,
        }
        return Ending.of(self._answer(request))

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._host is None:
            self._host = subprocess.Popen(
                [sys.executable, "-P", "-m", "actordbg.reduce.trial_host"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "ACTORDBG_DISABLE": "1"},
            )
            self._line(START_S)
        assert self._host.stdin is not None
        self._host.stdin.write(json.dumps(request) + "\n")
        self._host.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(float(request["timeout_s"]) + START_S))
        return answer

    def _line(self, patience_s: float) -> str:
        assert self._host is not None and self._host.stdout is not None
        if select.select([self._host.stdout], [], [], patience_s)[0] and (line := self._host.stdout.readline()):
            return line
        code = self._host.poll()
        self._stop()
        raise LaunchProblem(
            f"the process that runs trials {'does not answer' if code is None else f'ended with exit code {code}'}",
            hint="run `actordbg doctor`: torch and transformers must be importable here",
        )

    def _stop(self) -> None:
        if self._host is not None:
            self._host.kill()
            self._host.wait()
            for pipe in (self._host.stdin, self._host.stdout):
                if pipe is not None:
                    pipe.close()
            self._host = None
