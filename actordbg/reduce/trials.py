"""Run trials of cases within a budget, and remember how each ended, so that a stopped reduction continues.

    with Trials(folder, most=200, seconds=300) as trials:
        trials.ending(case).status       # "returned", "raised", "died" or "hung"

`trials.jsonl` has a line for each trial: a digest of the case, its script, the installed versions and the checkpoint's files;
what was tried; its ending. A trial that is in there does not run again, except to confirm a case: what is reported ran twice in
this call, in two processes.
"""

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
from typing import Any

from msgspec import ValidationError, convert

from actordbg.actor.hub_model import versions_of
from actordbg.actor.model_code import require_consent
from actordbg.base.errors import LaunchProblem, Unsupported
from actordbg.base.owners import NOT_FROM_HERE, whose
from actordbg.config.replay_config import TINY
from actordbg.records.journal import Journal, read_events
from actordbg.reduce import script
from actordbg.reduce.case import HANG, TRAINER, FaultCase, without_paths
from actordbg.reduce.trial_host import DIED, HUNG, RAISED, RETURNED

__all__ = ["DIED", "HUNG", "RAISED", "RETURNED", "Ending", "OutOfBudget", "Trials"]
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

    @property
    def words(self) -> str:
        """Describe it without paths: "ValueError: row N of PATH", "hung"."""
        kind = self.error_class or self.status
        return f"{kind}: {without_paths(self.error)}"[:120].removesuffix(": ")


class Trials(contextlib.ExitStack):
    """Trials of one reduction. most, seconds: the budget of this call; trials of earlier calls cost nothing."""

    def __init__(self, folder: Path, *, most: int = 200, seconds: float = 300.0) -> None:
        super().__init__()
        self.count, self._most, self._until = 0, most, time.monotonic() + seconds
        self._host: subprocess.Popen[str] | None = None
        self._known: dict[str, Ending] = {}
        for event in () if whose(folder / JOURNAL) else read_events(folder / JOURNAL):  # what others' files say runs again
            with contextlib.suppress(KeyError, ValidationError):  # a damaged line is a trial that did not run
                self._known[event["key"]] = convert(event, Ending)
        self._versions: dict[str, list[tuple[str, str]]] = {}
        self._journal = Journal(folder / JOURNAL)
        self.callback(self._journal.close)

    @property
    def known(self) -> int:
        """Number of trials that ran, in this call and before."""
        return len(self._known)

    def ending(self, case: FaultCase, *, again: bool = False) -> Ending:
        """Return how the case ends; again: run it even if that is known, outside of the budget. Raises OutOfBudget."""
        source = script.render(case, "a trial")
        if case.checkpoint not in self._versions:
            require_consent(case.checkpoint or TINY)
            self._versions[case.checkpoint] = sorted(versions_of(case.checkpoint or TINY).items())
        versions = self._versions[case.checkpoint]
        key = hashlib.sha256(f"{case.key}{source}{versions}".encode()).hexdigest()[:16]
        if not again and key in self._known:
            return self._known[key]
        if not again and (self.count >= self._most or time.monotonic() > self._until):
            raise OutOfBudget
        self.count += 1
        ending = self._ran(case, source, case.processes)
        self._journal.append("confirmed" if again else "trial", key=key, words=case.words, **vars(ending))
        self._known[key] = ending
        return ending

    def save_model(self, case: FaultCase, folder: Path) -> None:
        """Save the random model that the case's script builds, in fp32. Raises Unsupported."""
        saving = f'def attempt():\n    build("eager", torch.float32).save_pretrained({str(folder)!r})\n    return []\n'
        ending = self._ran(case, f"{script.render(case, 'a model')}\n\n{saving}", 1)
        if ending.status != RETURNED:
            raise Unsupported(f"the model of {case.words} cannot be saved: {ending.error_class} {ending.error}")

    def _ran(self, case: FaultCase, source: str, ranks: int) -> Ending:
        kind = str((case.config or {}).get("model_type", "")).removesuffix("_text")
        modules = [f"transformers.models.{kind}.modeling_{kind}", *case.packages]
        if case.through == TRAINER:
            modules.append(f"{TRAINER}.models")  # what takes long of it
        request = {
            "source": source,
            "modules": modules,
            "ranks": ranks,
            "timeout_s": HANG_S if case.kind == HANG else case.timeout_s,
        }
        return convert(self._answer(request), Ending)

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._host is None:
            command = [sys.executable, "-m", "actordbg.reduce.trial_host"]
            environment = os.environ | NOT_FROM_HERE | {"OMP_NUM_THREADS": "1", "ACTORDBG_DISABLE": "1"}
            pipe, null = subprocess.PIPE, subprocess.DEVNULL
            host = subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe, stderr=null)
            self._host = self.enter_context(host)
            self.callback(host.kill)
        assert self._host.stdin is not None and self._host.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # nothing stays in a buffer that would fail once more when it is closed
            os.write(self._host.stdin.fileno(), f"{json.dumps(request)}\n".encode())
        due = select.select([self._host.stdout], [], [], START_S + float(request["timeout_s"]))[0]
        if due and (line := self._host.stdout.readline()):
            answer: dict[str, Any] = json.loads(line)
            return answer
        what = f"ended with exit code {self._host.wait()}" if due else "does not answer"
        raise LaunchProblem(
            f"the process that runs trials {what}",
            hint="run `actordbg doctor`: torch and transformers must be importable here",
        )
