"""`actordbg ui`: the store in a browser. `actordbg attach`: the prompt of a rank at a breakpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.option import Option
from actordbg.base.units import LAST, listed
from actordbg.cli.options import store_of
from actordbg.cli.output import note, say


def ui(
    ctx: typer.Context,
    *,
    port: Annotated[int, Option(min=0, max=65535)] = 0,
    opened: Annotated[bool, Option("--open/--no-open")] = True,
) -> None:
    """Browse the store in a local web page.

    Shows runs, dumps with filters and the command that selects them, replays with their checks, matrices and comparisons.
    A column's heading sorts by it. Listens on 127.0.0.1
    only, and answers only requests with the token in the printed address. Read-only. From another machine:
    ssh -L 8700:127.0.0.1:8700 HOST, and --port 8700 there. Stop it with Ctrl-C.

    Example: actordbg ui --port 8700 --no-open

    Args:
        port: Port to listen on (default: a free port).
        opened: Open the page in a browser.
    """
    import webbrowser

    from actordbg.replay.supervise import interruptible
    from actordbg.ui.ui_server import UiServer

    server = UiServer(store_of(ctx).require(), port)
    say(server.address)
    try:
        with interruptible(), server.redirect_file() as page:  # any user can read a browser's command line
            if opened and not webbrowser.open_new_tab(page.as_uri()):
                note("no browser here: open the address above")
            server.serve()
    except KeyboardInterrupt:
        note("stopped")


def attach(ctx: typer.Context, name: str = LAST) -> None:
    """Attach to a rank at a breakpoint.

    Works for replays under --break-wait, and for training code with `actordbg.debug.breakpoint()` (or any breakpoint() under
    `actordbg run --break`). Run it in another terminal of the machine where the rank runs. Waits for the next breakpoint. Ends
    with the replay, or on Ctrl-C.

    Example: actordbg attach ppo-7b

    Args:
        name (REPLAY|RUN): Replay id, `last`, or name of a run.
    """
    from actordbg.debug import stops
    from actordbg.debug.meeting import attend
    from actordbg.records.journal import last_supervisor
    from actordbg.replay.supervise import load_spec

    store, run = store_of(ctx), stops.root() / name
    if run.is_dir():
        note(f"waiting for a breakpoint in run {name}; Ctrl-C leaves")
        mark = run / "attach"  # tells the run's ranks that a terminal waits
        mark.touch(mode=0o600)
        try:
            attend(lambda: sorted(path for path in run.iterdir() if path.is_dir()), lambda: True, note)
        finally:
            mark.unlink(missing_ok=True)
        return
    try:
        folder = store.replays / load_spec(store.require(), name).replay_id
    except StoreProblem as error:
        runs = sorted(path.name for path in stops.root().glob("*"))
        known = f"; runs with breakpoints here: {listed(runs[:8])}" if runs else ""
        raise UsageError(
            f"{name} is neither a replay nor a run with breakpoints here{known}",
            hint=error.hint if store.exists() else "start one with `actordbg run --break` or `actordbg replay --break`",
        ) from None
    if last_supervisor(folder) is None:
        raise UsageError(
            f"replay {folder.name} has ended", hint="run `actordbg replay --break before --break-wait 600` to wait at each input"
        )
    note(f"waiting for a breakpoint in replay {folder.name}; Ctrl-C leaves")
    attend(lambda: [folder], lambda: last_supervisor(folder) is not None, note)
