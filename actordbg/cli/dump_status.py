"""`actordbg dump status`: what each recording actor counted, from the counters that it publishes. Nothing talks to a job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.cli.capture_options import limits_in_words
from actordbg.cli.options import Json, store_of
from actordbg.cli.output import emit, human_bytes, note, plural, say, table
from actordbg.errors import CorruptDump

if TYPE_CHECKING:
    from actordbg.store import Store

STALE_SECONDS = 30.0
"""A process that has not published for so long, and did not say that it ended, is called lost."""


@dataclass
class ProcessRow:
    """One recording actor of one process. `state`: on, off, ended, lost. `age_s`: since its counters were published."""

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


@dataclass
class Status:
    """The answer of `dump status`. `total` sums the rows; `unreadable` counts counters files that were skipped."""

    store: str
    enabled: bool
    control: dict[str, Any] | None
    processes: list[ProcessRow]
    total: dict[str, int]
    unreadable: int


def status(
    ctx: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Processes of earlier runs, too.")] = False,
    as_json: Json = False,
) -> None:
    """Say whether recording is on, and what each process captured, dropped and sampled out.

    calls = captured + dropped + sampled out + what is still queued. Shown are the processes of the current run, and
    those of other runs that are still recording.

    Example: actordbg dump status --json
    """
    from actordbg.capture.control import read_control

    store = store_of(ctx).require()
    control = read_control(store)
    rows, unreadable = process_rows(store, datetime.now(timezone.utc))
    if not everything and control is not None:
        rows = [row for row in rows if row.run == control.run or row.state == "on"]
    answer = Status(
        store=str(store.root),
        enabled=control is not None and control.enabled,
        control=control.to_dict() if control else None,
        processes=rows,
        total=total_of(rows),
        unreadable=unreadable,
    )
    emit(answer, _say_status, as_json)


def process_rows(store: Store, now: datetime) -> tuple[list[ProcessRow], int]:
    """Every counters file of the store as a row, sorted by run, rank and host; and how many could not be read."""
    from actordbg.capture.ledger import read_counters

    rows, unreadable = [], 0
    for path in sorted(store.counters.glob("*/[!.]*.json")):
        if path.name.startswith("."):
            continue
        try:
            rows.append(_row(read_counters(path), now))
        except CorruptDump:
            unreadable += 1
    return sorted(
        rows, key=lambda row: (row.run, row.rank, row.role or "", row.host, row.pid, row.instance)
    ), unreadable


def total_of(rows: list[ProcessRow]) -> dict[str, int]:
    """The counts of all rows together."""
    names = ("calls", "captured", "dropped", "sampled_out", "pending", "bytes")
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def totals_in_words(total: dict[str, int]) -> str:
    """`42 calls = 42 captured + 0 dropped + 0 sampled out`."""
    queued = f" + {total['pending']:,} queued" if total["pending"] else ""
    return (
        f"{total['calls']:,} calls = {total['captured']:,} captured + {total['dropped']:,} dropped"
        f" + {total['sampled_out']:,} sampled out{queued}"
    )


def _row(data: dict[str, Any], now: datetime) -> ProcessRow:
    from actordbg.record import parse_timestamp

    age = (now - parse_timestamp(data["heartbeat"])).total_seconds()
    lost = data["state"] == "on" and age > STALE_SECONDS
    return ProcessRow(
        **{
            name: data[name]
            for name in ("run", "rank", "host", "pid", "instance", "calls", "captured", "pending", "bytes")
        },
        role=data.get("role"),
        state="lost" if lost else data["state"],
        dropped=sum(data["dropped"].values()),
        sampled_out=sum(data["sampled_out"].values()),
        queue_bytes=data["queue_bytes"],
        age_s=round(max(age, 0.0), 1),
        since=data["since"],
        last_error=data.get("last_error"),
        dropped_by=data["dropped"],
        sampled_out_by=data["sampled_out"],
    )


def _say_status(answer: Status) -> None:
    if answer.control is None:
        say(f"Recording is off: it was never on in {answer.store}")
        note("next: `actordbg dump enable`")
    else:
        state = "on" if answer.enabled else "off"
        say(f"Recording is {state}: run {answer.control['run']}, since {answer.control['since']}")
        say(f"  {limits_in_words(answer.control)}")
    if not answer.processes:
        say("No process has reported yet." if answer.enabled else "No process has reported.")
        return
    say()
    table(
        ("rank", "role", "state", "calls", "captured", "dropped", "sampled", "size"),
        [_cells(row) for row in answer.processes],
    )
    say(f"{plural(len(answer.processes), 'recording actor')}: {totals_in_words(answer.total)}")
    say(f"{human_bytes(answer.total['bytes'])} on disk; counted {min(row.age_s for row in answer.processes):.0f} s ago")
    for row in answer.processes:
        for line in trouble_of(row):
            say(line)
    if answer.unreadable:
        note(f"{plural(answer.unreadable, 'counters file')} could not be read")


def _cells(row: ProcessRow) -> tuple[Any, ...]:
    counts = (row.calls, row.captured, row.dropped, row.sampled_out)
    return (row.rank, row.role, row.state, *counts, human_bytes(row.bytes))


def trouble_of(row: ProcessRow) -> list[str]:
    """What a user should know about one recording actor, in sentences: calls that were lost, or are not written yet."""
    who = f"rank {row.rank} {row.role or 'actor'} ({row.host}, pid {row.pid})"
    lines = []
    if row.dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(row.dropped_by.items()))
        lines.append(f"{who} dropped: {reasons}" + (f"; last: {row.last_error}" if row.last_error else ""))
    if row.pending:
        lines.append(
            f"{who} has {plural(row.pending, 'call')} in its queue, {human_bytes(row.queue_bytes)} of its process"
        )
    if row.state == "lost":
        lines.append(f"{who} is lost: silent for {row.age_s:.0f} s; it may have been killed, or cannot write here")
    return lines
