"""A small training, run again and again with one call of the recorder failing: `python faulted_training.py MODE [ONLY]`.

Each run makes a store and an Actor class, installs the hook as the trailer does, trains (dropout, log-prob passes, backward passes,
optimizer steps, a forward that raises, the switch turned off and on again under another run's name), ends as a process ends, and is
compared with the same training without any hook. What has to hold is in `_complaints`.

MODE is `quick` (each site, in one of the configurations that pass it, fails with each kind of error, once and from then on; where it
is passed often, several kinds share a run) or `all` (in each configuration, every kind of error in a run of its own: once, at the first
and at the last passing, and from the first one on). ONLY, a regular expression, selects sites (`capture.ring:.*open`). Answers with lines of JSON: one for each complaint, and a summary.

Faults of the second order: code that only runs after a failure is found when it runs, and is made to fail, too, together with
the failure that led there.
"""

from __future__ import annotations

import errno
import faulthandler
import functools
import gc
import importlib.metadata
import json
import logging
import multiprocessing.util
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
from faults import Fault

faults.instrument("actordbg")

import torch  # noqa: E402

from actordbg import payload, ringfile  # noqa: E402
from actordbg.capture import binding, guard, hook, recorder, rotation, verdicts, watch, writer  # noqa: E402
from actordbg.capture.control import Control  # noqa: E402
from actordbg.capture.ledger import Ledger  # noqa: E402
from actordbg.store import Store  # noqa: E402

KINDS: dict[str, Callable[[], Exception]] = {
    "Exception": lambda: Exception("injected"),
    "MemoryError": MemoryError,
    "ENOSPC": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "EACCES": lambda: OSError(errno.EACCES, "Permission denied"),
    "EROFS": lambda: OSError(errno.EROFS, "Read-only file system"),
    "EMFILE": lambda: OSError(errno.EMFILE, "Too many open files"),
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "with_outputs": True, "with_rng": True, "triggers": ("nan", "exception", "slow:2x", "logprobs:-30:0"), "before": 2,
        "keep_bytes": 2_000, "max_seq_len": 4_000, "every": 2,
    },
    "no ring": {"ring": 0, "max_bytes": 6_000},
    "sampled": {"every": 3, "ring": 2, "ring_dir": "store"},
}  # fmt: skip
"""Switches of the dump, and whatever differs of the ring."""


def hasten() -> None:
    """The recorder's clock runs a few hundred times faster, so that a run takes milliseconds and passes every periodic task."""
    watch.POLL_SECONDS, watch.FIRST_SECONDS = 0.001, 0.05
    writer.LOOK_SECONDS, writer.IDLE_SECONDS, writer.PUBLISH_SECONDS = 0.001, 0.001, 0.002
    writer.HEARTBEAT_SECONDS, writer._FLOOR_SECONDS, rotation.COUNT_SECONDS = 0.004, 0.001, 0.001
    verdicts.MEDIAN_FROM = 2
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # type: ignore[assignment]
    sys.setswitchinterval(0.05)  # threads change hands where they wait, not anywhere


# --- the training ---------------------------------------------------------------------------------------------------------


class Broken(ValueError):
    """What the training's own forward raises."""


def actor_class() -> type:
    """A new Actor class: a real model with dropout."""

    class Actor(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 64))

        def forward(
            self, sequences, action_mask=None, attention_mask=None, return_output=False, mood="good", sizes=None
        ):
            if mood == "broken":
                raise Broken("CUDA out of memory, they say")
            log_probs = torch.log_softmax(self.model(sequences % 64), dim=-1)
            picked = log_probs.gather(-1, (sequences % 64)[..., None]).squeeze(-1)[:, 1:]
            if mood == "nan":
                picked = picked * float("nan")
            if mood == "slow":
                time.sleep(0.003)
            return picked * 100 if mood == "far" else picked

    return Actor


