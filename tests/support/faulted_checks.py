"""One run of the small training with these faults, and what does not hold of it.

What has to hold: nothing is raised into the training, and it computes bit for bit what it computes without a hook; it takes no longer than
a moment; of each kind of trouble there is one warning at most, and one at least if calls were lost; every file in the store is whole; every call
that was made while recording was on is in the books, and captured + dropped + sampled out = calls. After faults that have passed, also:
nothing is held for ever (bytes of the queue, places in the ring, descriptors), and the published counters are the books.
"""

import gc
import itertools
import json
import multiprocessing.util
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import faults
from faulted_training import Run, closed, hook, same

from actordbg.base.errors import ActordbgError
from actordbg.formats import ringfile
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.recording_reading import read_ring
from actordbg.formats.ringfile import COUNTS
from actordbg.store import payload
from actordbg.store.layout import Store

PATIENCE_S = 30.0
"""The training takes a tenth of a second, on a busy machine some seconds; what waits for the store waits for ever."""


COLLECT_EVERY = 20
"""Garbage of so many runs is collected at once; after a run that left a descriptor, at once."""
_runs = itertools.count(1)


@dataclass
class Answer:
    """What was wrong with a run, and what it showed."""

    complaints: list[str]
    captured: int
    warnings: int
    reached: dict[int, int]


def open_files():
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def run(root, limits, wanted, planned=()):
    folder = Path(tempfile.mkdtemp(dir=root))
    one = Run(folder, limits)
    if all(not fault.lasting and len(fault.errors) == 1 for fault in planned):
        one.patience = 1.0  # the next look follows the switch, whenever a busy machine gives the thread its turn
    one.prepare()
    faults.forget()
    descriptors = open_files()
    with faults.armed(*planned):
        one.go()
    reached = faults.seen()
    complaints = _complaints(one, wanted, planned)
    one.end_threads()
    found = one.recorder
    captured = sum(ledger.captured for ledger in one.ledgers)
    said = len(one.log.said)
    shutil.rmtree(folder, ignore_errors=True)
    hook._slots.clear()
    multiprocessing.util._finalizer_registry.clear()
    del one, found
    if next(_runs) % COLLECT_EVERY == 0:
        gc.collect()
    for _ in range(50):  # a thread of a busy machine may be about to close what it opened; a leak stays
        if open_files() <= descriptors:
            break
        gc.collect()
        time.sleep(0.02)
    if open_files() > descriptors and not any("close" in callee for callee in callees(planned)):
        complaints.append(f"{open_files() - descriptors} descriptors left open")
    return Answer(complaints, captured, said, reached)


def _complaints(one, wanted, planned):
    """What does not hold of a run."""
    found = []
    if one.raised is not None:
        return [f"raised into the training: {one.raised}"]
    if not same(one.computed, wanted):
        found.append("the training computed something else")
    if one.seconds > PATIENCE_S:
        found.append(f"took {one.seconds:.1f} s")
    kinds = [kind for kind, _ in one.log.said]
    if len(set(kinds)) < len(kinds):
        found.append(f"warned more than once: {one.log.said}")
    found += _files(one, planned)
    if one.recorder is not None:
        found += _books(one, one.recorder, planned)
        if all(not fault.lasting and fault.passed > fault.raised for fault in planned):
            found += _leaks(one.recorder)
            if all(len(fault.errors) == 1 for fault in planned):
                found += _published(one)  # the last ones are tried twice, not seven times
    return found


def _books(one, found, planned):
    """Every call is there, once, and so is every file."""
    complaints, strays = [], found.stray - found._strays_booked
    ledgers = one.ledgers
    dropped = sum(sum(x.dropped.values()) for x in ledgers)
    captured, rotated = sum(x.captured for x in ledgers), sum(x.rotated for x in ledgers)
    books = f"{[(x.names(), dict(zip(COUNTS, x.counts, strict=True))) for x in ledgers]}, strays {found.stray}, of these in the books {found._strays_booked}"
    if not all(map(closed, ledgers)):
        complaints.append(f"books do not balance: {books}")
    if one.booked() != one.calls:
        complaints.append(f"{one.calls} calls were made, {one.booked()} are in the books: {books}")
    if (dropped or strays) and not one.log.said and not _speechless(planned):
        complaints.append(f"calls were lost and nothing was said: {books}")
    files = sum(1 for path in one.store.rglob(f"*{SUFFIX}") if not path.name.startswith("."))
    if files != captured - rotated and not {"self.ledger.rotate", "self._add"} & callees(planned):  # that file is gone, uncounted
        complaints.append(f"{files} dump files, {captured} captured, {rotated} rotated")
    if len(planned) == 1 and not planned[0].lasting and len(planned[0].errors) == 1 and not captured:
        complaints.append(f"one error, and nothing was captured: {books}")
    return complaints


def _leaks(found):
    """Nothing is held for ever."""
    complaints, ring = [], found.ring
    if found.writer._bytes:
        complaints.append(f"{found.writer._bytes} bytes of the queue are still reserved")
    if ring is not None and ring._running:
        complaints.append(f"{len(ring._running)} calls are still running")
    if ring is not None and len(ring.arena._extents) != len(ring._recent):
        complaints.append(f"{len(ring.arena._extents)} places in the ring for {len(ring._recent)} calls")
    return complaints


def _published(one):
    """The counters files say what the books say, at last."""
    complaints = []
    for ledger in one.ledgers:
        try:
            data = json.loads(ledger.identity.counters(Store(one.store)).read_bytes())
        except OSError as error:
            complaints.append(f"no counters: {error}")
            continue
        if data["state"] != "ended" or any(data[name] != getattr(ledger, name) for name in ("calls", "captured", "pending")):
            complaints.append(f"counters say {data}")
    return complaints


def _files(one, planned):
    """Every file in the store is whole, and there are no others, unless it is removing them that failed."""
    found = []
    removing = callees(planned) & {"os.unlink", "contextlib.suppress"}
    for path in (one.store / "dumps").rglob("*"):
        if path.name.startswith("."):
            if not removing:
                found.append(f"left over: {path.name}")
        elif path.is_file():
            found += _problem(payload.load, path)
    for path in one.folder.rglob(f"*{ringfile.SUFFIX}") if not removing else ():
        found += _problem(read_ring, path)
    return found


def _problem(read, path):
    try:
        read(path)
    except ActordbgError as error:
        return [f"{path.name} cannot be read: {error.message}"]
    return []


def callees(planned):
    """What fails, as it is written in the source."""
    return {faults.sites[fault.site].callee for fault in planned}


def _speechless(planned):
    """Whether what fails is in the way of saying that something failed."""
    silent = {"warn", "fault", "describe", "scrub", "_failed", "give_up", "_lost"}
    inside = any(faults.sites[fault.site].function.startswith(("Notices.", "scrub", "describe", "_secrets")) for fault in planned)
    return inside or any(callee.rpartition(".")[2] in silent or "notices" in callee for callee in callees(planned))
