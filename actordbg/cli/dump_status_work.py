"""The work of `actordbg dump status`: collect the switch, each process and each flight recorder file, and print them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump, StoreProblem
from actordbg.capture.control import Control
from actordbg.capture.switch_file import read_control
from actordbg.cli.capture_options import limits_in_words
from actordbg.cli.output import human_bytes, note, plural, say, say_next, say_wrapped, table
from actordbg.dumps.recover import find_rings
from actordbg.formats.record_reading import parse_timestamp
from actordbg.formats.recording_reading import Books, RingFile, read_ring
from actordbg.formats.ringfile import IN_FLIGHT
from actordbg.records.run_files import read_counters
from actordbg.store.layout import Store

LONG_CALL_SECONDS = 60.0
"""A call in flight for longer gets a line."""
FULL_BYTES = 2**14
"""With less free space than this, a process cannot write its counters file."""
AHEAD_SECONDS = 10.0
"""Ranks that made more calls than others, and have been in a call for this long, are waiting for the others."""
STALE_SECONDS = 30.0
"""A process that has not published for this long, and did not report its end, counts as lost."""
Facts = dict[str, Any]
"""A status, the counters of a process, or a ring, as plain data."""


@dataclass
class ProcessRow:
    """A recording actor in a process. `state`: on, off, ended, killed or lost. `age_s`: seconds since it published its counters.

    `triggered_by` counts captured calls by trigger, `rotated` dumps that were removed for newer ones. `ring`: path of the flight
    recorder file. `in_flight_s`: age of its oldest running call. `writer`: "thread" or "process", or "thread: " and why the
    writer process does not write.
    """

    run: str
    rank: int
    role: str | None
    host: str
    pid: int
    instance: str
    state: str
    calls: int
    captured: int
    dropped: int
    sampled_out: int
    pending: int
    bytes: int
    queue_bytes: int
    age_s: float
    since: str
    last_error: str | None
    dropped_by: dict[str, int]
    sampled_out_by: dict[str, int]
    triggered_by: dict[str, int] = field(default_factory=dict)
    rotated: int = 0
    rotated_bytes: int = 0
    outputs_dropped: int = 0
    ring: str | None = None
    in_flight_s: float | None = None
    writer: str = "thread"


def status_of(store: Store, everything: bool) -> Facts:
    """Return a store's recording state: the current run and others that still record, or, with `everything`, every run.

    `earlier`: how many processes are left out. `total` sums the others; `unreadable` counts skipped counters files. `jobs`:
    switches of single jobs that are on. `rings`: flight recorder files on this machine. `damaged_switches`: why each unreadable
    switch is unreadable.
    """
    controls: list[Control | None] = []
    damaged = []
    for name in (None, *store.job_names()):
        try:
            controls.append(read_control(store, name))
        except StoreProblem as error:  # a job reads it as off
            damaged.append(error.message)
            controls.append(None)
    control, jobs = controls[0], [job for job in controls[1:] if job is not None and job.enabled]
    rows, unreadable = process_rows(store, datetime.now(timezone.utc))
    known = len(rows)
    if not everything and (control is not None or jobs):
        switches = [switch for switch in (control, *jobs) if switch is not None]
        current, since = {switch.run for switch in switches}, min(switch.since for switch in switches)
        # a job whose run has a name of its own (ACTORDBG_RUN) follows the switch as well: it reported since
        rows = [row for row in rows if row.run in current or row.since >= since or row.state == "on" or row.pending]
    return {
        "store": str(store.root),
        "enabled": control is not None and control.enabled,
        "control": asdict(control) if control else None,
        "processes": rows,
        "total": total_of(rows),
        "earlier": known - len(rows),
        "unreadable": unreadable,
        "jobs": [asdict(job) for job in jobs],
        "rings": list(map(_ring_row, find_rings(store))),
        "damaged_switches": damaged,
    }


def _ring_row(path: Path) -> Facts:
    """Describe a ring file on this machine: the calls in it, and those that were running."""
    row = {"path": str(path), "pid": 0, "alive": False, "inputs": 0, "in_flight": 0, "problem": None}
    try:
        ring = read_ring(path)
    except StoreProblem as error:
        return row | {"problem": error.message}
    flying = sum(slot.state == IN_FLIGHT for slot in ring.slots)
    return row | {"pid": int(ring.facts.get("pid", 0)), "alive": ring.alive, "inputs": len(ring.slots), "in_flight": flying}


def process_rows(store: Store, now: datetime) -> tuple[list[ProcessRow], int]:
    """Return the store's recording actors, sorted by run, rank and host, and the number of unreadable counters files."""
    known, unreadable = {}, 0
    for path in sorted(store.counters.glob("*/[!.]*.json")):
        try:
            data = read_counters(path)
            known[who(data)] = data
        except CorruptDump:
            unreadable += 1
    for path in find_rings(store):
        with contextlib.suppress(StoreProblem):
            ring = read_ring(path)
            for books in ring.books.values():
                actor = who(books.identity)
                known[actor] = _newest(known.get(actor), ring, books)
    rows = [_row(data, now) for data in known.values()]
    return sorted(rows, key=lambda row: (row.run, row.rank, row.role or "", row.host, row.pid, row.instance)), unreadable