def train(cls: type, switch: Callable[[bool, str], None], call: Callable[..., Any]) -> list[Any]:
    """All that a training computes: outputs, gradients, weights, random states. `call` calls the actor; `switch` flips the switch."""
    torch.manual_seed(7)
    actor = cls()
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    ids = torch.arange(6 * 40).view(6, 40) * 7919 % 50_000
    mask = torch.ones(2, 12, dtype=torch.int64)
    seen: list[Any] = []

    def look(rows: torch.Tensor, **more: Any) -> None:
        with torch.no_grad():
            seen.append(call(actor, rows, **more))

    def learn(rows: torch.Tensor, **more: Any) -> None:
        optimizer.zero_grad()
        output = call(actor, rows, **more)
        output.square().mean().backward()
        seen.extend([output.detach(), *(p.grad.clone() for p in actor.parameters())])
        optimizer.step()

    look(ids[:2, :12], attention_mask=mask, action_mask=mask[:, 1:].bool())
    learn(ids[:3, :20].contiguous(), return_output=False, mood="far")
    look(ids[:2, :14], sizes=[3, {"a": 1.5}], mood="slow")
    look(ids[:2, :14], mood="nan")
    try:
        look(ids[:2, :12], mood="broken")
    except Broken as error:
        seen.append(str(error))
    switch(False, "r")
    look(ids[:1, :9])
    switch(True, "r2")
    for _ in range(3):
        look(ids[:2, :12].contiguous(), attention_mask=mask)
    learn(ids[:3, :20])
    look(ids[:2, :30], attention_mask=torch.ones(2, 30)[:1].expand(2, 30))
    return [*seen, *(p.detach().clone() for p in actor.parameters()), torch.get_rng_state()]


def same(left: list[Any], right: list[Any]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if isinstance(a, torch.Tensor)
        else a == b
        for a, b in zip(left, right, strict=True)
    )


# --- one run --------------------------------------------------------------------------------------------------------------


class Log(logging.Handler):
    """What the recorder says. Guarantees: keeps every warning, with the kind of trouble that it is about."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []
        self._about = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((getattr(self._about, "kind", ""), record.getMessage()))

    def listen(self, notices: guard.Notices) -> None:
        warn = notices.warn

        def noted(kind: str, message: str) -> None:
            self._about.kind = kind
            warn(kind, message)

        notices.warn = noted  # type: ignore[method-assign]


@dataclass
class Run:
    """One training with a recorder, and all that is known of it afterwards."""

    folder: Path
    limits: dict[str, Any]
    log: Log = field(default_factory=Log)
    calls: int = 0
    computed: list[Any] = field(default_factory=list)
    raised: str | None = None
    written: bool = True
    seconds: float = 0.0

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def recorder(self) -> recorder.Recorder | None:
        return next((slot.recorder for slot in hook._slots.values()), None)

    def prepare(self) -> None:
        self.store.mkdir()
        binding._PLAIN_DTYPES.clear()
        (self.store / "FORMAT").write_text('{"format": 1}\n')
        os.environ["ACTORDBG_RING_DIR"] = str(self.folder / "rings")
        self._generation = 0
        self._texts = {
            (on, run): Control(
                on, run, "2026-11-20T12:00:00.000000Z", number, free_floor_bytes=0, **self.limits
            ).to_json()
            for number, (on, run) in enumerate([(True, "r"), (False, "r"), (True, "r2")], 1)
        }

    def write_switch(self, on: bool, run: str) -> None:
        self._generation += 1
        temporary = self.store / "control.new"
        temporary.write_text(self._texts[on, run])
        temporary.replace(self.store / "control.json")

    def switch(self, on: bool, run: str) -> None:
        """Flip the switch, and wait for a while until the recorder has seen it; it may be too broken for that."""
        self.write_switch(on, run)
        until = time.monotonic() + 0.02
        while time.monotonic() < until and not self._follows(on):
            time.sleep(0.001)

    def call(self, actor: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the actor; counts it, if it is made while recording is on."""
        found = self.recorder
        if found is None:
            return actor(*args, **kwargs)
        (slot,) = hook._slots.values()
        arrives = slot.enter == slot._arrive
        on = slot.enter is not None and not arrives and found.control is not None and found.ring is not None
        before = self.booked()
        try:
            return actor(*args, **kwargs)
        finally:
            if arrives:
                on = self.booked() > before
            self.calls += on

    def booked(self) -> int:
        """Calls in the books."""
        found = self.recorder
        return (
            0
            if found is None
            else found.stray - found._strays_booked + sum(ledger.calls for ledger in found.writer._ledgers)
        )

    def go(self) -> None:
        logger = logging.getLogger("actordbg")
        logger.addHandler(self.log)
        hook._slots.clear()
        cls = actor_class()
        began = time.monotonic()
        try:
            self._install(cls)
            self.computed = train(cls, self.switch, self.call)
            time.sleep(0.006)
            hook._at_exit()
            self._settle()
        except Exception as error:
            self.raised = f"{type(error).__name__}: {error}"
        finally:
            self.seconds = time.monotonic() - began
            logger.removeHandler(self.log)

    def _install(self, cls: type) -> None:
        self.write_switch(True, "r")
        try:
            hook.install(cls, store=str(self.store))
            for slot in hook._slots.values():
                self.log.listen(slot.recorder.notices)
        except Exception:  # as the trailer does
            hook._slots.clear()

    def _settle(self) -> None:
        """Let the threads end. One that could not be told to (the fault is in telling it) goes on until its process is gone."""
        found = self.recorder
        threads = [t for t in (found.watch._thread, found.writer._thread) if t is not None] if found is not None else []
        until = time.monotonic() + 1
        while found is not None and time.monotonic() < until and not all(map(closed, found.writer._ledgers)):
            time.sleep(0.001)
        for thread in threads:
            thread.join(0.05 if thread.is_alive() else None)

    def end_threads(self) -> None:
        """Now that nothing fails any more: threads of this run must not be there in the next one."""
        hook._at_exit()
        found = self.recorder
        for thread in (found.watch._thread, found.writer._thread) if found is not None else ():
            if thread is not None:
                thread.join(5)
                assert not thread.is_alive()

    def _follows(self, on: bool) -> bool:
        found = self.recorder
        control = found.control if found is not None else None
        return control is None if not on else control is not None and control.run == "r2"


