"""`actordbg dump status`: what each recording actor counted, from the counters that it publishes. Nothing talks to a job.

The rings of this machine are looked at as well: their books are right at any moment, also where counters could not be written
(a full disk, a kill). So whichever has counted further is shown. Of other machines' rings, the counters say where they were.
"""

from __future__ import annotations

import contextlib
import sys
import time

import typer

from actordbg.cli.options import Json, option, store_of
from actordbg.cli.output import clear_screen, emit, say_json


def status(
    ctx: typer.Context,
    everything: bool = option(False, "Show processes of earlier runs too.", "--all"),
    watch: bool = option(False, "Show the status again and again, until Ctrl-C.", "--watch", "-w"),
    interval: float = option(1.0, "Seconds between two looks of --watch.", min=0.1),
    as_json: Json = False,
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
        return emit(status_of(store, everything), say_status, as_json)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            answer = status_of(store, everything)
            if as_json:
                say_json(answer)
            else:
                clear_screen()
                say_status(answer)
            sys.stdout.flush()
            time.sleep(interval)
    return None
