"""`actordbg dump enable`, `dump disable` and `dump status`: the switch that running jobs look at. None of them talks to a job."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.cli import capture_options as opt
from actordbg.cli import output
from actordbg.cli.options import option, store_of, takes_groups
from actordbg.cli.output import clear_screen, emit, emit_json, note, say, say_wrapped

if TYPE_CHECKING:
    from actordbg.capture.control import Control
    from actordbg.store.layout import Store


@takes_groups
def enable(ctx: typer.Context, run: opt.Run = None, options: opt.CaptureOptions = opt.CaptureOptions()) -> None:
    """Start recording, in running jobs too.

    Makes the store if there is none. Enabling again replaces the limits and starts them anew; the run goes on unless --run
    names another. With the name of a job that `actordbg run` started, --run changes the limits of that job alone.

    Example: actordbg dump enable --run ppo-7b --on nan,exception,slow:3x --before 4 --keep 20GB
    """
    from actordbg.capture.control import write_control

    store = store_of(ctx).create()
    name = opt.checked_run_name(run)
    job = name if name is not None and store.control_of(name).exists() else None
    previous = control_before(store, job)
    going_on = previous.run if previous is not None and previous.enabled else None
    run_name = name or going_on or opt.default_run_name()
    control = opt.control_from(options, run_name, previous.generation + 1 if previous else 1)
    write_control(store, control, job)
    emit(_answer(store, control, True, True, job), _say_enabled)


def disable(
    ctx: typer.Context,
    run: str | None = option(None, "Only the job of this name."),
) -> None:
    """Stop recording, in running jobs too.

    Jobs of `actordbg run` stop as well, unless --run names one job. Recorded dumps stay.

    Example: actordbg dump disable
    """
    store = store_of(ctx).require()
    name = opt.checked_run_name(run)
    own = name if name is not None and store.control_of(name).exists() else None
    jobs = [None, *store.job_names()] if name is None else [own]
    changed = [switch_off(store, job) for job in jobs]
    emit(_answer(store, control_before(store, jobs[0]), False, any(changed), own), _say_disabled)


def _answer(store: Store, control: Control | None, enabled: bool, changed: bool, job: str | None) -> dict[str, Any]:
    """The store, whether recording is on, and the switch as it is now; `job`: whose own switch it is, None for the store's."""
    from actordbg.capture.control import control_dict

    now = control_dict(control) if control else None
    return {"store": str(store.root), "enabled": enabled, "changed": changed, "control": now, "job": job}


def switch_off(store: Store, job: str | None) -> bool:
    """Switch the store's switch off, or that of one job. Whether it was on."""
    from actordbg.capture.control import write_control
    from actordbg.formats.dump_record import now_timestamp

    before = control_before(store, job)
    if before is None or not before.enabled:
        return False
    write_control(store, replace(before, enabled=False, since=now_timestamp(), generation=before.generation + 1), job)
    return True


def control_before(store: Store, job: str | None) -> Control | None:
    """The switch as it was; None where there was none or it is damaged (it is about to be replaced)."""
    from actordbg.capture.control import read_control

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
        return say(f"Only the job {answer['job']} follows this switch; it notices within a second.")
    say("Jobs that started with the hook notice within a second.")
    note("next: `actordbg dump status` says what they record; `actordbg dump disable` stops it")
    return note("      `actordbg status` says whether actor.py is patched (`actordbg patch` does it)")


def _say_disabled(answer: dict[str, Any]) -> None:
    say("Recording is off." if answer["changed"] else "Recording was off already.")
    if answer["changed"]:
        note("next: `actordbg dump ls` shows what was recorded")


def status(
    ctx: typer.Context,
    everything: bool = option(False, "Show processes of earlier runs too.", "--all"),
    watch: bool = option(False, "Show the status again and again, until Ctrl-C.", "--watch", "-w"),
    interval: float = option(1.0, "Seconds between two looks of --watch.", min=0.1),
) -> None:
    """Say what each process captured, dropped and sampled out.

    Says whether recording is on, and lists the processes of the current run and those of other runs that still record.
    calls = captured + dropped + sampled out + in ring, where they wait to be written. A process that ended before it could write
    all leaves them there: `dump recover` brings them. Also names the rings that dead processes left on this machine.

    Example: actordbg dump status --watch
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
