"""Run trials of cases within a budget, and remember how each ended, so that a stopped reduction continues.

    with Trials(folder, most=200, seconds=300) as trials:
        trials.ending(case).status       # "returned", "raised", "died" or "hung"

What an ending shows is a fingerprint of the fault: what a smaller case has to have in common with the replay. It is an error's
class and text (without numbers and paths), a signal, a hang, the broken law, or the module and the cause. An ending shows it
coarsely (something differs, in these rows). Whether it is the same law or the same module is what `actordbg check` says of the
smaller case, so a reduced case is checked as any replay is.

`trials.jsonl` has a line for each trial: a digest of the case, its script, the installed versions and the checkpoint's files;
what was tried; its ending. A trial that is in there does not run again, except to confirm a case: what is reported ran twice in
this call, in two processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from msgspec import ValidationError, convert

from actordbg.actor.hub_model import versions_of
from actordbg.actor.model_code import require_consent
from actordbg.base.errors import LaunchProblem, Unsupported
from actordbg.base.owners import NOT_FROM_HERE, whose
from actordbg.base.units import first_line
from actordbg.compare.comparing import tokens_outside
from actordbg.config.replay_config import TINY
from actordbg.judge.check import CheckedReplay
from actordbg.locate.rules import OPERATION, PLACES
from actordbg.records.comparison_record import MISMATCH
from actordbg.records.finding import Finding, Rule, any_layer
from actordbg.records.journal import Journal, read_events
from actordbg.records.locate_record import is_backward
from actordbg.records.replay_record import CRASHED, HUNG as HANGS, PASSED, ResultRecord, answers_of, violations
from actordbg.records.stored_record import StoredRecord
from actordbg.reduce import script
from actordbg.reduce.case import CRASH, DIFFERENCE, ERROR, GRADIENT, HANG, RERUN, TRAINER, FaultCase, normalized, without_paths
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


_KIND_OF_LAW = {"rerun": RERUN, "state": RERUN, "additivity": GRADIENT}
MARGIN = 2.0
"""A difference has to be this many times its limit: a case at the limit would not show it on another machine."""
_DIED = re.compile(r"\b(SIG[A-Z]+)\b")


@dataclass(frozen=True)
class Fingerprint(StoredRecord):
    """kind: what is watched (`case.FaultCase`). said: the cause in a sentence. behind: the first row is right, a later is wrong.

    laws: the broken laws. module: the module that is wrong, layers as N. cause: the rule that is broken there.
    """

    what: ClassVar[str] = "fingerprint"

    kind: str
    said: str
    error_class: str = ""
    error: str = ""
    laws: tuple[str, ...] = ()
    module: str = ""
    cause: str = ""
    behind: bool = False

    @property
    def finding(self) -> Finding:
        """The fault as a finding: of the first broken law, of the rule of the module, of the error."""
        rule = next(iter(self.laws), "") or self.cause or self.error_class or self.kind
        return Finding(Rule(rule), self.said, {"module": self.module} if self.module else {})

    def shown_by(self, case: FaultCase, ending: Ending) -> bool:
        """Return whether a trial of the case shows it."""
        if self.kind == ERROR:
            return ending.status == RAISED and (ending.error_class, normalized(ending.error)) == (self.error_class, self.error)
        if self.kind in (CRASH, HANG):
            return ending.status == (DIED if self.kind == CRASH else HUNG) and ending.error == self.error
        if ending.status != RETURNED:
            return False
        limit = 0.0 if self.kind == RERUN else case.limit
        wrong = [value is None or value > MARGIN * limit for value in ending.values]
        right_first = bool(ending.values) and ending.values[0] is not None and ending.values[0] <= case.limit
        return any(wrong) and (not self.behind or right_first)

    def matches(self, other: Fingerprint | None) -> bool:
        """Return whether what `check` says of a smaller case is the same: its law, or its module and cause."""
        if other is None or (self.kind, self.error_class, self.error) != (other.kind, other.error_class, other.error):
            return False
        if self.kind in (ERROR, CRASH, HANG):
            return True
        if self.laws or other.laws:
            return bool(set(self.laws) & set(other.laws))
        return (self.module, self.cause) == (other.module, other.cause)


def fingerprint_of(check: CheckedReplay) -> Fingerprint | None:
    """Read the fingerprint off a check; None if nothing is wrong."""
    results = check.data.results
    failed = next((result for result in results if result.status != PASSED), None)
    if failed is not None:
        return _of_failure(failed)
    where = _of_place(check)
    broken = [answer for result in results for answer in violations(answers_of(result.extra))]
    if broken:
        first, behind = broken[0], any(answer.row for answer in broken if answer.law == "neighbour")
        said = f"{first.words} in {where.module}" if where and where.module else first.words
        laws = tuple(dict.fromkeys(answer.law for answer in broken))
        found = where or Fingerprint(DIFFERENCE, said)
        return replace(found, kind=_KIND_OF_LAW.get(first.law, DIFFERENCE), said=said, laws=laws, behind=behind)
    if where is not None:
        return where
    if check.comparison is not None and check.comparison.verdict == MISMATCH:
        wrong = [dump for dump in check.comparison.dumps if dump.verdict == MISMATCH]
        parameter = next((dump.worst_parameter for dump in wrong if dump.worst_parameter), "")
        if parameter and not any(tokens_outside(dump, check.comparison.thresholds) for dump in wrong):
            return Fingerprint(GRADIENT, f"the gradient of {any_layer(parameter)} is not the truth's")
        furthest = check.comparison.furthest
        size = f" by up to {furthest[0]:.3g} nats" if furthest else ""
        return Fingerprint(DIFFERENCE, f"log-probs differ from the truth{size}")
    return None


def _of_failure(result: ResultRecord) -> Fingerprint:
    text = result.error or ""
    if result.status == HANGS:
        where = re.sub(r" since [^;:]*", "", first_line(text)).partition(": ")[0]
        where = where or "no progress"
        return Fingerprint(HANG, f"it hangs: {where}")
    if result.status == CRASHED:
        if signal := _DIED.search(text):
            return Fingerprint(CRASH, f"the process dies by {signal[1]}", error=signal[1])
        return Fingerprint(CRASH, "the process dies")
    name = (result.error_class or "Exception").rpartition(".")[2]
    return Fingerprint(ERROR, f"{name}: {without_paths(text)}"[:160], error_class=name, error=normalized(text))


def _of_place(check: CheckedReplay) -> Fingerprint | None:
    """Return module and cause as `locate` names them; None if no place is wrong."""
    found = check.local.found if check.local else []
    first = next((finding for finding in found if finding.rule != OPERATION), None)  # a smaller case may not show which it is
    if first is None:
        return None
    rule, _, module = first.key
    kind = GRADIENT if first.rule in _OF_GRADIENTS else DIFFERENCE
    return Fingerprint(kind, first.said, module=module, cause=rule)


_OF_GRADIENTS = [rule for kind, rule in PLACES.items() if is_backward(kind)]