def who(data: Facts) -> tuple[Any, ...]:
    """Return the key that identifies a recording actor."""
    return tuple(data[name] for name in ("run", "rank", "host", "pid", "instance"))


def _newest(known: Facts | None, ring: RingFile, books: Books) -> Facts:
    """Merge an actor's counters file with its counters in a ring file. Both only grow, so the larger is newer."""
    state = ring.state_of(books)
    counted = books.as_counters() | {"ring": {"path": str(ring.path)}, "heartbeat": books.identity["since"], "queue_bytes": 0}
    if known is None:
        return counted | {"state": state}
    if not ring.alive and known["state"] in ("on", "off"):
        known = known | {"state": state}
    of_ring, of_file = ((data["calls"], data["calls"] - data["pending"]) for data in (counted, known))
    if of_ring <= of_file:
        return known
    kept = {name: known[name] for name in ("heartbeat", "queue_bytes", "ring", "role") if known.get(name) is not None}
    return known | counted | kept


def total_of(rows: list[ProcessRow]) -> dict[str, int]:
    """Sum the counts of all rows."""
    names = ("calls", "captured", "dropped", "sampled_out", "pending", "bytes")
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def totals_in_words(total: dict[str, int]) -> str:
    """Return `42 calls = 42 captured + 0 dropped + 0 sampled out`, plus the calls in the ring if there are any."""
    in_ring = f" + {total['pending']:,} in ring" if total["pending"] else ""
    return (
        f"{total['calls']:,} calls = {total['captured']:,} captured + {total['dropped']:,} dropped"
        f" + {total['sampled_out']:,} sampled out{in_ring}"
    )


def _row(data: Facts, now: datetime) -> ProcessRow:
    age = (now - parse_timestamp(data["heartbeat"])).total_seconds()
    ring, state = data.get("ring") or {}, data["state"]
    counted = {name: data[name] for name in ProcessRow.__dataclass_fields__ if name in data}
    derived = {
        "state": "lost" if state == "on" and age > STALE_SECONDS else state,
        "age_s": round(max(age, 0.0), 1),
        "triggered_by": data.get("triggered") or {},
        "ring": ring.get("path"),
        "in_flight_s": ring.get("in_flight_s"),
    }
    for name in ("dropped", "sampled_out"):
        derived |= {name: sum(data[name].values()), f"{name}_by": data[name]}
    return ProcessRow(**{"role": None, "last_error": None} | counted | derived)


def say_status(answer: Facts) -> None:
    if answer["control"] is None and not answer["jobs"]:
        never = "" if answer["processes"] or answer["damaged_switches"] else ": it was never on"
        say(f"Recording is off{never} in {answer['store']}")
        recorded = answer["earlier"] or any(row.captured for row in answer["processes"])
        say_next("actordbg lint" if recorded else "actordbg dump enable")
    if answer["control"] is not None:
        state = "on" if answer["enabled"] else "off"
        say(f"Recording is {state}: run {answer['control']['run']}, since {answer['control']['since']}")
        say_wrapped(f"  {limits_in_words(answer['control'])}", "    ")
    for job in answer["jobs"]:
        say(f"Recording is on for the job {job['run']} only, since {job['since']}")
        say_wrapped(f"  {limits_in_words(job)}", "    ")
    if answer["processes"]:
        _say_processes(answer)
    else:
        on, earlier = answer["enabled"] or answer["jobs"], answer["earlier"]
        if earlier:
            say(f"No process of this run has reported; --all shows {plural(earlier, 'recording actor')} of earlier runs.")
        else:
            say("No process has reported yet: start the job." if on else "No process has reported.")
        if on and shutil.disk_usage(answer["store"]).free < FULL_BYTES:
            note("the store's disk is full, so processes cannot report lost calls: free space with `actordbg dump prune`")
    _say_rings(answer["rings"])
    for problem in answer["damaged_switches"]:
        note(f"unreadable switch, treated as off: {problem}")
    if answer["unreadable"]:
        note(f"{plural(answer['unreadable'], 'counters file')} could not be read")


