"""`actordbg run`: records a job without a patched actor.py, through a module that its Python processes import at start.

The job has a switch of its own (`store/controls/<run>.json`). `dump enable --run NAME` and `dump disable --run NAME` change it
while the job runs; other jobs in the same store do not notice. Standard output belongs to COMMAND; our messages go to standard
error.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from actordbg.adapters.find_adapter import carried_form
from actordbg.adapters.fitting import fit_of
from actordbg.base.errors import LaunchProblem, StoreProblem
from actordbg.capture.switch_file import control_dict, write_control
from actordbg.cli import capture_options as opt
from actordbg.cli.dump_recover import RecoverAnswer, recovered_from
from actordbg.cli.dump_status import ProcessRow, process_rows, total_of, totals_in_words, trouble_of
from actordbg.cli.dump_switch import control_before, switch_off
from actordbg.cli.options import store_of, takes
from actordbg.cli.output import emit, human_bytes, note, plural
from actordbg.debug import live_job
from actordbg.dumps.recover import find_rings
from actordbg.formats.recording_reading import read_ring
from actordbg.install import carried, ray_submit
from actordbg.install.foreground import run_in_foreground
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


@takes("options", opt.CaptureOptions)
def run(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The job: a program and its arguments.")],
    run: opt.Run = None,
    options: opt.CaptureOptions = opt.CaptureOptions(),
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME", help="Record this trainer: a name of `actordbg adapters`, or module:Class."),
    ] = None,
    hash_weights: Annotated[
        bool, typer.Option("--hash-weights", help="Hash the weights of each recorded step: slow, for a small check.")
    ] = False,
    leave_on: Annotated[
        bool, typer.Option("--leave-on", help="Do not switch recording off at the end: the job goes on elsewhere.")
    ] = False,
    stops: Annotated[
        bool, typer.Option("--break", help="breakpoint() in the job's code parks all ranks, for `actordbg attach`.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say at the end as JSON, on standard error, what was recorded.")
    ] = False,
) -> None:
    """Run a job and record it, without patching actor.py.

    For read-only images, and for a single run. COMMAND is what you would type without actordbg: torchrun, deepspeed, python, a
    script, ray job submit. Its Python processes, Ray workers on other nodes included, wrap the trainer's Actor when they import
    it. --adapter records another trainer, too (`actordbg adapters`). The exit code is that of COMMAND.

    Example: actordbg run --run ppo-7b --max-dumps 200 -- bash train_ppo.sh
    """
    if shutil.which(command[0]) is None:
        hint = "what follows `--` is a program and its arguments"
        raise LaunchProblem(f"there is no program {command[0]}", hint=hint)
    adapters = carried_form(adapter or [])
    for why in (why for one in adapter or () for why in fit_of(one).differs):
        note(f"actordbg: as installed here, this is not recorded: {why}")
    store = store_of(ctx).create()
    name = opt.checked_run_name(run) or f"{opt.default_run_name()}-{os.urandom(2).hex()}"  # jobs of the same second differ
    environment = carried.child_environment(
        os.environ, str(store.root), name, stops=stops, adapters=adapters, hash_weights=hash_weights
    )
    known = {_key(row) for row in process_rows(store, datetime.now(timezone.utc))[0]}
    _start_recording(store, name, options)
    if stops:
        with contextlib.suppress(OSError):
            live_job.expect(name)
        note(f"actordbg: at a breakpoint() all ranks of this machine park; from another terminal: actordbg attach {name}")
    goes_on = False
    try:
        end = run_in_foreground(ray_submit.rewritten(command, carried.carried(environment)), environment)
        goes_on = leave_on or ray_submit.goes_on(command) or (end.interrupted and ray_submit.is_submission(command))
    finally:
        if not goes_on:
            switch_off(store, name)
    recovered = None if goes_on else recovered_from_rings(store, name)
    rows, unreadable = after_the_job(store, name, known, wait=not goes_on)
    answer = RunAnswer(str(store.root), name, command, end.code, not goes_on, rows, total_of(rows), unreadable, recovered)
    emit(answer, _say_recorded, as_json, err=True)
    raise typer.Exit(end.code)


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
        rows = [row for row in everything if row.run == run and _key(row) not in known]
        if not wait or time.monotonic() > deadline or all(row.state in ("ended", "lost") for row in rows):
            return rows, unreadable
        time.sleep(0.1)


def _start_recording(store: Store, run: str, options: opt.CaptureOptions) -> None:
    """Write the job's own switch, and say so."""
    previous = control_before(store, run)
    if previous is not None and previous.enabled:
        note(f"actordbg: run {run} was on since {previous.since}: its limits are replaced")
    control = opt.control_from(options, run, previous.generation + 1 if previous else 1)
    write_control(store, control, run)
    note(f"actordbg: recording run {run} in {store.root}: {opt.limits_in_words(control_dict(control))}")
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        note("actordbg: ACTORDBG_DISABLE is set, so nothing will be recorded")


def _key(row: ProcessRow) -> tuple[Any, ...]:
    return (row.run, row.rank, row.host, row.pid, row.instance)


def _say_recorded(answer: RunAnswer) -> None:
    note(f"actordbg: {shlex.join(answer.command)[:120]} ended with exit code {answer.exit_code}")
    if answer.processes:
        actors = plural(len(answer.processes), "recording actor")
        note(f"actordbg: run {answer.run}, {actors}: {totals_in_words(answer.total)}")
        note(f"actordbg: {human_bytes(answer.total['bytes'])} in {answer.store}")
        note(f"next: actordbg dump ls --where \"run='{answer.run}'\"")
    elif answer.switched_off:
        note(f"actordbg: run {answer.run}: no process called what is recorded, where actordbg could see it")
        if answer.exit_code == 0:
            note("actordbg: a python with -I, -E or -S does not look at PYTHONPATH; `actordbg doctor` checks the rest")
    if answer.recovered is not None and answer.recovered.recovered:
        flying = f", {answer.recovered.in_flight} of a call in flight" if answer.recovered.in_flight else ""
        note(f"actordbg: recovered {plural(answer.recovered.recovered, 'input')} of processes that died{flying}")
    for row in answer.processes:
        for line in trouble_of(row):
            note(f"actordbg: {line}")
    if not answer.switched_off:
        note(f"actordbg: recording stays on for run {answer.run}; `actordbg dump disable --run {answer.run}` ends it")
