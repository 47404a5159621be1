"""`actordbg run`: record a job without patching actor.py, through a module that its Python processes import at startup.

The job has its own switch (`store/controls/<run>.json`). `dump enable --run NAME` and `dump disable --run NAME` change it while
the job runs, without affecting other jobs in the same store. Standard output belongs to COMMAND; our messages go to standard
error.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import LaunchProblem, StoreProblem
from actordbg.base.option import Option
from actordbg.cli import capture_options as opt
from actordbg.cli.dump_recording import control_before, recovered_from, switch_off
from actordbg.cli.options import store_of
from actordbg.cli.output import emit_json, human_bytes, note, on_typed_store, plural, say_next

if TYPE_CHECKING:
    from actordbg.cli.dump_status_work import ProcessRow
    from actordbg.store.layout import Store

LAST_WORDS_SECONDS = 3.0
"""Time limit for exiting processes (Ray's, for example) to publish their last counters."""


def run(
    ctx: typer.Context,
    command: list[str],
    *,
    run: opt.Run = None,
    options: opt.CaptureOptions,
    adapter: list[str] | None = None,
    hash_weights: Annotated[bool, Option("--hash-weights", "--weights")] = False,
    turns: bool = False,
    leave_on: bool = False,
    stops: Annotated[bool, Option("--break")] = False,
    as_json: Annotated[bool, Option("--json")] = False,
) -> None:
    """Run a job and record it, without patching actor.py.

    For read-only images and single runs. COMMAND is what you would type without actordbg: torchrun, deepspeed, python, a script,
    ray job submit. Its Python processes, including Ray workers on other nodes, wrap the trainer's Actor when they import it.
    --adapter also records another trainer (`actordbg adapters`). Exits with the exit code of COMMAND.

    Example: actordbg run --run ppo-7b --max-dumps 200 -- bash train_ppo.sh

    Args:
        command (COMMAND): The job: a program and its arguments.
        adapter (NAME): Record another trainer: an adapter of `actordbg adapters`, or module:Class; repeatable.
        hash_weights: Hash the weights of each recorded step, and those sent to rollout engines (`actordbg weights`);
            slow, for small models.
        turns: Record the token ids of each turn of a rollout (`actordbg turns`); OpenRLHF.
        leave_on: Leave recording on at exit: the job continues elsewhere.
        stops: Make breakpoint() in the job's code pause all ranks, for `actordbg attach`.
        as_json: Print what was recorded as JSON, on standard error, at the end.
    """
    from actordbg.cli.dump_status_work import process_rows, total_of, who
    from actordbg.debug import stops as live_stops
    from actordbg.install import ray_hooks
    from actordbg.install.command import run_in_foreground, submission
    from actordbg.trainers.find_adapter import carried_form
    from actordbg.trainers.fitting import fit_of

    if shutil.which(command[0]) is None:
        hint = "pass a program and its arguments after `--`"
        raise LaunchProblem(f"there is no program {command[0]}", hint=hint)
    adapters = carried_form(adapter or [])
    for why in (why for named in adapter or () for why in fit_of(named).differs):
        note(f"actordbg: not recorded in this environment: {why}")
    store = store_of(ctx).create()
    name = opt.checked_run_name(run) or f"{opt.default_run_name()}-{os.urandom(2).hex()}"  # jobs of the same second differ
    environment = ray_hooks.child_environment(
        os.environ, str(store.root), name, stops=stops, adapters=adapters, hash_weights=hash_weights, turns=turns
    )
    known = {who(vars(row)) for row in process_rows(store, datetime.now(timezone.utc))[0]}
    start_recording(store, name, options)
    if stops:
        with contextlib.suppress(OSError):
            live_stops.expect(name)
        note(f"actordbg: breakpoint() pauses all ranks of this machine; in another terminal: actordbg attach {name}")
    goes_on = False
    try:
        code, interrupted = run_in_foreground(command, environment)
        submitted = submission(command)  # a job that nobody waits for keeps running
        goes_on = leave_on or (submitted is not None and (interrupted or "--no-wait" in submitted))
    finally:
        if not goes_on:
            switch_off(store, name)
    rows, unreadable = after_the_job(store, name, known, wait=not goes_on)
    if recovered := None if goes_on else recovered_from_rings(store, name):
        rows, unreadable = after_the_job(store, name, known, wait=False)
    answer = {
        "store": str(store.root),
        "run": name,
        "command": command,
        "exit_code": code,
        "switched_off": not goes_on,  # else the job continues elsewhere, and so does its recording
        "processes": rows,
        "total": total_of(rows),
        "unreadable": unreadable,
        "recovered": recovered,
    }
    lines = list(_told(answer))
    following = f"actordbg dump ls --where \"run='{name}'\"" if total_of(rows)["calls"] else ""
    if as_json:
        emit_json({"verdict": "", "sentence": lines[0], "next": on_typed_store(following), **answer}, err=True)
    else:
        for line in lines:
            note(f"actordbg: {line}")
        if following:
            say_next(following)
    raise typer.Exit(code)


def recovered_from_rings(store: Store, run: str) -> dict[str, Any] | None:
    """Recover the last inputs of this run's dead processes on this machine, before the machine is gone."""
    from actordbg.dumps.recover import find_rings
    from actordbg.formats.recording_reading import read_ring

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
        note(f"actordbg: dead processes left {plural(len(paths), 'flight recorder file')}; recovering them needs {error.name}")
        note("next: `actordbg dump recover` in the training environment, on this machine")
        return None


def after_the_job(store: Store, run: str, known: set[tuple[Any, ...]], *, wait: bool) -> tuple[list[ProcessRow], int]:
    """Read the counters of the job's processes (not `known` before it); with `wait`, after all have ended or a timeout."""
    from actordbg.cli.dump_status_work import process_rows, who

    deadline = time.monotonic() + LAST_WORDS_SECONDS
    while True:
        everything, unreadable = process_rows(store, datetime.now(timezone.utc))
        rows = [row for row in everything if row.run == run and who(vars(row)) not in known]
        if not wait or time.monotonic() > deadline or all(row.state in ("ended", "lost", "killed") for row in rows):
            return rows, unreadable
        time.sleep(0.1)


def start_recording(store: Store, run: str, options: opt.CaptureOptions) -> None:
    """Write the job's own switch, and print a note."""
    from actordbg.capture.switch_file import write_control

    previous = control_before(store, run)
    if previous is not None and previous.enabled:
        note(f"actordbg: run {run} was already recording since {previous.since}: its limits are replaced")
    control = opt.control_from(options, run, previous.generation + 1 if previous else 1)
    write_control(store, control, run)
    note(f"actordbg: recording run {run} in {store.root}: {opt.limits_in_words(asdict(control))}")
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        note("actordbg: ACTORDBG_DISABLE is set, so nothing will be recorded")


def _told(answer: dict[str, Any]) -> Iterator[str]:
    from actordbg.cli.dump_status_work import totals_in_words, trouble_of
    from actordbg.dumps.recover import UNWRITTEN

    run, total, recovered = answer["run"], answer["total"], answer["recovered"]
    yield f"{shlex.join(answer['command'])[:120]} ended with exit code {answer['exit_code']}"
    if answer["processes"]:
        yield f"run {run}, {plural(len(answer['processes']), 'recording actor')}: {totals_in_words(total)}"
        if total["calls"]:
            yield f"{human_bytes(total['bytes'])} in {answer['store']}"
    elif answer["switched_off"]:
        yield f"run {run}: actordbg saw no process call a recorded function"
        if answer["exit_code"] == 0:
            yield (
                "the trainer may call its model in another way (`actordbg adapters`), or its python may ignore PYTHONPATH "
                "(-I, -E or -S); `actordbg doctor` checks the rest"
            )
    if recovered is not None:
        marks = [dump.recovered for report in recovered["rings"] for dump in report.dumps]
        flying = f", {recovered['in_flight']} from a call in flight" if recovered["in_flight"] else ""
        if died := len(marks) - marks.count(UNWRITTEN):
            yield f"recovered {plural(died, 'input')} of processes that died{flying}"
        if UNWRITTEN in marks:
            yield f"wrote {plural(marks.count(UNWRITTEN), 'input')} that Ray workers had no time to write"
    for row in answer["processes"]:
        yield from trouble_of(row)
    if not answer["switched_off"]:
        yield f"recording stays on for run {run}; `actordbg dump disable --run {run}` ends it"
