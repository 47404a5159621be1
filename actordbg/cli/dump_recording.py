"""`actordbg dump enable`, `dump disable` and `dump status` write and read the switch file that running jobs poll.

None of them talks to a job. `dump recover` turns the last inputs of dead processes into dumps.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import NewerFormat, StoreProblem, UsageError
from actordbg.base.option import Option
from actordbg.cli import capture_options as opt, output
from actordbg.cli.options import require_good, store_of
from actordbg.cli.output import clear_screen, emit, emit_json, keep_answer, note, plural, say, say_next, say_wrapped, table

if TYPE_CHECKING:
    from actordbg.capture.control import Control
    from actordbg.dumps.recover import RingReport
    from actordbg.store.layout import Store


def enable(ctx: typer.Context, *, run: opt.Run = None, options: opt.CaptureOptions) -> None:
    """Start recording, even in running jobs.

    Creates the store if it does not exist. Enabling again replaces the limits and restarts their counters; the run continues
    unless --run names another. If --run names a job that `actordbg run` started, changes the limits of that job only.

    Example: actordbg dump enable --run ppo-7b --on nan,exception,slow:3x --before 4 --keep 20GB
    """
    from actordbg.capture.switch_file import write_control

    store = store_of(ctx).create()
    name = opt.checked_run_name(run)
    job = name if name is not None and store.control_of(name).exists() else None
    previous = control_before(store, job)
    going_on = previous.run if previous is not None and previous.enabled else None
    run_name = name or going_on or opt.default_run_name()
    control = opt.control_from(options, run_name, previous.generation + 1 if previous else 1)
    write_control(store, control, job)
    emit(_answer(store, control, True, True, job), _say_enabled)


def disable(ctx: typer.Context, *, run: str | None = None) -> None:
    """Stop recording, even in running jobs.

    Also stops jobs of `actordbg run`, unless --run names a job. Recorded dumps stay.

    Example: actordbg dump disable

    Args:
        run: Stop only the job of this name.
    """
    store = store_of(ctx).require()
    name = opt.checked_run_name(run)
    own = name if name is not None and store.control_of(name).exists() else None
    switch = control_before(store, own)
    if name is not None and own is None and switch is not None and switch.enabled and switch.run != name:
        raise UsageError(
            f"no job {name} is recorded; run {switch.run} is", hint=f"`actordbg dump disable --run {switch.run}` stops it"
        )
    jobs = [None, *store.job_names()] if name is None else [own]
    changed = [switch_off(store, job) for job in jobs]
    keep_answer(_answer(store, control_before(store, jobs[0]), False, any(changed), own))
    say("Recording is off." if any(changed) else "Recording was already off.")
    if any(changed) and (any(store.iter_dumps()) or any(store.iter_packs())):
        say_next("actordbg dump ls")


def _answer(store: Store, control: Control | None, enabled: bool, changed: bool, job: str | None) -> dict[str, Any]:
    """Return the command's result: the store, whether recording is on, and the switch; job: None for the store's own switch."""
    now = asdict(control) if control else None
    return {"store": str(store.root), "enabled": enabled, "changed": changed, "control": now, "job": job}


def switch_off(store: Store, job: str | None) -> bool:
    """Turn off the switch of a job, or the store's if `job` is None. Returns whether it was on."""
    from actordbg.capture.switch_file import write_control
    from actordbg.formats.dump_record import now_timestamp

    before = control_before(store, job)
    if before is None or not before.enabled:
        return False
    write_control(store, replace(before, enabled=False, since=now_timestamp(), generation=before.generation + 1), job)
    return True


def control_before(store: Store, job: str | None) -> Control | None:
    """Read the current switch; None if it is missing, or, with a note, if it is damaged (the caller replaces it)."""
    from actordbg.capture.switch_file import read_control

    try:
        return read_control(store, job)
    except NewerFormat:
        raise
    except StoreProblem as error:
        note(f"{store.control_of(job).name} was damaged and is replaced: {error.message}")
        return None


def _say_enabled(answer: dict[str, Any]) -> None:
    say(f"Recording is on: run {answer['control']['run']} in {answer['store']}")
    say_wrapped(f"  {opt.limits_in_words(answer['control'])}", "    ")
    if answer["job"]:
        return say(f"Only the job {answer['job']} follows this switch; it picks this up within a second.")
    say("Hooked jobs pick this up within a second.")
    note("`actordbg status` shows whether actor.py is patched; `actordbg dump disable` stops recording")
    return say_next("actordbg dump status")