def closed(ledger: Ledger) -> bool:
    """Whether nothing is pending; asks nothing that could be failing now."""
    return ledger.calls == ledger.captured + ledger.faulted + sum(ledger.dropped.values()) + sum(
        ledger.sampled_out.values()
    )


@dataclass
class Answer:
    """What was wrong with a run, and what it showed."""

    complaints: list[str]
    captured: int
    warnings: int
    reached: dict[int, int]


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def run(root: Path, limits: dict[str, Any], wanted: list[Any], planned: tuple[Fault, ...] = ()) -> Answer:
    folder = Path(tempfile.mkdtemp(dir=root))
    one = Run(folder, limits)
    one.prepare()
    faults.forget()
    descriptors = open_files()
    with faults.armed(*planned):
        one.go()
    reached = faults.seen()
    complaints = _complaints(one, wanted, planned, reached)
    one.end_threads()
    found = one.recorder
    captured = sum(ledger.captured for ledger in found.writer._ledgers) if found is not None else 0
    said = len(one.log.said)
    shutil.rmtree(folder, ignore_errors=True)
    hook._slots.clear()
    multiprocessing.util._finalizer_registry.clear()
    del one, found
    gc.collect()
    if open_files() > descriptors and not any("close" in faults.sites[fault.site].callee for fault in planned):
        complaints.append(f"{open_files() - descriptors} descriptors left open")
    return Answer(complaints, captured, said, reached)


def _complaints(one: Run, wanted: list[Any], planned: tuple[Fault, ...], reached: dict[int, int]) -> list[str]:
    """What does not hold of a run."""
    found: list[str] = []
    if one.raised is not None:
        return [f"raised into the training: {one.raised}"]
    if not same(one.computed, wanted):
        found.append("the training computed something else")
    if one.seconds > 3:
        found.append(f"took {one.seconds:.1f} s")
    kinds = [kind for kind, _ in one.log.said]
    if len(set(kinds)) < len(kinds):
        found.append(f"warnings: {one.log.said}")
    found += _files(one, planned)
    if one.recorder is not None:
        found += _books(one, one.recorder, planned)
    return found


