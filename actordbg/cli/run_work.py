"""The work of `actordbg run`: recording switched on before the job, and what came of it after."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from actordbg.base.errors import StoreProblem
from actordbg.capture.control import control_dict, write_control
from actordbg.cli import capture_options as opt
from actordbg.cli.dump_recover import RecoverAnswer, recovered_from
from actordbg.cli.dump_status_work import ProcessRow, process_rows, totals_in_words, trouble_of, who
from actordbg.cli.dump_switch import control_before
from actordbg.cli.output import human_bytes, note, plural
from actordbg.dumps.recover import UNWRITTEN, find_rings
from actordbg.formats.recording_reading import read_ring
from actordbg.store.layout import Store

LAST_WORDS_SECONDS = 3.0
"""How long processes that still end (Ray's, for example) may take to publish their last counters."""


@dataclass
class RunAnswer:
    """The answer of `run`: how COMMAND ended, and what its processes counted.

    `switched_off` is false where the job goes on elsewhere, and so does its recording. `recovered`: what its dead processes had
    in hand; None if they left nothing.
    """

    store: str
    run: str
    command: list[str]
    exit_code: int
    switched_off: bool
    processes: list[ProcessRow]
    total: dict[str, int]
    unreadable: int
    recovered: RecoverAnswer | None = None


def recovered_from_rings(store: Store, run: str) -> RecoverAnswer | None:
    """Recover what processes of this run that died on this machine had in hand, before the machine goes."""
    paths = []
    for path in find_rings(store):
        with contextlib.suppress(StoreProblem):
            ring = read_ring(path)
            if not ring.alive and any(books.identity.get("run") == run for books in ring.books.values()):
                paths.append(path)
    if not paths:
        return None
    try:
        return recovered_from(store, paths)
    except ModuleNotFoundError as error:
        note(f"actordbg: dead processes left {plural(len(paths), 'ring')}; without {error.name} here they stay")
        note("next: `actordbg dump recover` in the training environment, on this machine")
        return None


def after_the_job(store: Store, run: str, known: set[tuple[Any, ...]], *, wait: bool) -> tuple[list[ProcessRow], int]:
    """Counters of the job's processes, those not `known` before it; with `wait`, once all have ended or the time is over."""
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    while True:
        everything, unreadable = process_rows(store, datetime.now(timezone.utc))
        rows = [row for row in everything if row.run == run and who(vars(row)) not in known]
        if not wait or time.monotonic() > deadline or all(row.state in ("ended", "lost", "killed") for row in rows):
            return rows, unreadable
        time.sleep(0.1)


def start_recording(store: Store, run: str, options: opt.CaptureOptions) -> None:
    """Write the job's own switch, and say so."""
    previous = control_before(store, run)
    if previous is not None and previous.enabled:
        note(f"actordbg: run {run} was on since {previous.since}: its limits are replaced")
    control = opt.control_from(options, run, previous.generation + 1 if previous else 1)
    write_control(store, control, run)
    note(f"actordbg: recording run {run} in {store.root}: {opt.limits_in_words(control_dict(control))}")
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        note("actordbg: ACTORDBG_DISABLE is set, so nothing will be recorded")


def say_recorded(answer: RunAnswer) -> None:
    note(f"actordbg: {shlex.join(answer.command)[:120]} ended with exit code {answer.exit_code}")
    if answer.processes:
        actors = plural(len(answer.processes), "recording actor")
        note(f"actordbg: run {answer.run}, {actors}: {totals_in_words(answer.total)}")
        if answer.total["calls"]:
            note(f"actordbg: {human_bytes(answer.total['bytes'])} in {answer.store}")
            note(f"next: actordbg dump ls --where \"run='{answer.run}'\"")
    elif answer.switched_off:
        note(f"actordbg: run {answer.run}: no process called what is recorded, where actordbg could see it")
        if answer.exit_code == 0:
            note("actordbg: a trainer may call its model in its own way (`actordbg adapters`), or its python may not look at")
            note("actordbg: PYTHONPATH (-I, -E or -S); `actordbg doctor` checks the rest")
    if answer.recovered is not None:
        marks = [dump.recovered for report in answer.recovered.rings for dump in report.dumps]
        flying = f", {answer.recovered.in_flight} of a call in flight" if answer.recovered.in_flight else ""
        if died := len(marks) - marks.count(UNWRITTEN):
            note(f"actordbg: recovered {plural(died, 'input')} of processes that died{flying}")
        if UNWRITTEN in marks:
            note(f"actordbg: wrote {plural(marks.count(UNWRITTEN), 'input')} that Ray left its workers no time to write")
    for row in answer.processes:
        for line in trouble_of(row):
            note(f"actordbg: {line}")
    if not answer.switched_off:
        note(f"actordbg: recording stays on for run {answer.run}; `actordbg dump disable --run {answer.run}` ends it")
