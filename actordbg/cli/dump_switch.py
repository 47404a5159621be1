"""`actordbg dump enable` and `dump disable`: the switch that running jobs look at. Neither talks to a job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.cli import capture_options as opt
from actordbg.cli.options import Json, option, store_of, takes
from actordbg.cli.output import emit, note, say, say_wrapped

if TYPE_CHECKING:
    from actordbg.capture.control import Control
    from actordbg.store.layout import Store


@dataclass
class Switch:
    """The answer of `enable` and `disable`: the store, whether recording is on, and the switch as it is now.

    `job`: the one job whose own switch it is; None for the store's.
    """

    store: str
    enabled: bool
    changed: bool
    control: dict[str, Any] | None
    job: str | None = None


@takes("options", opt.CaptureOptions)
def enable(
    ctx: typer.Context, run: opt.Run = None, options: opt.CaptureOptions = opt.CaptureOptions(), as_json: Json = False
) -> None:
    """Start recording, in running jobs too.

    Makes the store if there is none. Enabling again replaces the limits and starts them anew; the run goes on unless --run
    names another. With the name of a job that `actordbg run` started, --run changes the limits of that job alone.

    Example: actordbg dump enable --run ppo-7b --on nan,exception,slow:3x --before 4 --keep 20GB
    """
    from actordbg.capture.control import control_dict, write_control

    store = store_of(ctx).create()
    name = opt.checked_run_name(run)
    job = name if name is not None and store.control_of(name).exists() else None
    previous = control_before(store, job)
    going_on = previous.run if previous is not None and previous.enabled else None
    run_name = name or going_on or opt.default_run_name()
    control = opt.control_from(options, run_name, previous.generation + 1 if previous else 1)
    write_control(store, control, job)
    emit(Switch(str(store.root), True, True, control_dict(control), job), _say_enabled, as_json)


def disable(
    ctx: typer.Context,
    run: str | None = option(None, "Only the job of this name."),
    as_json: Json = False,
) -> None:
    """Stop recording, in running jobs too.

    Jobs of `actordbg run` stop as well, unless --run names one job. Recorded dumps stay.

    Example: actordbg dump disable
    """
    from actordbg.capture.control import control_dict

    store = store_of(ctx).require()
    name = opt.checked_run_name(run)
    own = name is not None and store.control_of(name).exists()
    jobs = [name if own else None] if name is not None else [None, *job_names(store)]
    changed = [switch_off(store, job) for job in jobs]
    control = control_before(store, jobs[0])
    answer = Switch(str(store.root), False, any(changed), control_dict(control) if control else None, name if own else None)
    emit(answer, _say_disabled, as_json)


def job_names(store: Store) -> list[str]:
    """The jobs of this store that have a switch of their own."""
    return sorted(path.stem for path in store.controls.glob("*.json") if not path.name.startswith("."))


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


def _say_enabled(answer: Switch) -> None:
    assert answer.control is not None
    say(f"Recording is on: run {answer.control['run']} in {answer.store}")
    say_wrapped(f"  {opt.limits_in_words(answer.control)}", "    ")
    if answer.job:
        say(f"Only the job {answer.job} follows this switch; it notices within a second.")
        return
    say("Jobs that started with the hook notice within a second.")
    note("next: `actordbg dump status` says what they record; `actordbg dump disable` stops it")
    note("      `actordbg status` says whether actor.py is patched (`actordbg patch` does it)")


def _say_disabled(answer: Switch) -> None:
    say("Recording is off." if answer.changed else "Recording was off already.")
    if answer.changed:
        note("next: `actordbg dump ls` shows what was recorded")