def _say_processes(answer: Facts) -> None:
    say()
    rows, total = answer["processes"], answer["total"]
    names = ("rank", "role", "state", "calls", "captured", "dropped", "sampled", "in ring", "size", "since")
    cells = [
        (row.rank, row.role, row.state, row.calls, row.captured, row.dropped, row.sampled_out, row.pending,
         human_bytes(row.bytes), row.since[11:19])
        for row in rows
    ]  # fmt: skip
    table(names, cells, tight=True)
    say(f"{plural(len(rows), 'recording actor')}: {totals_in_words(total)}")
    say(f"{human_bytes(total['bytes'])} written; counted {min(row.age_s for row in rows):.0f} s ago")
    for line in (*(line for row in rows for line in trouble_of(row)), *ranks_apart(rows)):
        say(line)


def ranks_apart(rows: list[ProcessRow]) -> Iterator[str]:
    """Yield a line per run and role whose ranks made unequal numbers of calls: some wait in a call that others never made."""
    live = [row for row in rows if row.state == "on" and row.calls]
    for run, role in sorted({(row.run, row.role) for row in live}, key=str):
        counts = {row.rank: row for row in live if (row.run, row.role) == (run, role)}
        most, least = (pick(row.calls for row in counts.values()) for pick in (max, min))
        ahead = {row.calls == most for row in counts.values() if row.in_flight_s is not None}
        waits = min((row.in_flight_s + row.age_s for row in counts.values() if row.in_flight_s is not None), default=0.0)
        if most == least or ahead != {True} or waits < AHEAD_SECONDS:
            continue
        phrases = []
        for calls in sorted({row.calls for row in counts.values()}):
            ranks = [str(rank) for rank, row in sorted(counts.items()) if row.calls == calls]
            who = "rank" if len(ranks) == 1 else "ranks"
            phrases.append(f"{who} {', '.join(ranks)} made {calls:,} calls")
        yield f"unequal numbers of calls in run {run}: {'; '.join(phrases)}, and has waited in its last one for {waits:.0f} s"


def _say_rings(rings: list[Facts]) -> None:
    dead = [ring for ring in rings if not ring["alive"]]
    for ring in dead:
        flying = f", {ring['in_flight']} in flight" if ring["in_flight"] else ""
        what = ring["problem"] or f"flight recorder of a dead process: {plural(ring['inputs'], 'input')}{flying}"
        say(f"pid {ring['pid']}: {what} ({ring['path']})" if ring["pid"] else f"{Path(ring['path']).name}: {what}")
    if dead:
        say_next("actordbg dump recover")


def trouble_of(row: ProcessRow) -> Iterator[str]:
    """Yield sentences about a recording actor that a user should know: lost calls, unwritten calls, errors, triggers."""
    role = row.role or "actor"
    name = f"rank {row.rank} {role} ({row.host}, pid {row.pid})"
    if row.dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(row.dropped_by.items()))
        yield f"{name} dropped: {reasons}" + (f"; last: {row.last_error}" if row.last_error else "")
    if row.pending and row.state in ("ended", "killed"):
        calls = "1 call is" if row.pending == 1 else f"{row.pending:,} calls are"
        yield f"{calls} still in the ring of pid {row.pid}: run `actordbg dump recover` on {row.host}"
    elif row.pending:
        yield f"{name} has {plural(row.pending, 'call')} in its ring to write, {human_bytes(row.queue_bytes)} in its process"
    elif row.last_error and not row.dropped:
        yield f"{name} last error: {row.last_error}" if row.calls else f"{name} recorded nothing: {row.last_error}"
    if row.triggered_by:
        kept = ", ".join(f"{trigger} {count}" for trigger, count in sorted(row.triggered_by.items()))
        yield f"{name} kept by triggers: {kept}"
    if row.rotated:
        yield f"{name} deleted {plural(row.rotated, 'dump')} for newer ones, {human_bytes(row.rotated_bytes)}"
    if row.outputs_dropped:
        yield f"{name} kept {plural(row.outputs_dropped, 'dump')} without outputs: the queue was full"
    if row.in_flight_s is not None and row.in_flight_s > LONG_CALL_SECONDS:
        yield f"{name} has been in one call for {row.in_flight_s + row.age_s:.0f} s: `dump recover --live` saves its input"
    if row.writer not in ("thread", "process"):
        yield f"{name} has no writer process and writes in a {row.writer}"
    if row.state == "lost":
        where = f"; `dump recover` on {row.host} saves its last inputs" if row.ring else ""
        yield f"{name} is lost: silent for {row.age_s:.0f} s; killed, or unable to write here{where}"