def _books(one: Run, found: recorder.Recorder, planned: tuple[Fault, ...]) -> list[str]:
    ledgers, complaints = found.writer._ledgers, []
    rows = [
        (x.calls, x.captured, sum(x.dropped.values()) + x.faulted, sum(x.sampled_out.values()), x.pending)
        for x in ledgers
    ]
    if any(pending or captured + dropped + out != calls for calls, captured, dropped, out, pending in rows):
        complaints.append(f"books do not balance (calls, captured, dropped, sampled out, pending): {rows}")
    if one.booked() != one.calls:
        complaints.append(
            f"{one.calls} calls were made, {one.booked()} are in the books: {rows}, {found.stray} strays, {found._strays_booked} of them in the books"
        )
    lost = any(dropped for _, _, dropped, _, _ in rows) or found.stray
    if lost and not one.log.said and not _speechless(planned):
        complaints.append(f"calls were lost and nothing was said: {rows}, {[dict(x.dropped) for x in ledgers]}")
    files = sum(1 for path in one.store.rglob(f"*{payload.dumpfile.SUFFIX}") if not path.name.startswith("."))
    captured = sum(x.captured for x in ledgers)
    uncounted = any(
        faults.sites[fault.site].callee == "self.ledger.rotate" for fault in planned
    )  # the file is gone, then
    if files != captured - sum(x.rotated for x in ledgers) and not uncounted:
        complaints.append(f"{files} dump files, {captured} captured, {sum(x.rotated for x in ledgers)} rotated")
    once = all(not fault.lasting and len(fault.errors) == 1 for fault in planned)
    if found.writer._bytes or (found.ring is not None and found.ring.running):
        if once:
            complaints.append(
                f"leaks: {found.writer._bytes} bytes reserved, running: {found.ring and len(found.ring.running)}"
            )
    places = [] if found.ring is None else found.ring.arena._offsets
    if once and found.ring is not None and len(places) != len(found.ring._recent):
        complaints.append(f"leaks: {len(places)} places in the ring, for {len(found.ring._recent)} calls")
    if once and len(planned) == 1:
        if not captured:
            complaints.append(f"one fault, and nothing was captured: {rows}")
        complaints += _published(one, found)
    return complaints


def _published(one: Run, found: recorder.Recorder) -> list[str]:
    """One fault only: the counters files say what the books say, at last."""
    complaints = []
    for ledger in found.writer._ledgers:
        try:
            data = json.loads(ledger.path(Store(one.store)).read_bytes())
        except OSError as error:
            complaints.append(f"no counters: {error}")
            continue
        if (data["calls"], data["captured"], data["pending"], data["state"]) != (
            ledger.calls,
            ledger.captured,
            0,
            "ended",
        ):
            complaints.append(f"counters say {data}")
    return complaints


def _speechless(planned: tuple[Fault, ...]) -> bool:
    """Whether the fault is in the way of saying so."""
    return any(faults.sites[fault.site].module.endswith(("guard", "scrub")) or "notices" in faults.sites[fault.site].callee
               or faults.sites[fault.site].callee.rpartition(".")[2] in ("warn", "fault", "_failed", "give_up", "describe", "_lost", "scrub") for fault in planned)  # fmt: skip


def _files(one: Run, planned: tuple[Fault, ...]) -> list[str]:
    """Every file in the store is whole, and there are no others."""
    found: list[str] = []
    removing = any(faults.sites[fault.site].callee in ("os.unlink", "contextlib.suppress") for fault in planned)
    for path in (one.store / "dumps").rglob("*"):
        if path.is_dir():
            continue
        if path.name.startswith("."):
            if not removing:
                found.append(f"left over: {path.name}")
            continue
        try:
            payload.load(path)
        except Exception as error:
            found.append(f"{path.name} cannot be read: {error}")
    for path in one.folder.rglob(f"*{ringfile.SUFFIX}") if not removing else ():
        try:
            ringfile.read_ring(path)
        except Exception as error:
            found.append(f"{path.name} cannot be read: {error}")
    return found


# --- all runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What fails in one run: at a site, these kinds of error, one after another, from its `nth` passing on."""

    configuration: str
    site: int
    kinds: tuple[str, ...]
    nth: int = 1
    lasting: bool = False
    cause: Plan | None = None

    def faults(self) -> tuple[Fault, ...]:
        mine = Fault(self.site, [KINDS[kind] for kind in self.kinds], self.nth, self.lasting)
        return (*self.cause.faults(), mine) if self.cause else (mine,)

    def __str__(self) -> str:
        before = f"{self.cause}; then " if self.cause else f"[{self.configuration}] "
        when = "from then on" if self.lasting else "once each"
        return f"{before}{', '.join(self.kinds)} {when} at no. {self.nth} of {faults.sites[self.site]}"


