"""`actordbg dump enable`, `dump disable` and `dump status`: the switch that running jobs look at, and what they count.

None of the three talks to a job. `enable` and `disable` replace `control.json`; `status` reads the counters that every
capturing process publishes in the store, at most a second old.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.cli.options import Json, store_of
from actordbg.cli.output import emit, human_bytes, note, plural, say, table
from actordbg.errors import CorruptDump, NewerFormat, StoreProblem, UsageError

if TYPE_CHECKING:
    from actordbg.store import Store
from actordbg.units import parse_size

STALE_SECONDS = 30.0
"""A process that has not published for so long, and did not say that it ended, is called lost."""


@dataclass
class Switch:
    """The answer of `enable` and `disable`: the store, whether recording is on, and `control.json` as it is now."""

    store: str
    enabled: bool
    changed: bool
    control: dict[str, Any] | None


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


def enable(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Option(help="Name of the run; dumps lie under it. Default: run-<utc>.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Record one call in N.")] = 1,
    max_dumps: Annotated[
        int | None, typer.Option(min=0, help="At most N dumps from each actor of each process.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(help="At most this much from each actor of each process, e.g. 10GB.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Only these ranks, e.g. 0,1,4-7.")] = None,
    min_seq_len: Annotated[int | None, typer.Option(min=0, help="Only calls with S of at least N.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(min=0, help="Only calls with S of at most N.")] = None,
    free_floor: Annotated[str, typer.Option(help="Stop while the disk has less free space than this.")] = "5GiB",
    level: Annotated[int, typer.Option(min=1, max=22, help="zstd level.")] = 3,
    with_outputs: Annotated[
        bool, typer.Option("--with-outputs", help="Store the log-probs (and entropy) that the call returned, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Switch recording on, also in jobs that are running. Makes the store if there is none.

    Enabling again replaces the limits and starts them anew; the run goes on unless --run names another.

    Example: actordbg dump enable --run ppo-7b --every 10 --max-bytes 20GB --ranks 0-3
    """
    from actordbg.capture.control import Control, write_control
    from actordbg.record import is_plain_name, now_timestamp

    store = store_of(ctx).create()
    before = _control_before(store)
    if run is not None and not is_plain_name(run):
        raise UsageError(f"{run!r} cannot name a run", hint="letters, digits and ._+- only, at most 128")
    if min_seq_len is not None and max_seq_len is not None and min_seq_len > max_seq_len:
        raise UsageError("--min-seq-len is larger than --max-seq-len", hint="swap them")
    going_on = before.run if before is not None and before.enabled else None
    control = Control(
        enabled=True,
        run=run or going_on or default_run_name(),
        since=now_timestamp(),
        generation=before.generation + 1 if before else 1,
        every=every,
        max_dumps=max_dumps,
        max_bytes=parse_size("--max-bytes", max_bytes) if max_bytes else None,
        ranks=parse_ranks(ranks) if ranks else None,
        min_seq_len=min_seq_len,
        max_seq_len=max_seq_len,
        free_floor_bytes=parse_size("--free-floor", free_floor),
        level=level,
        with_outputs=with_outputs,
    )
    write_control(store, control)
    emit(Switch(str(store.root), True, True, _as_dict(control)), _say_enabled, as_json)


def disable(ctx: typer.Context, as_json: Json = False) -> None:
    """Switch recording off, also in jobs that are running. What is recorded stays.

    Example: actordbg dump disable
    """
    from actordbg.capture.control import write_control
    from actordbg.record import now_timestamp

    store = store_of(ctx).require()
    before = _control_before(store)
    if before is None or not before.enabled:
        answer = Switch(str(store.root), False, False, _as_dict(before) if before else None)
    else:
        control = replace(before, enabled=False, since=now_timestamp(), generation=before.generation + 1)
        write_control(store, control)
        answer = Switch(str(store.root), False, True, _as_dict(control))
    emit(answer, _say_disabled, as_json)


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
        control=_as_dict(control) if control else None,
        processes=rows,
        total={
            name: sum(getattr(row, name) for row in rows)
            for name in ("calls", "captured", "dropped", "sampled_out", "pending", "bytes")
        },
        unreadable=unreadable,
    )
    emit(answer, _say_status, as_json)


def process_rows(store: Store, now: datetime) -> tuple[list[ProcessRow], int]:
    """Every counters file of the store as a row, sorted by run, rank and host; and how many could not be read."""
    from actordbg.capture.ledger import read_counters

    rows, unreadable = [], 0
    for path in sorted(store.counters.glob("*/*.json")):
        if path.name.startswith("."):
            continue
        try:
            rows.append(_row(read_counters(path), now))
        except CorruptDump:
            unreadable += 1
    return sorted(
        rows, key=lambda row: (row.run, row.rank, row.role or "", row.host, row.pid, row.instance)
    ), unreadable


