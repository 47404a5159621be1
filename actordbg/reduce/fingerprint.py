"""The fingerprint of a fault: what a smaller case has to have in common with the replay.

An error's class and text (without numbers and paths), a signal, a hang, the broken law, or the module and the cause. A trial's
ending shows a fingerprint coarsely (something differs, in these rows). Whether it is the same law or the same module is what
`actordbg check` says of the smaller case, so a reduced case is checked as any replay is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from actordbg.base.units import first_line
from actordbg.compare.comparing import tokens_outside
from actordbg.judge.check import CheckedReplay
from actordbg.locate.verdict import OPERATION, PLACES
from actordbg.records.comparison_record import MISMATCH
from actordbg.records.finding import Finding, Rule, any_layer
from actordbg.records.locate_record import is_backward
from actordbg.records.replay_record import CRASHED, HUNG, PASSED, ResultRecord, answers_of, violations
from actordbg.records.stored_record import StoredRecord
from actordbg.reduce.case import CRASH, DIFFERENCE, ERROR, GRADIENT, HANG, RERUN, FaultCase, normalized, without_paths
from actordbg.reduce.trials import DIED, HUNG as TRIAL_HUNG, RAISED, RETURNED, Ending

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
            return ending.status == (DIED if self.kind == CRASH else TRIAL_HUNG) and ending.error == self.error
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
    if result.status == HUNG:
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