def status(
    ctx: typer.Context,
    *,
    everything: Annotated[bool, Option("--all")] = False,
    watch: Annotated[bool, Option("-w")] = False,
    interval: Annotated[float, Option(min=0.1)] = 1.0,
) -> None:
    """Show calls captured and dropped by each process.

    Shows whether recording is on, and lists the processes of the current run and of other runs that still record. Also lists the
    flight recorder files of dead processes on this machine.
    calls = captured + dropped + sampled out + in ring (buffered, waiting to be written). If a process ended before it wrote
    all its buffered calls, `dump recover` turns them into dumps.

    Example: actordbg dump status --watch

    Args:
        everything: Also show processes of earlier runs.
        watch: Refresh the status until Ctrl-C.
        interval: Seconds between refreshes of --watch.
    """
    from actordbg.cli.dump_status_work import say_status, status_of

    store = store_of(ctx).require()
    if not watch:
        return emit(status_of(store, everything), say_status)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            answer = status_of(store, everything)
            if output.wanted.json:
                emit_json(answer, None)
            else:
                clear_screen()
                say_status(answer)
            sys.stdout.flush()
            time.sleep(interval)
    return None


def recover(ctx: typer.Context, rings: list[Path] | None = None, *, live: bool = False, discard: bool = False) -> None:
    """Recover dead processes' last calls as dumps.

    Reads the flight recorder files: the call in flight and the last calls before it. A file is in the shared memory of the
    machine where its process ran, so run this there before the machine is gone. --where "recovered='in_flight'" selects the
    calls that were running.

    Exit code: 1 if a file could not be read.

    Example: actordbg dump recover

    Args:
        rings (RING): Flight recorder files; default: all here.
        live: Also read files of live processes, e.g. after a hang; these files stay.
        discard: Remove the files of dead processes without making dumps.
    """
    if discard and live:
        raise UsageError("--discard conflicts with --live", hint="drop one of them")
    store = store_of(ctx).require() if discard else store_of(ctx).require_writable()
    answer = recovered_from(store, rings, live=live, discard=discard)
    emit(answer, _render)
    require_good(not any(report.problem for report in answer["rings"]))


def recovered_from(store: Store, rings: list[Path] | None = None, *, live: bool = False, discard: bool = False) -> dict[str, Any]:
    """Turn ring files (default: all on this machine) into dumps, and update the catalog.

    Returns plain data: `recovered` counts dumps, `in_flight` those whose call was running.
    """
    from actordbg.catalog.indexer import forget_dumps
    from actordbg.dumps import recover as recovering
    from actordbg.formats.ringfile import host_name

    for path in rings or []:
        if not path.is_file():
            raise UsageError(f"{path} is not a file", hint="run `actordbg dump status` to list the flight recorder files")
    paths = rings or recovering.find_rings(store)
    if discard:
        reports = list(recovering.discard(store, paths))
    else:
        reports = list(recovering.recover(store, paths, live=live))
    dumps = [dump for report in reports for dump in report.dumps]
    if dumps:
        folders = {str(Path(dump.path).parent) for dump in dumps}
        forget_dumps(store, [dump.dump_id for dump in dumps if dump.recorded], folders)
    flying = sum(dump.recovered == "in_flight" for dump in dumps)
    return {"store": str(store.root), "host": host_name(), "recovered": len(dumps), "in_flight": flying, "rings": reports}


def _render(answer: dict[str, Any]) -> None:
    for report in answer["rings"]:
        _say_ring(report)
    dumps = [dump for report in answer["rings"] for dump in report.dumps]
    if dumps:
        say()
        rows = [(d.rank, d.role, d.recovered, d.batch_size, d.seq_len, d.dump_id) for d in dumps]
        table(("rank", "role", "was", "B", "S", "dump"), rows, tight=True)
        for dump in dumps:
            if dump.error:
                say(f"{dump.dump_id} raised {dump.error}")
        say(f"{plural(len(dumps), 'dump')} recovered, {answer['in_flight']} from a call in flight", sums_up=True)
        say_next("actordbg replay --where \"recovered='in_flight'\"")
    elif not answer["rings"]:
        say(f"No process left flight recorder files on {answer['host']}.")
        note("run this on the machine where the process ran; `actordbg dump status` names it")


def _say_ring(report: RingReport) -> None:
    who = f"pid {report.pid}" if report.pid else Path(report.path).name
    if report.problem:
        return say(f"{who}: {report.problem}")
    if report.alive and not report.dumps:
        return say(f"{who} is alive: its flight recorder was not read (--live reads it)")
    if not report.dumps and report.removed:
        return say(f"{who}: removed {report.path}")
    lost = f", {plural(report.killed, 'call')} lost with the process" if report.killed else ""
    return say(f"{who}: {plural(len(report.dumps), 'input')}{lost}")