class Session:
    """All runs."""

    def __init__(self, configurations: list[str], everywhere: bool, only: str) -> None:
        self.only = re.compile(only)
        self.everywhere = everywhere
        self.root = Path(tempfile.mkdtemp(prefix="faults-", dir=os.environ.get("FAULTS_DIR") or _memory()))
        self.wanted = train(actor_class(), lambda on, run: None, lambda actor, *a, **k: actor(*a, **k))
        self.runs = self.injected = self.complaints = 0
        self.base = {name: self.trace(name) for name in configurations}
        gc.freeze()
        self.reached: dict[int, Plan] = {}
        self.unreached: list[str] = []

    def trace(self, configuration: str) -> dict[int, int]:
        """Sites of the training without a fault, and how often each is passed at least."""
        found: dict[int, int] = {}
        for turn in range(3):
            answer = run(self.root, CONFIGURATIONS[configuration], self.wanted)
            if answer.complaints or answer.warnings:
                self.complain(f"[{configuration}] without a fault", answer.complaints or ["warned"])
            for site, count in answer.reached.items():
                found[site] = min(count, found.get(site, count)) if turn else count
        return found

    def all(self) -> None:
        """Every site: in each of its configurations, or in one of them."""
        began = time.monotonic()
        sites = sorted(site for site in set().union(*self.base.values()) if self.only.search(str(faults.sites[site])))
        for place, site in enumerate(sites):
            homes = [name for name, found in self.base.items() if site in found]
            for home in homes if self.everywhere else [homes[place % len(homes)]]:
                self.first_order(home, site, place)
        known = set().union(*self.base.values())
        later = sorted(site for site in self.reached if site not in known)
        first = self.runs
        for place, site in enumerate(later):
            self.second_order(site, place)
        print(json.dumps({
            "configurations": list(self.base), "sites": len(sites), "sites_after_a_fault": len(later), "runs": self.runs,
            "runs_with_two_faults": self.runs - first, "errors": self.injected, "unreached": self.unreached,
            "complaints": self.complaints, "seconds": round(time.monotonic() - began, 1),
        }))  # fmt: skip
        shutil.rmtree(self.root, ignore_errors=True)

    def first_order(self, home: str, site: int, place: int) -> None:
        count, kinds = self.base[home][site], tuple(KINDS)
        if self.everywhere:
            for nth, lasting in {(1, False), (count, False), (1, True)}:
                for kind in kinds:
                    self.one(Plan(home, site, (kind,), nth, lasting))
            return
        start = place % len(kinds)
        kinds = kinds[start:] + kinds[:start]
        self.each(lambda left, lasting: Plan(home, site, left, 1, lasting), kinds)

    def second_order(self, site: int, place: int) -> None:
        cause, kinds = self.reached[site], tuple(KINDS)
        if self.everywhere:
            for kind in kinds:
                for lasting in (False, True):
                    self.one(Plan(cause.configuration, site, (kind,), 1, lasting, cause))
            return
        start = place % len(kinds)
        kinds = kinds[start:] + kinds[:start]
        self.each(lambda left, lasting: Plan(cause.configuration, site, left, 1, lasting, cause), kinds)

    def each(self, plan: Callable[[tuple[str, ...], bool], Plan], kinds: tuple[str, ...]) -> None:
        """All kinds, in as few runs as the site's passings allow. Where it is passed no more after it failed, once is lasting."""
        for lasting in (False, True):
            left = kinds
            while left:
                fault = self.one(plan(left, lasting))
                if not fault.raised:
                    break
                left = left[min(fault.raised, len(left)) :]
            if fault.passed == fault.raised == 1:
                break

    def one(self, plan: Plan) -> Fault:
        planned = plan.faults()
        self.runs += 1
        faulthandler.dump_traceback_later(30, exit=True)
        answer = run(self.root, CONFIGURATIONS[plan.configuration], self.wanted, planned)
        faulthandler.cancel_dump_traceback_later()
        self.injected += sum(fault.raised for fault in planned)
        if not planned[-1].raised:
            self.unreached.append(str(plan))
        if plan.cause is None and len(plan.kinds) >= 1:
            for site in answer.reached:
                self.reached.setdefault(site, plan)
        if answer.complaints:
            self.complain(str(plan), answer.complaints)
        return planned[-1]

    def complain(self, where: str, complaints: list[str]) -> None:
        self.complaints += 1
        print(json.dumps({"fault": where, "complaints": complaints}), flush=True)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    hasten()
    gc.freeze()
    gc.disable()
    Session(list(CONFIGURATIONS), sys.argv[1] == "all", sys.argv[2] if len(sys.argv) > 2 else "").all()
