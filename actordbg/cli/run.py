"""`actordbg run`: records a job without a patched actor.py, through a module that its Python processes import at start.

The job has a switch of its own (`store/controls/<run>.json`). `dump enable --run NAME` and `dump disable --run NAME` change it
while the job runs; other jobs in the same store do not notice. Standard output belongs to COMMAND; our messages go to standard
error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import datetime, timezone
from typing import Annotated

import typer

from actordbg.base.errors import LaunchProblem
from actordbg.cli import capture_options as opt
from actordbg.cli.options import option, store_of, takes
from actordbg.cli.output import emit, note


@takes("options", opt.CaptureOptions)
def run(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The job: a program and its arguments.")],
    run: opt.Run = None,
    options: opt.CaptureOptions = opt.CaptureOptions(),
    adapter: list[str] | None = option(
        None, "Record this trainer: a name of `actordbg adapters`, or module:Class.", metavar="NAME"
    ),
    hash_weights: bool = option(False, "Hash the weights of each recorded step: slow, for a small check.", "--hash-weights"),
    leave_on: bool = option(False, "Do not switch recording off at the end: the job goes on elsewhere.", "--leave-on"),
    stops: bool = option(False, "breakpoint() in the job's code parks all ranks, for `actordbg attach`.", "--break"),
    as_json: bool = option(False, "Say at the end as JSON, on standard error, what was recorded.", "--json"),
) -> None:
    """Run a job and record it, without patching actor.py.

    For read-only images, and for a single run. COMMAND is what you would type without actordbg: torchrun, deepspeed, python, a
    script, ray job submit. Its Python processes, Ray workers on other nodes included, wrap the trainer's Actor when they import
    it. --adapter records another trainer, too (`actordbg adapters`). The exit code is that of COMMAND.

    Example: actordbg run --run ppo-7b --max-dumps 200 -- bash train_ppo.sh
    """
    from actordbg.cli.dump_status_work import process_rows, total_of, who
    from actordbg.cli.dump_switch import switch_off
    from actordbg.cli.run_work import RunAnswer, after_the_job, recovered_from_rings, say_recorded, start_recording
    from actordbg.debug.stops import expect
    from actordbg.install import command as command_line
    from actordbg.install import ray_hooks
    from actordbg.trainers.find_adapter import carried_form
    from actordbg.trainers.fitting import fit_of

    if shutil.which(command[0]) is None:
        hint = "what follows `--` is a program and its arguments"
        raise LaunchProblem(f"there is no program {command[0]}", hint=hint)
    adapters = carried_form(adapter or [])
    for why in (why for one in adapter or () for why in fit_of(one).differs):
        note(f"actordbg: as installed here, this is not recorded: {why}")
    store = store_of(ctx).create()
    name = opt.checked_run_name(run) or f"{opt.default_run_name()}-{os.urandom(2).hex()}"  # jobs of the same second differ
    environment = ray_hooks.child_environment(
        os.environ, str(store.root), name, stops=stops, adapters=adapters, hash_weights=hash_weights
    )
    known = {who(vars(row)) for row in process_rows(store, datetime.now(timezone.utc))[0]}
    start_recording(store, name, options)
    if stops:
        with contextlib.suppress(OSError):
            expect(name)
        note(f"actordbg: at a breakpoint() all ranks of this machine park; from another terminal: actordbg attach {name}")
    goes_on = False
    try:
        end = command_line.run_in_foreground(command_line.rewritten(command, ray_hooks.carried(environment)), environment)
        goes_on = leave_on or command_line.goes_on(command) or (end.interrupted and command_line.is_submission(command))
    finally:
        if not goes_on:
            switch_off(store, name)
    rows, unreadable = after_the_job(store, name, known, wait=not goes_on)
    if recovered := None if goes_on else recovered_from_rings(store, name):
        rows, unreadable = after_the_job(store, name, known, wait=False)
    answer = RunAnswer(str(store.root), name, command, end.code, not goes_on, rows, total_of(rows), unreadable, recovered)
    emit(answer, say_recorded, as_json, err=True)
    raise typer.Exit(end.code)
