"""Every call that the recorder makes fails, in turn: `python faulted_runs.py [ONLY [PART/PARTS]]`.

Each site, in one of the configurations that pass it, fails with each kind of error, once and from then on; where it is passed often,
several kinds share a run. ONLY, a regular expression, selects sites (`capture.ring:.*open`); PART/PARTS, from 0/24 to 23/24, a share of them.

Code that only runs after a failure is found when it runs, and is made to fail, too, together with the failure that led there.

Answers with lines of JSON: one for each run of which something does not hold, and a summary.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import faults
from faulted_checks import run
from faulted_training import actor_class, hasten, torch, train
from faults import Fault
from roots import MEMORY

KINDS = {
    "Exception": lambda: Exception("injected"),
    "MemoryError": MemoryError,
    "ENOSPC": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "EACCES": lambda: OSError(errno.EACCES, "Permission denied"),
    "EROFS": lambda: OSError(errno.EROFS, "Read-only file system"),
    "EMFILE": lambda: OSError(errno.EMFILE, "Too many open files"),
}

CONFIGURATIONS = {
    "plain": {},
    "everything": {
        "with_outputs": True, "with_rng": True, "triggers": ("nan", "exception", "slow:2x", "logprobs:-30:0"), "before": 2,
        "keep_bytes": 2_000, "min_seq_len": 1, "every": 2,
    },
    "no ring": {"ring": 0, "max_bytes": 6_000},
    "sampled": {"every": 3, "ring": 2, "ring_dir": "store"},
    "process": {"writer": "process"},
}  # fmt: skip
"""Switches of the dump, and whatever differs of the ring."""


@dataclass(frozen=True)
class Plan:
    """What fails in one run: at a site, these kinds of error, one after another, from its `nth` passing on."""

    configuration: str
    site: int
    kinds: tuple[str, ...]
    nth: int = 1
    lasting: bool = False
    cause: Plan | None = None

    def faults(self):
        mine = Fault(self.site, [KINDS[kind] for kind in self.kinds], self.nth, self.lasting)
        return (*self.cause.faults(), mine) if self.cause else (mine,)

    def __str__(self):
        before = f"{self.cause}; then " if self.cause else f"[{self.configuration}] "
        when = "from then on" if self.lasting else "once each"
        return f"{before}{', '.join(self.kinds)} {when} at no. {self.nth} of {faults.sites[self.site]}"


class Session:
    """All runs."""

    def __init__(self, configurations, only, part):
        self.part, self.parts = (int(number) for number in part.split("/"))
        self.only = re.compile(only)
        self.root = Path(tempfile.mkdtemp(prefix="faults-", dir=os.environ.get("FAULTS_DIR") or MEMORY))
        self.wanted = train(actor_class(), lambda on, run: None, lambda actor, *a, **k: actor(*a, **k))
        self.runs = self.injected = self.complaints = 0
        self.base = {name: self.trace(name) for name in configurations}
        gc.freeze()
        self.reached = {}
        self.unreached = []

    def trace(self, configuration):
        """Sites of the training without a fault, and how often each is passed at least."""
        found = {}
        for turn in range(3):
            answer = run(self.root, CONFIGURATIONS[configuration], self.wanted)
            if answer.complaints or answer.warnings:
                self.complain(f"[{configuration}] without a fault", answer.complaints or ["warned"])
            for site, count in answer.reached.items():
                found[site] = min(count, found.get(site, count)) if turn else count
        return found

    def all(self):
        """Every site: in each of its configurations, or in one of them."""
        began = time.monotonic()
        sites = sorted(site for site in set().union(*self.base.values()) if self.only.search(str(faults.sites[site])))
        for place, site in list(enumerate(sites))[self.part :: self.parts]:
            homes = [name for name, found in self.base.items() if site in found]
            homes = [name for name in homes if name != "process"] or homes  # a process takes its time to start
            home, frees = (
                homes[place % len(homes)],
                "release" in faults.sites[site].callee,
            )  # tried twice: its errors come one at a time
            self.each(lambda left, lasting: Plan(home, site, left[: 1 if frees and not lasting else None], 1, lasting), place)  # noqa: B023
        known = set().union(*self.base.values())
        later = sorted(site for site in self.reached if site not in known)
        first = self.runs
        for place, site in enumerate(later):
            cause = self.reached[site]
            self.each(lambda left, lasting: Plan(cause.configuration, site, left, 1, lasting, cause), place)  # noqa: B023
        print(json.dumps({
            "configurations": list(self.base), "sites": len(sites[self.part :: self.parts]), "sites_after_a_fault": later, "runs": self.runs,
            "runs_with_two_faults": self.runs - first, "errors": self.injected, "unreached": self.unreached,
            "complaints": self.complaints, "seconds": round(time.monotonic() - began, 1),
        }))  # fmt: skip
        shutil.rmtree(self.root, ignore_errors=True)

    def each(self, plan, place):
        """All kinds, the first of them by the site's place, in as few runs as the site's passings allow. Where it is passed no more after it failed, once is lasting."""
        kinds = tuple(KINDS)
        for lasting in (False, True):
            left = kinds[place % len(kinds) :] + kinds[: place % len(kinds)]
            while left:
                fault = self.one(plan(left, lasting))
                if not fault.raised:
                    break
                left = left[min(fault.raised, len(left)) :]
            if fault.passed == fault.raised == 1:
                break

    def one(self, plan):
        planned = plan.faults()
        self.runs += 1
        (self.root / "plan").write_text(f"{self.runs}: {plan}\n")  # for whoever finds the folder of runs that did not end
        if self.runs % 50 == 1:  # from here on again; it starts a thread, so not for each run
            faulthandler.dump_traceback_later(600, exit=True)
        answer = run(self.root, CONFIGURATIONS[plan.configuration], self.wanted, planned)
        self.injected += sum(fault.raised for fault in planned)
        if not planned[-1].raised:
            self.unreached.append(str(plan))
        if plan.cause is None:
            for site in answer.reached:
                self.reached.setdefault(site, plan)
        if answer.complaints:
            self.complain(str(plan), answer.complaints)
        return planned[-1]

    def complain(self, where, complaints):
        self.complaints += 1
        print(json.dumps({"fault": where, "complaints": complaints}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hasten()
    gc.freeze()
    gc.disable()
    Session(list(CONFIGURATIONS), *sys.argv[1:], *("", "0/1")[len(sys.argv) - 1 :]).all()