def default_run_name() -> str:
    """`run-20261120T120854Z`: the moment in UTC."""
    return f"run-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0,1,4-7` as (0, 1, 4, 5, 6, 7). Raises UsageError."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(f"--ranks {text!r} is not a list of ranks", hint="write it like 0,1,4-7")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(ranks))


def _control_before(store: Store) -> Any:
    """The switch as it was; None where there was none or it is damaged (it is about to be replaced)."""
    from actordbg.capture.control import read_control

    try:
        return read_control(store)
    except NewerFormat:
        raise
    except StoreProblem as error:
        note(f"control.json was damaged and is replaced: {error.message}")
        return None


def _as_dict(control: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(control)


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


def _say_enabled(answer: Switch) -> None:
    assert answer.control is not None
    say(f"Recording is on: run {answer.control['run']} in {answer.store}")
    say(f"  {_limits(answer.control)}")
    say("Jobs started with a patched openrlhf notice within a second of their next forward.")
    note("next: `actordbg dump status` says what they record; `actordbg dump disable` stops it")
    note("      `actordbg status` says whether openrlhf is patched (`actordbg patch` does it)")


def _say_disabled(answer: Switch) -> None:
    say("Recording is off." if answer.changed else "Recording was off already.")
    if answer.changed:
        note("next: `actordbg dump ls` shows what was recorded")


def _say_status(answer: Status) -> None:
    if answer.control is None:
        say(f"Recording is off: it was never on in {answer.store}")
        note("next: `actordbg dump enable`")
    else:
        state = "on" if answer.enabled else "off"
        say(f"Recording is {state}: run {answer.control['run']}, since {answer.control['since']}")
        say(f"  {_limits(answer.control)}")
    if not answer.processes:
        say("No process has reported yet." if answer.enabled else "No process has reported.")
        return
    say()
    table(
        ("rank", "role", "state", "calls", "captured", "dropped", "sampled", "size"),
        [_cells(row) for row in answer.processes],
    )
    total = answer.total
    say(
        f"{plural(len(answer.processes), 'recording actor')}: {total['calls']:,} calls = {total['captured']:,} captured"
        f" + {total['dropped']:,} dropped + {total['sampled_out']:,} sampled out"
        + (f" + {total['pending']:,} queued" if total["pending"] else "")
    )
    say(f"{human_bytes(total['bytes'])} on disk; counted {min(row.age_s for row in answer.processes):.0f} s ago")
    for row in answer.processes:
        _say_trouble(row)
    if answer.unreadable:
        note(f"{plural(answer.unreadable, 'counters file')} could not be read")


def _cells(row: ProcessRow) -> tuple[Any, ...]:
    counts = (row.calls, row.captured, row.dropped, row.sampled_out)
    return (row.rank, row.role, row.state, *counts, human_bytes(row.bytes))


def _say_trouble(row: ProcessRow) -> None:
    who = f"rank {row.rank} {row.role or 'actor'} ({row.host}, pid {row.pid})"
    if row.dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(row.dropped_by.items()))
        say(f"{who} dropped: {reasons}" + (f"; last: {row.last_error}" if row.last_error else ""))
    if row.pending:
        say(f"{who} has {plural(row.pending, 'call')} in its queue, {human_bytes(row.queue_bytes)} of its process")
    if row.state == "lost":
        say(f"{who} is lost: silent for {row.age_s:.0f} s; it may have been killed, or cannot write here")


def _limits(control: dict[str, Any]) -> str:
    """The limits of a control in one line."""
    parts = ["every call" if control["every"] == 1 else f"one call in {control['every']}"]
    if control["ranks"] is not None:
        parts.append("ranks " + ",".join(map(str, control["ranks"])))
    low, high = control["min_seq_len"], control["max_seq_len"]
    if low is not None or high is not None:
        parts.append(f"seq_len {'' if low is None else low}..{'' if high is None else high}")
    if control["max_dumps"] is not None:
        parts.append(f"at most {plural(control['max_dumps'], 'dump')} an actor")
    if control["max_bytes"] is not None:
        parts.append(f"at most {human_bytes(control['max_bytes'])} an actor")
    parts.append(f"disk floor {human_bytes(control['free_floor_bytes'])}")
    if control["with_outputs"]:
        parts.append("with outputs")
    return ", ".join(parts)
